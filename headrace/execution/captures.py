"""Work recorded as CUDA graphs: `Recorder` records a graph, `Capture` is a piece of work that may have one, `Buckets`
keep captures by size. Refuses: knowing what the work is, and deciding when to record it.
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
    """Records graphs that share one memory pool, outputs included. This is sound as long as all replays run on one
    stream and outputs are read there, before the next replay. On a GPU only."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)  # CUDA does not capture the default stream
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], Output]) -> Callable[[], Output] | None:
        """Call ``work``, whose launches are captured and not run; returns a function that replays them and yields the
        output, or None when there is no memory for it. Does not wait for the device or for other threads using it."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)  # the work's inputs were written on the current stream
        try:
            with torch.cuda.stream(self._stream):
                # Thread-local mode: CUDA calls of other threads that a capture forbids do not invalidate this one.
                graph.capture_begin(self._pool, "thread_local")
                try:
                    output = work()
                finally:
                    graph.capture_end()  # after an error too, or the stream would stay in capture mode
        except torch.OutOfMemoryError as error:
            logger.warning("no memory for a graph; such steps run as written: %s", error)
            return None
        current.wait_stream(self._stream)
        # The graph keeps the pool alive. ``output`` itself is dropped on return: its memory goes back to the pool,
        # where the next capture may place its own tensors.
        lent = _lend(output)

        def replay() -> Output:
            graph.replay()
            return lent

        return replay


class _Lent:
    """A tensor's bytes without ownership, in the CUDA array interface
    (https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html)."""

    def __init__(self, tensor: torch.Tensor):
        self.__cuda_array_interface__ = {
            "version": 3, "shape": (tensor.nbytes,), "typestr": "|u1", "data": (tensor.data_ptr(), False),
            "strides": None
        }


def _lend(output: Any) -> Any:
    """Non-owning tensors at the same addresses. Owning ones would keep every graph's outputs out of the shared pool,
    which is gigabytes over all sizes. Tensors that are empty or not contiguous stay as they are."""
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
    """Makes graphs; see `Recorder`."""

    def record(self, work: Callable[[], Output]) -> Callable[[], Output] | None: ...


class Capture(Generic[Output]):
    """Work on tensors at fixed addresses: recorded at the first run, then replayed. Compiling and loading kernels
    while recording is safe. A replay overwrites the output of the one before. Without a graph (no memory, or
    `NoRecorder`) the work runs as written, every time."""

    def __init__(self, work: Callable[[], Output], recorder: Records):
        self._work, self._recorder = work, recorder
        self._replay: Callable[[], Output] | None = None
        self.is_recorded = False  # or refused for good

    def run(self) -> Output:
        """Do the work."""
        if not self.is_recorded:
            self.is_recorded = True  # an attempt that fails is not repeated
            self._replay = self._recorder.record(self._work)
        # Recording launches nothing, so the first run replays, too.
        return self._work() if self._replay is None else self._replay()


class Bucket(Protocol):
    """One size of `Buckets`."""

    size: int

    @property
    def is_recorded(self) -> bool: ...

    def record(self) -> None:
        """Run the work on padding, so that it is recorded."""


B = TypeVar("B", bound=Bucket)


class Buckets(Generic[B]):
    """Work of several sizes. ``make`` is called when a size is first used."""

    def __init__(self, sizes: list[int], make: Callable[[int], B]):
        self._sizes, self._make = sorted(sizes), make
        self._made: dict[int, B] = {}

    def find(self, count: int) -> B | None:
        """The smallest bucket of at least ``count``, made if need be; None if ``count`` is beyond all sizes."""
        at = bisect_left(self._sizes, count)
        return self._get(self._sizes[at]) if at < len(self._sizes) else None

    def unrecorded(self) -> list[int]:
        """Sizes without a graph, largest first: smaller graphs then fit into the memory of the largest."""
        return [size for size in reversed(self._sizes) if size not in self._made or not self._made[size].is_recorded]

    def record(self, size: int) -> None:
        """Record a size."""
        self._get(size).record()

    @property
    def sizes(self) -> list[int]:
        """Ascending."""
        return self._sizes

    def _get(self, size: int) -> B:
        if size not in self._made:
            self._made[size] = self._make(size)
        return self._made[size]
