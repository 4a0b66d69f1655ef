"""Copies tensors to a CUDA device ahead of the consumer: threads fill pinned buffers from memory-mapped files while
earlier buffers are copied to the device on a side stream. Large tensors are split into parts for several threads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from headrace.models.weights.ahead import map_ahead

BUFFER_BYTES = 16 << 20  # of one pinned buffer, and the largest part of a tensor
AHEAD_BYTES = 512 << 20


@dataclass
class _Buffer:
    """Pinned memory; it may be written again once ``sent`` has completed."""

    data: torch.Tensor
    sent: torch.cuda.Event


@dataclass(slots=True)
class _Part:
    """A piece of a tensor that fits a buffer: uint8 views on host, see `split_bytes`, and device. ``whole`` is set on a
    tensor's last part: its name and the tensor on the device."""

    source: torch.Tensor
    target: torch.Tensor
    whole: tuple[str, torch.Tensor] | None


def copy_ahead(
    tensors: Iterable[tuple[str, torch.Tensor]], device: torch.device, *, threads: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each ``(name, tensor)`` in order with the tensor on ``device``; kernels on the caller's current stream may
    use it at once. At most ``AHEAD_BYTES`` are copied ahead of the consumer.
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
            # the device waits, not the host: one event per part of this tensor
            for event in arrivals:
                stream.wait_event(event)
            arrivals.clear()
            tensor.record_stream(stream)  # or the allocator reuses its memory before the consumer's kernels ran
            del part
            yield name, tensor
            del tensor  # frees its device memory for the next ones
    finally:
        sent.close()
        copier.drain()


def split_bytes(tensor: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """The bytes of a tensor in order, as uint8 views of up to ``most`` bytes: [bytes], or [rows, bytes] of a matrix of
    which some columns are kept, so that nothing between them is read. Other layouts are copied first."""
    if tensor.dim() == 2 and tensor.stride(1) == 1 and not tensor.is_contiguous():
        rows = tensor.view(torch.uint8)
        if rows.shape[1] <= most:
            yield from rows.split(most // rows.shape[1])
            return
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    yield from flat.split(most) if flat.numel() else (flat,)


class _Copier:
    """Pinned buffers shared by the threads, and the side stream of their copies."""

    def __init__(self, device: torch.device, num_buffers: int):
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._free: SimpleQueue[_Buffer] = SimpleQueue()
        for _ in range(num_buffers):
            data = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
            self._free.put(_Buffer(data, torch.cuda.Event()))  # an event never recorded counts as completed

    def split(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[_Part]:
        """The parts of each tensor, in order; an empty tensor has one empty part."""
        for name, tensor in tensors:
            parts = list(split_bytes(tensor, BUFFER_BYTES))
            # allocated on the side stream, which writes it; `copy_ahead` records the consumer's stream
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                target = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            flat, at = target.view(-1).view(torch.uint8), 0
            for number, source in enumerate(parts, 1):
                stop = at + source.numel()
                yield _Part(source, flat[at:stop], (name, target) if number == len(parts) else None)
                at = stop
            del target, flat

    def send(self, part: _Part) -> tuple[_Part, torch.cuda.Event]:
        """Start the copy of one part (worker thread). The event completes when the part is on the device."""
        buffer = self._free.get()  # first in, first out: the one whose copy began longest ago
        try:
            buffer.sent.synchronize()
            pinned = buffer.data[: part.source.numel()]
            # numpy releases the GIL while it copies
            pinned.view(part.source.shape).numpy()[:] = part.source.numpy()
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                part.target.copy_(pinned, non_blocking=True)
                buffer.sent.record(self._stream)
                arrived = torch.cuda.Event()
                arrived.record(self._stream)
        finally:
            self._free.put(buffer)  # its copy may still run: the next user waits for `sent`
        return part, arrived

    def drain(self) -> None:
        """Wait for running copies, before pinned memory is freed; release the side stream's cached device memory."""
        self._stream.synchronize()
        torch.cuda.empty_cache()
