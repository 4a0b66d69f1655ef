"""Work recorded as CUDA graphs: `Recorder` makes one, `Capture` is a piece of work that may have one, `Buckets` are
alike pieces by size. Refuses: knowing what the work is, and when there is time to record it.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import torch

logger = logging.getLogger(__name__)

Output = TypeVar("Output")


class Recorder:
    """Records work into one pool of memory, outputs included, which is sound as long as all replays run on one stream
    and whoever reads an output does so there, before the next one. On a GPU only."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], Output]) -> Callable[[], Output] | None:
        """Call ``work``, whose launches are written down and not run; returns what runs them and yields the output, or
        None without memory for it. Does not wait for the device, nor for what other threads do with it."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(self._pool, "thread_local")
                try:
                    output = work()
                finally:
                    graph.capture_end()
        except torch.OutOfMemoryError as error:
            logger.warning("no memory for a graph; such steps run as written: %s", error)
            return None
        current.wait_stream(self._stream)
        lent = _lend(output)

        def replay() -> Output:
            graph.replay()
            return lent

        return replay


class _Lent:
    """Bytes on a device that belong to somebody else, as the interface of CUDA arrays tells of them."""

    def __init__(self, tensor: torch.Tensor):
        self.__cuda_array_interface__ = {
            "version": 3, "shape": (tensor.nbytes,), "typestr": "|u1", "data": (tensor.data_ptr(), False),
            "strides": None
        }


def _lend(output: Any) -> Any:
    """Tensors at the same places that do not keep their memory from other graphs: outputs of all sizes would take
    gigabytes."""
    if isinstance(output, tuple):
        return tuple(_lend(part) for part in output)
    if not output.is_contiguous() or not output.numel():
        return output
    return torch.as_tensor(_Lent(output), device=output.device).view(output.dtype).view(output.shape)


class NoRecorder:
    """Records nothing: work runs as written."""

    def record(self, work: Callable[[], Output]) -> None:
        return None


class Records(Protocol):
    """What makes graphs; see `Recorder`."""

    def record(self, work: Callable[[], Output]) -> Callable[[], Output] | None: ...


class Capture(Generic[Output]):
    """Work on tensors that stay where they are: recorded when it is first wanted, and replayed. What is compiled,
    loaded or chosen at a first run may be so while it is recorded. A replay overwrites the output of the one before."""

    def __init__(self, work: Callable[[], Output], recorder: Records):
        self._work, self._recorder = work, recorder
        self._replay: Callable[[], Output] | None = None
        self.is_settled = False  # recorded, or refused for good

    def run(self) -> Output:
        """Do the work."""
        if not self.is_settled:
            self.is_settled = True  # whatever goes wrong is not tried again
            self._replay = self._recorder.record(self._work)
        return self._work() if self._replay is None else self._replay()


class Bucket(Protocol):
    """One size of `Buckets`."""

    size: int

    @property
    def is_settled(self) -> bool: ...

    def settle(self) -> None:
        """Do the work over nothing, so that it is recorded."""


B = TypeVar("B", bound=Bucket)


class Buckets(Generic[B]):
    """Work of several sizes. ``make`` is called when a size is wanted for the first time."""

    def __init__(self, sizes: list[int], make: Callable[[int], B]):
        self._sizes, self._make = sorted(sizes), make
        self._made: dict[int, B] = {}

    def find(self, count: int) -> B | None:
        """The smallest that holds so many; None if none does."""
        at = bisect_left(self._sizes, count)
        return self._get(self._sizes[at]) if at < len(self._sizes) else None

    def unsettled(self) -> list[int]:
        """Sizes that nothing is recorded for, largest first: then the smaller ones fit into its memory."""
        return [size for size in reversed(self._sizes) if size not in self._made or not self._made[size].is_settled]

    def settle(self, size: int) -> None:
        """Record a size."""
        self._get(size).settle()

    def _get(self, size: int) -> B:
        if size not in self._made:
            self._made[size] = self._make(size)
        return self._made[size]
