"""`Step`: a plan as host arrays, with the features that a path must cover to compute it. R requests, S sampled
positions.

Refuses: tensors, and knowing the paths (``paths.py``). Records are never changed, but not frozen either: a frozen one
takes three times as long to make, and these are made in every step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntFlag, auto

import numpy as np

from headrace.base.step import StepPlan
from headrace.execution.rows import (
    HAS_ADAPTER,
    HAS_ADAPTER_EXTRAS,
    HAS_GRAMMAR,
    HAS_MEDIA,
    HAS_PENALTIES,
    HAS_ROPE_OFFSET,
    HAS_RULES,
    HAS_SECOND_TEXT,
    IS_POOLED,
    IS_RANDOM,
    WANTS_LOGPROBS,
    WANTS_PROMPT_LOGPROBS,
    Rows,
)
from headrace.memory.prefix_groups import GroupedDecodes, PrefixFinder


class StepFeature(IntFlag):
    """What a step needs beyond the argmax of decodes. A path declares which of these it covers."""

    PREFILL = auto()
    """Spans whose tokens come from the host."""
    SAMPLING = auto()
    """Some row needs more than the argmax: temperature, penalties, rules, logprobs or a grammar."""
    GRAMMAR = auto()
    PROMPT_LOGPROBS = auto()
    POOLING = auto()
    DRAFTING = auto()
    """A drafter on the device runs behind the step."""
    TEXT_PAIRS = auto()
    """A row holds two texts (a cross-encoder's pair), told apart by text kinds."""
    ADAPTERS = auto()
    """A row has an adapter."""
    ADAPTER_EXTRAS = auto()
    """A row's adapter changes more than products by low-rank additions."""
    MEDIA = auto()
    """A span that is no decode begins before the end of its row's media. Behind it all axes of positions are one."""
    ROPE_OFFSETS = auto()
    """A row's tokens are rotated by other numbers than their positions."""


OF_LAST_STAGE = StepFeature.SAMPLING | StepFeature.GRAMMAR | StepFeature.PROMPT_LOGPROBS | StepFeature.POOLING
"""What only the last pipeline stage computes."""
OF_FLAGS = {
    IS_POOLED: StepFeature.POOLING, HAS_SECOND_TEXT: StepFeature.TEXT_PAIRS, HAS_ADAPTER: StepFeature.ADAPTERS,
    HAS_ADAPTER_EXTRAS: StepFeature.ADAPTER_EXTRAS, HAS_ROPE_OFFSET: StepFeature.ROPE_OFFSETS,
}
"""What a step needs if any of its rows has a flag."""


@dataclass(slots=True)
class StepShape:
    """The requests of a step as host arrays, int64. A decode with k drafts is 1 + k requests, its *entries*, one after
    the other: see `headrace.kernels.verify`.

    ``entries`` [2, R]: ``[0]`` rows, ``[1]`` the offset of an entry, 0 for other requests. ``ends`` [R]: lengths in the
    cache after the step, for entries bounds (exact on a CPU, and for rows without drafts in flight). ``lengths`` [R]
    are the tokens computed in this step; ``query_start`` [R + 1] is their prefix sum, beginning with 0.
    ``num_decodes`` counts entries; ``most_drafts`` is the largest offset. ``num_resumed``: of the decodes so many are
    spans that the plan does not count as such, the first behind those that it does; see `count_resumed`."""

    num_decodes: int
    entries: np.ndarray
    ends: np.ndarray
    lengths: np.ndarray
    query_start: np.ndarray
    most_drafts: int = 0
    num_resumed: int = 0

    @classmethod
    def of(cls, plan: StepPlan, rows: Rows) -> tuple[StepShape, list[int] | None]:
        """Read a plan; asserts what the contract of `StepPlan` promises. See `Step` for the order of spans."""
        lengths = np.array(plan.lengths, dtype=np.int64)
        owners, begins = np.array((plan.rows, plan.begins), dtype=np.int64)
        num_decodes, order = plan.num_decodes, None
        assert len(set(plan.rows)) == len(lengths) > 0, "a plan has at least one span and each row once"
        assert lengths.min() > 0, "spans have tokens"
        if num_decodes and rows.computed_len_np is not None and not plan.last_tokens:
            begins[:num_decodes] = rows.computed_len_np[owners[:num_decodes]]
        num_resumed = count_resumed(plan, rows)
        num_decodes += num_resumed
        if num_decodes == len(lengths):
            longest_first = np.argsort(-(begins + lengths), kind="stable")
            order = [int(index) for index in np.argsort(longest_first)]  # the inverse permutation
            owners, begins, lengths = owners[longest_first], begins[longest_first], lengths[longest_first]
        offsets, most_drafts = np.zeros(len(owners), dtype=np.int64), 0
        if num_decodes and lengths[:num_decodes].max() > 1:
            most_drafts = int(lengths[:num_decodes].max()) - 1
            copies = np.concatenate((lengths[:num_decodes], np.ones(len(lengths) - num_decodes, dtype=np.int64)))
            num_decodes = int(copies[:num_decodes].sum())
            firsts = np.repeat(copies.cumsum() - copies, copies)
            owners, begins, lengths = (np.repeat(a, copies) for a in (owners, begins, lengths))
            offsets = np.arange(len(owners)) - firsts
            begins[:num_decodes] += offsets[:num_decodes]
            lengths[:num_decodes] = 1
        query_start = np.concatenate(([0], lengths.cumsum()))
        entries = np.stack((owners, offsets))
        return cls(num_decodes, entries, begins + lengths, lengths, query_start, most_drafts, num_resumed), order

    def advance(self) -> StepShape:
        """The shape of the next step if the same rows decode again, without drafts."""
        return StepShape(self.num_decodes, self.entries, self.ends + 1, self.lengths, self.query_start)

    def take(self, order: np.ndarray) -> StepShape:
        """The same decodes, one token each, in another order."""
        return replace(self, entries=self.entries[:, order], ends=self.ends[order])

    @property
    def rows(self) -> np.ndarray:
        """[R]."""
        return self.entries[0]

    @property
    def begins(self) -> np.ndarray:
        """[R]: positions in the cache before the step."""
        return self.ends - self.lengths

    @property
    def num_tokens(self) -> int:
        return int(self.query_start[-1])


@dataclass(slots=True)
class SampleBatch:
    """The positions sampled in a step, as host arrays: ``entries`` [2, S] rows and offsets (see `StepShape`), with
    ``most_drafts`` as the largest offset; then, per reason for more than the argmax, the indices in [0, S) of the
    positions concerned (``constrained``: by a grammar; ``logged``: logprobs are wanted, of ``top_counts[i]`` best
    tokens and ``id_counts[i]`` named ones). The index of a sampled token in its row's output is known to the device
    alone."""

    entries: np.ndarray
    most_drafts: int
    random: np.ndarray
    penalised: np.ndarray
    ruled: np.ndarray
    constrained: np.ndarray
    logged: np.ndarray
    top_counts: list[int]
    id_counts: list[int]

    @classmethod
    def of(cls, entries: np.ndarray, most_drafts: int, state: Rows) -> SampleBatch:
        """The batch of these positions."""
        entries = np.ascontiguousarray(entries)
        rows = entries[0]
        flags = state.flags_np[rows]
        random, penalised, ruled, constrained, logged = (
            np.flatnonzero(flags & bit)
            for bit in (IS_RANDOM, HAS_PENALTIES, HAS_RULES, HAS_GRAMMAR, WANTS_LOGPROBS)
        )
        specs = [state[int(row)].sampling for row in rows[logged]]
        return cls(
            entries, most_drafts, random, penalised, ruled, constrained, logged,
            [spec.num_logprobs for spec in specs], [len(spec.logprob_ids) for spec in specs],
        )

    @property
    def rows(self) -> np.ndarray:
        """[S]."""
        return self.entries[0]

    @property
    def firsts(self) -> np.ndarray:
        """Indices in [0, S) of the first position of each row."""
        return np.flatnonzero(self.entries[1] == 0)

    @property
    def is_greedy(self) -> bool:
        """Whether every row takes the argmax."""
        return not any(map(len, (self.random, self.logged, self.penalised, self.ruled, self.constrained)))


@dataclass(slots=True)
class Step:
    """A plan as host arrays. ``samples`` [S] are the indices into ``shape`` of the requests that sample, ``batch``
    these. ``is_greedy``: all of them take the argmax. In a step of decodes alone the spans are sorted, longest first,
    so that the device's last programs are short ones; ``order[i]`` is then the index in the sorted spans of the plan's
    span i. Otherwise ``shape`` is in plan order, and ``order`` is None. ``grouped``: the decodes by the pages that they
    begin with, where many are the same; the spans of a step of decodes alone are then sorted by group first.
    ``segments`` and ``output_segments``: which tokens and which sampled positions have which adapter
    (`headrace.kernels.lora.SlotRows`), once they are packed."""

    plan: StepPlan
    shape: StepShape
    samples: np.ndarray
    batch: SampleBatch
    features: StepFeature
    is_greedy: bool
    order: list[int] | None = None
    grouped: GroupedDecodes | None = None
    segments: list[tuple[int, int, int]] = field(default_factory=list)
    output_segments: list[tuple[int, int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, plan: StepPlan, rows: Rows, prefixes: PrefixFinder | None = None) -> Step:
        """Read a plan of at least one span; raises when it computes rows that were never started. ``prefixes``: where
        decodes are grouped."""
        rows.require(np.array(plan.rows))
        shape, order = StepShape.of(plan, rows)
        grouped = None
        if prefixes is not None and not shape.most_drafts:
            decodes = slice(shape.num_decodes)
            grouped = prefixes.find(shape.rows[decodes], shape.ends[decodes], sorts=order is not None)
        if order is not None and grouped is not None and grouped.order is not None:
            shape, order = shape.take(grouped.order), [int(i) for i in np.argsort(grouped.order)[order]]
        if order is not None:
            samples = np.arange(shape.num_decodes)
        else:
            # entries of decodes come first, and all sample
            spans = np.flatnonzero(plan.samples[plan.num_decodes + shape.num_resumed :])
            samples = np.concatenate((np.arange(shape.num_decodes), shape.num_decodes + spans))
        batch = SampleBatch.of(shape.entries[:, samples], shape.most_drafts, rows)
        features = _find_features(shape, batch, rows)
        if plan.num_proposals:
            features |= StepFeature.DRAFTING
        return cls(plan, shape, samples, batch, features, batch.is_greedy, order, grouped)

    def follow(self, plan: StepPlan, rows: Rows, prefixes: PrefixFinder | None = None) -> Step:
        """Read the plan that follows this one. Where the same rows decode again, every length grows by one and the rest
        is reused: the sorted order still holds, and flags are those of before, since a row that was started in between
        would have had a prefill step in between."""
        num_spans = len(plan.rows)
        is_same = self.order is not None and plan.num_decodes == num_spans and plan.rows == self.plan.rows
        # Neither step has drafts: every span of both is one token.
        is_same = is_same and plan.num_proposals == self.plan.num_proposals
        is_same = is_same and not (prefixes is not None and prefixes.has_changed)
        if not is_same or self.shape.most_drafts or sum(plan.lengths) != num_spans:
            return Step.of(plan, rows, prefixes)
        if plan.begins != [b + 1 for b in self.plan.begins]:
            return Step.of(plan, rows, prefixes)
        return Step(
            plan, self.shape.advance(), self.samples, self.batch, self.features, self.is_greedy, self.order,
            self.grouped,
        )


def count_resumed(plan: StepPlan, rows: Rows) -> int:
    """How many spans behind a plan's decodes are decodes but for where their token comes from, which is the host: the
    last token of a request whose others are in the cache, as behind a prefix hit, or pages that came from another
    engine. Steps with a chunk in place of it take longer for all rows, the more so the longer the context is."""
    if plan.num_proposals:  # drafters read the tokens of chunks
        return 0
    count = 0
    for span in range(plan.num_decodes, len(plan.rows)):
        row, begin = plan.rows[span], plan.begins[span]
        if plan.lengths[span] > 1 or not plan.samples[span] or begin < max(1, rows.media_end_np[row]):
            break
        count += 1
    return count


def _find_features(shape: StepShape, batch: SampleBatch, rows: Rows) -> StepFeature:
    features, flags = StepFeature(0), rows.flags_np[shape.rows]  # flags [R]
    # A decode takes its input from the device; any other span counts as prefill.
    if shape.num_decodes < len(flags):
        features |= StepFeature.PREFILL
    if not batch.is_greedy:
        features |= StepFeature.SAMPLING
    if len(batch.constrained):
        features |= StepFeature.GRAMMAR
    # Position 0 has no prompt logprob, and the last prompt token predicts output.
    if ((flags & WANTS_PROMPT_LOGPROBS > 0) & (rows.prompt_len_np[shape.rows] > shape.begins + 1)).any():
        features |= StepFeature.PROMPT_LOGPROBS
    stated = int(np.bitwise_or.reduce(flags))
    for flag, feature in OF_FLAGS.items():
        if stated & flag:
            features |= feature
    with_media = np.flatnonzero(flags[shape.num_decodes :] & HAS_MEDIA) + shape.num_decodes
    if len(with_media) and (shape.begins[with_media] < rows.media_end_np[shape.rows[with_media]]).any():
        features |= StepFeature.MEDIA
    return features
