"""Work recorded as CUDA graphs: `Recorder` makes one, `Capture` is a piece of work that may have one, `Buckets` have
one for each size. Refuses: knowing what the work is, and when there is time to record it.
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
    """Records work into one pool of memory, outputs included. This is sound as long as all replays run on one
    stream and outputs are read there, before the next replay. On a GPU only."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], Output]) -> Callable[[], Output] | None:
        """Call ``work``, whose launches are captured and not run; returns a function that replays them and yields the
        output, or None when there is no memory for it. Does not wait for the device or for other threads using it."""
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
    """Device bytes owned by another tensor, in the CUDA array interface."""

    def __init__(self, tensor: torch.Tensor):
        self.__cuda_array_interface__ = {
            "version": 3, "shape": (tensor.nbytes,), "typestr": "|u1", "data": (tensor.data_ptr(), False),
            "strides": None
        }


def _lend(output: Any) -> Any:
    """Tensors at the same addresses that do not own their memory, so that other graphs may use it: outputs of all sizes
    would take gigabytes."""
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
    """Work on tensors that stay where they are: recorded at the first run, then replayed. Compiling and loading kernels
    while recording is safe. A replay overwrites the output of the one before."""

    def __init__(self, work: Callable[[], Output], recorder: Records):
        self._work, self._recorder = work, recorder
        self._replay: Callable[[], Output] | None = None
        self.is_recorded = False  # or refused for good

    def run(self) -> Output:
        """Do the work."""
        if not self.is_recorded:
            self.is_recorded = True  # an attempt that fails is not repeated
            self._replay = self._recorder.record(self._work)
        return self._work() if self._replay is None else self._replay()


class Bucket(Protocol):
    """One size of `Buckets`."""

    size: int

    @property
    def is_recorded(self) -> bool: ...

    def record(self) -> None:
        """Do the work on padding, so that it is recorded."""


B = TypeVar("B", bound=Bucket)


class Buckets(Generic[B]):
    """Work of several sizes. ``make`` is called when a size is first used."""

    def __init__(self, sizes: list[int], make: Callable[[int], B]):
        self._sizes, self._make = sorted(sizes), make
        self._made: dict[int, B] = {}

    def find(self, count: int) -> B | None:
        """The smallest that holds so many; None if none does."""
        at = bisect_left(self._sizes, count)
        return self._get(self._sizes[at]) if at < len(self._sizes) else None

    def unrecorded(self) -> list[int]:
        """Sizes without a graph, largest first: then the smaller ones fit into its memory."""
        return [size for size in reversed(self._sizes) if size not in self._made or not self._made[size].is_recorded]

    def record(self, size: int) -> None:
        """Record a size."""
        self._get(size).record()

    def _get(self, size: int) -> B:
        if size not in self._made:
            self._made[size] = self._make(size)
        return self._made[size]
