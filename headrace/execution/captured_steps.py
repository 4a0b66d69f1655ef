"""`CapturedSteps`: the steps of one runner that replay a graph, and when their graphs are made: all at the start, or
each when it is first wanted and in idle moments. Refuses: what a graph computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.execution.captures import Buckets, Records
from headrace.execution.graphs import DecodeGraph, DecodeState
from headrace.execution.inputs import InputBuilder, StepShape
from headrace.execution.step_graphs import StepGraph, takes_graph
from headrace.layers.model import ServedModel


@dataclass(frozen=True)
class GraphSizes:
    """Buckets: requests of steps of decodes alone, tokens of other steps."""

    decodes: list[int]
    tokens: list[int]

    def __len__(self) -> int:
        return len(self.decodes) + len(self.tokens)


class CapturedSteps:
    """A step whose bucket has no graph yet is recorded, in the bucket's room, and then replayed like those that
    follow."""

    def __init__(
        self, sizes: GraphSizes, model: ServedModel, state: DecodeState, inputs: InputBuilder, recorder: Records
    ):
        self._decodes = Buckets(sizes.decodes, lambda size: DecodeGraph(size, model, state, recorder))
        self._others = Buckets(sizes.tokens, lambda size: StepGraph(size, model, inputs, recorder))
        # recorded in this order: logits are the largest single tensor, and what the others need fits into its place
        self._kinds: tuple[Buckets[DecodeGraph] | Buckets[StepGraph], ...] = (self._decodes, self._others)

    def find_decodes(self, num_requests: int) -> DecodeGraph | None:
        """The bucket of a step of decodes alone."""
        return self._decodes.find(num_requests)

    def find(self, shape: StepShape) -> StepGraph | None:
        """The bucket of any other step, if it is one for graphs."""
        return self._others.find(shape.num_tokens) if takes_graph(shape) else None

    def record_all(self, advance: Callable[[], None]) -> None:
        """Record every bucket; ``advance`` is called after each."""
        while self.record_next():
            advance()

    def record_largest(self) -> None:
        """Record the largest of each kind, so that the others fit into their memory whenever they come."""
        for buckets in self._kinds:
            for size in buckets.unsettled()[:1]:
                buckets.settle(size)

    def record_next(self) -> bool:
        """Record one bucket that has no graph; False when there is none."""
        for buckets in self._kinds:
            for size in buckets.unsettled()[:1]:
                buckets.settle(size)
                return True
        return False
