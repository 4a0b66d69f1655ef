"""Copies tensors to a CUDA device ahead of their consumer: threads fill pinned buffers from mapped files while earlier
buffers travel on a stream of their own. A large tensor is the work of several threads."""

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


@dataclass(slots=True)
class _Part:
    """As much of a tensor as fits a buffer, in bytes. ``whole`` is set on a tensor's last part: its name and its place
    on the device."""

    source: torch.Tensor
    target: torch.Tensor
    whole: tuple[str, torch.Tensor] | None


def copy_ahead(
    tensors: Iterable[tuple[str, torch.Tensor]], device: torch.device, *, threads: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each ``(name, tensor)`` with the tensor on ``device``, in order, ready for the current stream.

    At most ``AHEAD_BYTES`` are on their way before they are asked for.
    """
    copier = _Copier(device, num_buffers=threads + 2)
    sent = map_ahead(
        copier.send, copier.split(tensors), cost=lambda part: part.source.numel(), budget=AHEAD_BYTES, threads=threads
    )
    arrivals: list[torch.cuda.Event] = []
    try:
        for part, arrived in sent:
            arrivals.append(arrived)
            if part.whole is None:
                continue
            name, tensor = part.whole
            stream = torch.cuda.current_stream(device)
            for event in arrivals:
                stream.wait_event(event)
            arrivals.clear()
            tensor.record_stream(stream)
            del part
            yield name, tensor
            del tensor  # so that its memory is free for the next ones once the consumer's work is done
    finally:
        sent.close()
        copier.drain()


class _Copier:
    """Pinned buffers shared by the threads, and the stream their copies run on."""

    def __init__(self, device: torch.device, num_buffers: int):
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._free: SimpleQueue[_Buffer] = SimpleQueue()
        for _ in range(num_buffers):
            data = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
            self._free.put(_Buffer(data, torch.cuda.Event()))

    def split(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[_Part]:
        """The parts of each tensor, in order; one that is empty has a part too."""
        for name, tensor in tensors:
            source = tensor.contiguous().view(-1).view(torch.uint8)
            # Allocated for the copying stream, which alone writes it; the consumer's stream is recorded when it is
            # handed on.
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                target = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            flat, end = target.view(-1).view(torch.uint8), source.numel()
            for start in range(0, max(end, 1), BUFFER_BYTES):
                stop = start + BUFFER_BYTES
                yield _Part(source[start:stop], flat[start:stop], (name, target) if stop >= end else None)
            del target, flat

    def send(self, part: _Part) -> tuple[_Part, torch.cuda.Event]:
        """Send one part; runs on a worker thread. The event marks its arrival."""
        buffer = self._free.get()
        try:
            buffer.sent.synchronize()
            pinned = buffer.data[: part.source.numel()]
            pinned.numpy()[:] = part.source.numpy()  # numpy's copy leaves the interpreter to other threads
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                part.target.copy_(pinned, non_blocking=True)
                buffer.sent.record(self._stream)
                arrived = torch.cuda.Event()
                arrived.record(self._stream)
        finally:
            self._free.put(buffer)
        return part, arrived

    def drain(self) -> None:
        """Wait for the copies under way, only then may pinned memory be freed; return this stream's memory to all."""
        self._stream.synchronize()
        torch.cuda.empty_cache()
