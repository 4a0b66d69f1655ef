"""Copies tensors to a CUDA device ahead of their consumer: threads fill pinned buffers from mapped files while earlier
buffers travel on a stream of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from headrace.models.weights.ahead import map_ahead

BUFFER_BYTES = 16 << 20
AHEAD_BYTES = 512 << 20


@dataclass
class _Buffer:
    """Pinned memory, free again when ``sent`` has happened."""

    data: torch.Tensor
    sent: torch.cuda.Event


def copy_ahead(tensors: Iterable[tuple[str, torch.Tensor]], device: torch.device, *, threads: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each ``(name, tensor)`` with the tensor on ``device``, in order, ready for the current stream.

    At most ``AHEAD_BYTES`` of tensors are on the device before they are asked for (a larger one is alone).
    """
    copier = _Copier(device, num_buffers=threads + 2)
    moved = map_ahead(copier.copy, tensors, cost=lambda item: item[1].nbytes, budget=AHEAD_BYTES, threads=threads)
    try:
        for name, tensor, arrived in moved:
            stream = torch.cuda.current_stream(device)
            stream.wait_event(arrived)
            tensor.record_stream(stream)
            yield name, tensor
            del tensor  # so that its memory is free for the next ones once the consumer's work is done
    finally:
        moved.close()
        copier.drain()


class _Copier:
    """Pinned buffers shared by the threads, and the stream their copies run on."""

    def __init__(self, device: torch.device, num_buffers: int):
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._free: SimpleQueue[_Buffer] = SimpleQueue()
        for _ in range(num_buffers):
            data = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
            self._free.put(_Buffer(data, torch.cuda.Event()))

    def copy(self, item: tuple[str, torch.Tensor]) -> tuple[str, torch.Tensor, torch.cuda.Event]:
        """Send one tensor; runs on a worker thread. The event marks its arrival."""
        name, tensor = item
        source = tensor.contiguous().view(-1).view(torch.uint8)
        # Allocated for the copying stream, which alone writes it; the consumer's stream is recorded when it is handed on.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            target = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            flat = target.view(-1).view(torch.uint8)
            for start in range(0, source.numel(), BUFFER_BYTES):
                self._send(source[start : start + BUFFER_BYTES], flat[start : start + BUFFER_BYTES])
            arrived = torch.cuda.Event()
            arrived.record(self._stream)
        return name, target, arrived

    def _send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        buffer = self._free.get()
        try:
            buffer.sent.synchronize()
            pinned = buffer.data[: source.numel()]
            pinned.numpy()[:] = source.numpy()  # numpy's copy leaves the interpreter to other threads
            target.copy_(pinned, non_blocking=True)
            buffer.sent.record(self._stream)
        finally:
            self._free.put(buffer)

    def drain(self) -> None:
        """Wait for the copies under way, only then may pinned memory be freed; return this stream's memory to all."""
        self._stream.synchronize()
        torch.cuda.empty_cache()
