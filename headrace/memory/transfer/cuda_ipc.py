"""`CudaIpc`: agents of one host map memory of each other's GPUs and copy from one to the other, by NVLink or PCIe, or
within one GPU. Pages never pass through the host. Bytes have no checksums: the links and memories of GPUs that can do
this check their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from headrace.base.errors import ConfigError, TransferFailed
from headrace.memory.transfer.contract import AnyRegion, Copy, refuse_unknown
from headrace.memory.transfer.device_region import DeviceCopies, DeviceRegion, DriverError, read_region_bytes
from headrace.memory.transfer.door import Door, take_descriptor


class CudaDestination:
    """A peer's region, mapped for our GPU. It stays valid when the peer dies."""

    def __init__(self, region: DeviceRegion, peer: DeviceRegion):
        self._region, self._peer = region, peer
        self._copies = DeviceCopies(region.driver)

    def write(self, copies: Sequence[Copy]) -> None:
        """See `Destination`."""
        for copy in copies:
            self._region.check(copy.begin, copy.num_bytes)
            self._peer.check(copy.target, copy.num_bytes)
        here, there = self._region.address, self._peer.address
        self._copies.copy([(here + copy.begin, there + copy.target, copy.num_bytes) for copy in copies])

    def close(self) -> None:
        """See `Destination`."""
        self._copies.close()
        self._peer.close()


class CudaIpc:
    """See `TransferBackend`. Option ``gib``: GiB of each GPU's memory in which pages wait to leave or have arrived."""

    memory: ClassVar[Literal["device"]] = "device"

    def __init__(self, region: AnyRegion, options: Mapping[str, str]):
        refuse_unknown(options, ("gib",))
        read_region_bytes(options)
        if not isinstance(region, DeviceRegion):
            raise ConfigError(
                "the transfer backend cuda-ipc is for engines on GPUs; on CPUs take shared-memory",
                param="disaggregation_transfer_backend"
            )
        self._region, self._door = region, Door(region)

    def handle(self) -> bytes:
        """See `TransferBackend`."""
        return self._door.handle

    def connect(self, handle: bytes) -> CudaDestination:
        """See `TransferBackend`."""
        descriptor, num_bytes = take_descriptor(handle)
        peer = DeviceRegion.open(descriptor, num_bytes, self._region.driver.device)
        try:
            return CudaDestination(self._region, peer)
        except DriverError as error:
            peer.close()
            raise TransferFailed(f"the GPU has no stream for copies: {error}") from error

    def close(self) -> None:
        """See `TransferBackend`."""
        self._door.close()
