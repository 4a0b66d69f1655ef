"""Steps with prefill in them captured as CUDA graphs, one per bucket of tokens: where computing a step takes less time
than launching its kernels, as with small models, short prompts, and a few new requests among many that decode.

Refuses: decodes alone, which have better graphs of their own; long chunks, whose attention is worth a kernel chosen for
them; and steps so large that launching them costs nothing. T tokens, D hidden width.
"""

from __future__ import annotations

import torch

from headrace.execution.captures import Capture, Records
from headrace.execution.inputs import InputBuilder, StepShape
from headrace.layers.model import ServedModel

SIZES = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
MOST_FLOPS = 1e13
"""Of a step: twice its tokens times the model's parameters. A larger one keeps a device busy for longer than it takes
to launch its kernels one by one, some 15 ms."""
LONGEST_SPAN = 1024
LONGEST_DECODE, FEW_DECODES = 4096, 64
"""A captured step does not split a decode's keys among programs: not for a few that have many."""


def step_sizes(max_tokens: int, num_parameters: int) -> list[int]:
    """Buckets of tokens worth a graph, ascending, for steps of at most ``max_tokens``."""
    most = min(max_tokens, MOST_FLOPS / (2 * num_parameters))
    sizes = [size for size in SIZES if size <= most]
    return [*sizes, max_tokens] if sizes and sizes[-1] < max_tokens == most else sizes


def takes_graph(shape: StepShape) -> bool:
    """Whether a step that fits a bucket is one for graphs."""
    decodes = shape.ends[: shape.num_decodes]
    has_few_long = 0 < len(decodes) < FEW_DECODES and int(decodes.max()) > LONGEST_DECODE
    return int(shape.lengths.max()) <= LONGEST_SPAN and not has_few_long


class StepGraph:
    """One bucket. Its input is what `InputBuilder.fill` leaves in the static tensors; hidden states [T, D] are its
    output, which the next run of any bucket may overwrite."""

    def __init__(self, size: int, model: ServedModel, inputs: InputBuilder, recorder: Records):
        self.size, self._model, self._inputs = size, model, inputs
        self._capture = Capture(self._compute, recorder)

    @property
    def is_settled(self) -> bool:
        """See `Bucket`, here and below."""
        return self._capture.is_settled

    def settle(self) -> None:
        self._inputs.clear(self.size)
        self._capture.run()

    def run(self, shape: StepShape, sent: dict[str, torch.Tensor]) -> torch.Tensor:
        """Hidden states [T, D] of a step's tokens."""
        self._inputs.fill(shape, sent, self.size)
        return self._capture.run()[: shape.num_tokens]

    def _compute(self) -> torch.Tensor:
        return self._model.forward(self._inputs.open_batch(self.size))
