"""Memory of one process that other processes of the host write: CUDA's IPC handles, through the driver API."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_size_t, c_ubyte, c_uint, c_uint64

import torch

from headrace.kernels.cuda_source import call_driver

HANDLE_BYTES = 64
ENABLE_PEER_ACCESS = 1
"""``CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS``"""


class _Handle(ctypes.Structure):
    _fields_ = (("data", c_ubyte * HANDLE_BYTES),)


class Mailbox:
    """Zeroed memory on a device, and that of peers that this process has opened. ``address`` is its own."""

    def __init__(self, device: torch.device, num_bytes: int):
        self._device, self.num_bytes = device, num_bytes
        self._opened: list[int] = []
        place = c_uint64()
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # creates the context
            call_driver("cuMemAlloc_v2", byref(place), c_size_t(num_bytes))
            self.address = place.value
            call_driver("cuMemsetD8_v2", place, c_ubyte(0), c_size_t(num_bytes))
            torch.cuda.synchronize()

    def handle(self) -> bytes:
        """What `open` takes in another process."""
        handle = _Handle()
        call_driver("cuIpcGetMemHandle", byref(handle), c_uint64(self.address))
        return bytes(handle.data)

    def open(self, handle: bytes) -> int:
        """The address at which this process, and this device, can write a peer's mailbox. Raises `CudaSourceError`
        where they cannot: no peer access, another host, a device that this process does not see."""
        place = c_uint64()
        with torch.cuda.device(self._device):
            call_driver(
                "cuIpcOpenMemHandle_v2", byref(place), _Handle.from_buffer_copy(handle), c_uint(ENABLE_PEER_ACCESS)
            )
        self._opened.append(place.value)
        return place.value

    def close(self) -> None:
        """Give up peers' memory and free this one's, which peers keep in use until they close too."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            while self._opened:
                call_driver("cuIpcCloseMemHandle", c_uint64(self._opened.pop()))
            if self.address:
                call_driver("cuMemFree_v2", c_uint64(self.address))
                self.address = 0
