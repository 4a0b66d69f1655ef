"""`StepPlan` and `StepResult`: the only records that pass between scheduling (integers) and execution (tensors).

Both are frozen and serialisable: with tensor parallelism the plan is broadcast to every rank. R: spans of a step.
"""

from __future__ import annotations

import msgspec

from headrace.base.pooling import PoolingSpec
from headrace.base.sampling import SamplingSpec


class RowStart(msgspec.Struct, frozen=True, array_like=True):
    """A request enters (or, after a retraction, re-enters) a row of the device-side request state.

    ``token_ids`` are all tokens known so far: the prompt and, on re-entry, the output too; ``prompt_len`` says where
    output begins (penalties, min_tokens and seeds count from there). With ``pooling`` the row samples no token: its
    result is made of its hidden states, and due in the step that computes its last token.
    """

    row: int
    request_id: str
    token_ids: list[int]
    prompt_len: int
    sampling: SamplingSpec
    pooling: PoolingSpec | None = None


class RowGrowth(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of a row that became known after its `RowStart`, at positions from ``start`` on. They are the input of
    later spans of the row that are not decodes."""

    row: int
    start: int
    token_ids: list[int]


class PageAppend(msgspec.Struct, frozen=True, array_like=True):
    """Write ``pages`` into the row's page table of cache group ``group``, from entry ``start`` on."""

    group: int
    row: int
    start: int
    pages: list[int]


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """What one step shall do. Applied in this order: releases, starts, growths, appends, then the spans are computed.

    Spans are parallel lists of length R; a row occurs at most once. Span i computes positions ``[begins[i], begins[i] +
    lengths[i])`` of row ``rows[i]``; all earlier positions are in the cache. The first ``num_decodes`` spans have
    length 1 and take their input token from device memory, where the previous step's sampler wrote it (with two plans
    in flight the host does not know it yet). The other spans take tokens from their row's `RowStart`, or a `RowGrowth`
    since. ``samples[i]`` is 1 when a token is sampled after the span's last position, 0 for a prefill chunk that
    does not reach the end and for rows with ``pooling``; decodes always sample.
    """

    step_id: int
    num_decodes: int
    rows: list[int]  # [R]
    begins: list[int]  # [R], positions
    lengths: list[int]  # [R], tokens
    samples: list[int]  # [R], 0 or 1
    releases: list[int] = []  # rows
    starts: list[RowStart] = []
    appends: list[PageAppend] = []
    growths: list[RowGrowth] = []


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities at one position, taken from the raw logits (before temperature and penalties).

    ``rank`` is the 1-based rank of the token; ``top_ids``/``top_logprobs`` are the best k, most likely first;
    ``id_logprobs`` those of `SamplingSpec.logprob_ids`, in their order.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int] = []
    top_logprobs: list[float] = []
    id_logprobs: list[float] = []


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs of prompt tokens at positions ``[start, start + len(entries))`` of a row; position 0 has none."""

    row: int
    start: int
    entries: list[TokenLogprobs]


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """What one step did. ``token_ids[j]`` is the token sampled by the j-th span with ``samples == 1``, in plan order.

    ``logprobs`` is None unless a row wants them; else aligned with ``token_ids``, None for rows that do not.
    ``failed_rows`` are ``(row, message)`` of rows whose logits were not finite: they fail alone. ``refused_rows`` are
    those of rows whose own grammar or limits allow no token: the request was wrong. ``pooled`` are ``(row, float32
    values, little-endian)`` of the rows with ``pooling`` whose last token was computed. ``forced`` are ``(row, token
    ids)`` that a row's grammar forces behind the token sampled here: they are output at once, and tokens that later
    steps in flight sample at their positions are void.
    """

    step_id: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    prompt_logprobs: list[PromptLogprobs] = []
    failed_rows: list[tuple[int, str]] = []
    pooled: list[tuple[int, bytes]] = []
    refused_rows: list[tuple[int, str]] = []
    forced: list[tuple[int, list[int]]] = []
