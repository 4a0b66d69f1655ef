"""Steps with prefill in them captured as CUDA graphs, one per bucket of tokens: where computing a step takes less time than
launching its kernels, as with small models, short prompts, and a few new requests among many that decode.

Refuses: decodes alone, which have better graphs of their own; long chunks, whose attention is worth a kernel chosen for
them; and steps so large that launching them costs nothing. T tokens, D hidden width.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from headrace.execution.inputs import InputBuilder, StepShape
from headrace.models.family import ServedModel

SIZES = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
MOST_FLOPS = 1e13
"""Of a step: twice its tokens times the model's parameters. A larger one keeps a device busy for longer than it takes to
launch its kernels one by one, some 15 ms."""
LONGEST_SPAN = 1024
LONGEST_DECODE, FEW_DECODES = 4096, 64
"""A captured step does not split a decode's keys among programs: not for a few that have many."""


def step_sizes(max_tokens: int, num_parameters: int) -> list[int]:
    """Buckets of tokens worth a graph, ascending, for steps of at most ``max_tokens``."""
    most = min(max_tokens, MOST_FLOPS / (2 * num_parameters))
    sizes = [size for size in SIZES if size <= most]
    return [*sizes, max_tokens] if sizes and sizes[-1] < max_tokens == most else sizes


class StepGraph:
    """One bucket. Its input is what `InputBuilder.fill` left in the static tensors; ``hidden`` [T, D] is its output, which
    the next replay of any bucket overwrites."""

    def __init__(self, size: int, model: ServedModel, inputs: InputBuilder):
        self.size, self._model, self._inputs = size, model, inputs
        self._graph: torch.cuda.CUDAGraph | None = None
        self._hidden: torch.Tensor | None = None

    def capture(self, pool: tuple[int, int]) -> None:
        """Run once to compile and choose what must be, then capture into the shared memory pool."""
        self._run()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._hidden = self._run()

    def replay(self, shape: StepShape, sent: dict[str, torch.Tensor]) -> torch.Tensor:
        """Hidden states [T, D] of a step's tokens."""
        assert self._graph is not None and self._hidden is not None, "captured before it is replayed"
        self._inputs.fill(shape, sent, self.size)
        self._graph.replay()
        return self._hidden[: shape.num_tokens]

    def _run(self) -> torch.Tensor:
        return self._model.forward(self._inputs.open_batch(self.size))


class StepGraphs:
    """All buckets of one runner, captured largest first so that the smaller ones fit into its memory."""

    def __init__(self, model: ServedModel, inputs: InputBuilder):
        self._model, self._inputs = model, inputs
        self._graphs: dict[int, StepGraph] = {}
        self._sizes: list[int] = []

    @torch.inference_mode()
    def capture(self, sizes: list[int], pool: tuple[int, int], advance: Callable[[], None]) -> None:
        """Capture buckets; ``advance`` is called after each."""
        for size in sorted(sizes, reverse=True):
            self._graphs[size] = graph = StepGraph(size, self._model, self._inputs)
            graph.capture(pool)
            advance()
        self._sizes = sorted(self._graphs)

    def find(self, shape: StepShape) -> StepGraph | None:
        """The smallest bucket that holds a step, if it is one for graphs."""
        at = int(np.searchsorted(self._sizes, shape.num_tokens))
        if at == len(self._sizes) or int(shape.lengths.max()) > LONGEST_SPAN:
            return None
        decodes = shape.ends[: shape.num_decodes]
        if 0 < len(decodes) < FEW_DECODES and int(decodes.max()) > LONGEST_DECODE:
            return None
        return self._graphs[self._sizes[at]]
