"""`Step`: a plan as host arrays, with the features that a path must cover to compute it. R requests, S sampled
positions.

Refuses: tensors, and knowing the paths (``paths.py``). Records are never changed, but not frozen either: a frozen one
takes three times as long to make, and these are made in every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag, auto

import numpy as np

from headrace.base.step import StepPlan
from headrace.execution.rows import (
    HAS_GRAMMAR,
    HAS_PENALTIES,
    HAS_RULES,
    HAS_SECOND_TEXT,
    IS_POOLED,
    IS_RANDOM,
    WANTS_LOGPROBS,
    WANTS_PROMPT_LOGPROBS,
    Rows,
)


class StepFeature(IntFlag):
    """What a step needs beyond the argmax of decodes. A path declares which of these it covers."""

    PREFILL = auto()
    """Spans whose tokens come from the host."""
    SAMPLING = auto()
    """Some row needs more than the argmax: temperature, penalties, rules, logprobs or a grammar."""
    GRAMMAR = auto()
    PROMPT_LOGPROBS = auto()
    POOLING = auto()
    TEXT_PAIRS = auto()
    """A row holds two texts (a cross-encoder's pair), told apart by text kinds."""


@dataclass(slots=True)
class StepShape:
    """The spans of a step as host arrays, int64. ``requests`` [2, R]: ``[0]`` rows, ``[1]`` their lengths in the cache
    after the step. ``lengths`` [R] are the tokens computed in this step; ``query_start`` [R + 1] is their prefix sum,
    beginning with 0."""

    num_decodes: int
    requests: np.ndarray
    lengths: np.ndarray
    query_start: np.ndarray

    @classmethod
    def of(cls, plan: StepPlan) -> StepShape:
        """Read a plan; asserts what the contract of `StepPlan` promises."""
        lengths = np.array(plan.lengths, dtype=np.int64)
        requests = np.array((plan.rows, plan.begins), dtype=np.int64)
        assert len(set(plan.rows)) == len(lengths) > 0, "a plan has at least one span and each row once"
        assert lengths.min() > 0 and (lengths[: plan.num_decodes] == 1).all(), "spans have tokens, decodes exactly one"
        requests[1] += lengths
        return cls(plan.num_decodes, requests, lengths, np.concatenate(([0], lengths.cumsum())))

    @property
    def rows(self) -> np.ndarray:
        """[R]."""
        return self.requests[0]

    @property
    def ends(self) -> np.ndarray:
        """[R]: positions in the cache after the step."""
        return self.requests[1]

    @property
    def begins(self) -> np.ndarray:
        """[R]: positions in the cache before the step."""
        return self.requests[1] - self.lengths

    @property
    def num_tokens(self) -> int:
        return int(self.query_start[-1])


@dataclass(slots=True)
class SampleBatch:
    """The rows that sample in a step, as host arrays: ``rows`` [S]; ``output_lens`` [S], the index of the sampled token
    in the row's output; then, per reason for more than the argmax, the indices in [0, S) of the rows concerned
    (``constrained``: by a grammar; ``logged``: logprobs are wanted, of ``top_counts[i]`` best tokens and
    ``id_counts[i]`` named ones)."""

    rows: np.ndarray
    output_lens: np.ndarray
    random: np.ndarray
    penalised: np.ndarray
    ruled: np.ndarray
    constrained: np.ndarray
    logged: np.ndarray
    top_counts: list[int]
    id_counts: list[int]

    @classmethod
    def of(cls, rows: np.ndarray, ends: np.ndarray, state: Rows) -> SampleBatch:
        """``ends`` [S]: position of each token to sample."""
        flags = state.flags_np[rows]
        random, penalised, ruled, constrained, logged = (
            np.flatnonzero(flags & bit)
            for bit in (IS_RANDOM, HAS_PENALTIES, HAS_RULES, HAS_GRAMMAR, WANTS_LOGPROBS)
        )
        specs = [state[int(row)].sampling for row in rows[logged]]
        return cls(
            rows, ends - state.prompt_len_np[rows], random, penalised, ruled, constrained, logged,
            [spec.num_logprobs for spec in specs], [len(spec.logprob_ids) for spec in specs],
        )

    def advance(self) -> SampleBatch:
        """The batch of the next step if the same rows decode again."""
        return SampleBatch(
            self.rows, self.output_lens + 1, self.random, self.penalised, self.ruled, self.constrained, self.logged,
            self.top_counts, self.id_counts,
        )

    @property
    def is_greedy(self) -> bool:
        """Whether every row takes the argmax."""
        return not any(map(len, (self.random, self.logged, self.penalised, self.ruled, self.constrained)))


@dataclass(slots=True)
class Step:
    """A plan as host arrays. ``samples`` [S] are the indices into ``shape`` of the spans that sample, ``batch`` their
    rows. ``is_greedy``: all of them take the argmax. In a step of decodes alone the spans are sorted, longest first, so
    that the device's last programs are short ones; ``order[i]`` is then the index in ``shape`` of the plan's span i.
    Otherwise ``shape`` is in plan order, and ``order`` is None."""

    plan: StepPlan
    shape: StepShape
    samples: np.ndarray
    batch: SampleBatch
    features: StepFeature
    is_greedy: bool
    order: list[int] | None = None

    @classmethod
    def of(cls, plan: StepPlan, rows: Rows) -> Step:
        """Read a plan of at least one span; raises when it computes rows that were never started."""
        shape, order = StepShape.of(plan), None
        rows.require(shape.rows)
        if plan.num_decodes == len(plan.rows):
            longest_first = np.argsort(-shape.ends, kind="stable")
            order = [int(index) for index in np.argsort(longest_first)]  # the inverse permutation
            shape = StepShape(
                shape.num_decodes, np.ascontiguousarray(shape.requests[:, longest_first]), shape.lengths,
                shape.query_start
            )
            samples = np.arange(len(order))
        else:
            samples = np.flatnonzero(plan.samples)
        batch = SampleBatch.of(shape.rows[samples], shape.ends[samples], rows)
        return cls(plan, shape, samples, batch, _find_features(shape, batch, rows), batch.is_greedy, order)

    def follow(self, plan: StepPlan, rows: Rows) -> Step:
        """Read the plan that follows this one. Where the same rows decode again, every length grows by one and the rest
        is reused: the sorted order still holds, and flags are those of before, since a row that was started in between
        would have had a prefill step in between."""
        # Equal rows and begins do not suffice: a span behind forced tokens is a prefill and may have any length.
        are_decodes = self.order is not None and plan.num_decodes == len(plan.rows)
        if not are_decodes or plan.rows != self.plan.rows or plan.begins != [b + 1 for b in self.plan.begins]:
            return Step.of(plan, rows)
        requests = self.shape.requests.copy()
        requests[1] += 1
        shape = StepShape(self.shape.num_decodes, requests, self.shape.lengths, self.shape.query_start)
        return Step(plan, shape, self.samples, self.batch.advance(), self.features, self.is_greedy, self.order)


def _find_features(shape: StepShape, batch: SampleBatch, rows: Rows) -> StepFeature:
    features, flags = StepFeature(0), rows.flags_np[shape.rows]  # flags [R]
    # A decode of one token takes its input from the device; any other span counts as prefill.
    if shape.num_decodes < len(flags):
        features |= StepFeature.PREFILL
    if not batch.is_greedy:
        features |= StepFeature.SAMPLING
    if len(batch.constrained):
        features |= StepFeature.GRAMMAR
    # Position 0 has no prompt logprob, and the last prompt token predicts output.
    if ((flags & WANTS_PROMPT_LOGPROBS > 0) & (rows.prompt_len_np[shape.rows] > shape.begins + 1)).any():
        features |= StepFeature.PROMPT_LOGPROBS
    if (flags & IS_POOLED).any():
        features |= StepFeature.POOLING
    if (flags & HAS_SECOND_TEXT).any():
        features |= StepFeature.TEXT_PAIRS
    return features
