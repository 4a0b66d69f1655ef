"""`StepPlan` and `StepResult`: the only records that pass between scheduling (integers) and execution (tensors).

Both are frozen and serialisable: with tensor parallelism the plan is broadcast to every rank. R: spans of a step.
"""

from __future__ import annotations

import msgspec

from headrace.base.media import MediaItem, MediaPlace
from headrace.base.pooling import PoolingSpec
from headrace.base.sampling import SamplingSpec
from headrace.base.token_ids import TokenIds, pack_ids

MAX_DRAFTS = 32
"""The most drafts of a row that one step verifies."""
MAX_ENTRIES = 512
"""The most decodes and drafts of a step together, if it has any drafts."""


class RowStart(msgspec.Struct, frozen=True, array_like=True):
    """A request enters (or, after a retraction, re-enters) a row of the device-side request state.

    ``token_ids`` are all tokens known so far: the prompt and, on re-entry, the output too; ``prompt_len`` says where
    output begins (penalties, min_tokens and seeds count from there). With ``pooling`` the row samples no token: its
    result is made of its hidden states, and due in the step that computes its last token. ``adapter_slot``: where the
    device has its adapter, -1 for the base model. ``media``: what stands at placeholders among the tokens, ascending.
    """

    row: int
    request_id: str
    token_ids: TokenIds
    prompt_len: int
    sampling: SamplingSpec
    pooling: PoolingSpec | None = None
    adapter_slot: int = -1
    media: list[MediaPlace] = []

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "token_ids", pack_ids(self.token_ids))


class AdapterLoad(msgspec.Struct, frozen=True, array_like=True):
    """Copy an adapter from host memory into a slot of the device, in place of what is there. No row that this plan or a
    later one computes uses the old one."""

    slot: int
    adapter_id: int


class Encode(msgspec.Struct, frozen=True, array_like=True):
    """Compute an item's encoder output, and keep it under ``key`` until a plan drops it. Keys are never used again."""

    key: int
    item: MediaItem


class MediaUse(msgspec.Struct, frozen=True, array_like=True):
    """A span of ``row`` covers placeholders of item number ``index`` of its `RowStart`: they take the vectors kept
    under ``key``."""

    row: int
    index: int
    key: int


class MediaPlan(msgspec.Struct, frozen=True, array_like=True):
    """What a step does with media: ``encodes`` are computed before the spans; ``uses`` says which encoder outputs these
    take; ``drops`` are keys of outputs that are forgotten after the step.

    ``begun`` are encoded together over several steps, one batch at a time; of the batch under way the step computes
    ``num_pieces`` of `MediaFacts.num_pieces`, before ``encodes``. Its outputs are there with the last piece. A plan
    that drops them and has no piece of it gives it up."""

    encodes: list[Encode] = []
    uses: list[MediaUse] = []
    drops: list[int] = []
    begun: list[Encode] = []
    num_pieces: int = 0


class RowDraft(msgspec.Struct, frozen=True, array_like=True):
    """A guess of a row's tokens at positions from ``start`` on, made on the host: by a drafter, or by a grammar that
    leaves no choice. With two plans in flight the host does not know how the step before ends, so a guess begins where
    the host's knowledge ends; the device verifies those tokens of it that come next by its own count."""

    row: int
    start: int
    token_ids: list[int]


class PageAppend(msgspec.Struct, frozen=True, array_like=True):
    """Write ``pages`` into the row's page table of cache group ``group``, from entry ``start`` on."""

    group: int
    row: int
    start: int
    pages: list[int]


class PageMove(msgspec.Struct, frozen=True, array_like=True):
    """Copy whole pages of a cache group from one place to another, beside the steps. ``ticket`` is unique in an
    engine's life; one `Arrival` ends it, and until then nobody else writes the target pages.

    ``source`` and ``target`` name places: ``device``, ``host``, ``storage``, or what a transfer backend registers.
    ``source_pages`` and ``target_pages`` are page numbers there, parallel lists; empty for a place that knows pages by
    ``keys``. With source ``storage`` and target "" nothing is copied: the arrival tells which keys are there. ``peer``
    is the other side of a transfer, opaque to all but its backend.
    """

    ticket: int
    group: int
    source: str
    target: str
    source_pages: list[int]
    target_pages: list[int]
    keys: list[bytes] = []
    peer: str = ""

    @property
    def num_pages(self) -> int:
        """Pages that it concerns."""
        return max(len(self.source_pages), len(self.target_pages), len(self.keys))


class Arrival(msgspec.Struct, frozen=True, array_like=True):
    """A `PageMove` has ended, on all ranks: nothing touches its pages any more. ``failed`` are the indices into the
    move's pages of those that did not come; empty when all did."""

    ticket: int
    failed: list[int] = []


class StepSpans(msgspec.Struct, frozen=True, array_like=True):
    """The positions that a step computes; see `StepPlan`."""

    step_id: int
    num_decodes: int
    rows: list[int]  # [R]
    begins: list[int]  # [R], positions
    lengths: list[int]  # [R], tokens
    samples: list[int]  # [R], tokens


class StepPlan(StepSpans, frozen=True, array_like=True):
    """What one step shall do. Applied in this order: moves are started, adapter loads, releases, starts, appends,
    drafts; then the spans are computed. A plan without spans starts its moves, and its result waits a moment for some
    to arrive.

    Spans are parallel lists of length R; a row occurs at most once. Span i computes ``lengths[i]`` positions of row
    ``rows[i]`` from ``begins[i]`` on; all earlier positions are in the cache.

    The first ``num_decodes`` spans are decodes: one token and ``lengths[i] - 1`` drafts to verify. The device owns
    their lengths: the span begins at the row's own computed length, since only the device knows how many drafts of the
    step before were right, and ``begins[i]`` is an upper bound, up to which (and for ``lengths[i]`` tokens more) the
    row has pages. The input is the row's last token, which the previous step's sampler wrote to device memory, then the
    drafts. A token is sampled at every position; those up to the first wrong draft count.

    The other spans take tokens from their row's `RowStart`, and begin at ``begins[i]``; the first ones, if they are one
    token, may be computed as decodes. ``samples[i]`` is how many tokens are sampled at the end of span i: all positions
    of decodes; 1 for a prefill chunk that reaches the end, else 0, and 0 for rows with ``pooling``.

    ``last_tokens``: of decodes, where the host knows them: ranks that did not sample them take them from here, and then
    ``begins`` are exact. Empty where the device may be ahead of the host.

    ``drafts``: guesses for rows that decode here; rows without one verify the drafts that the device made for them.
    ``num_proposals``: how many drafts per row a device drafter makes after this step; it does not run for 0.
    ``replica_tokens``: where replicas divide experts, how many tokens each of them has in this step; a plan without
    spans then computes those of the others alone.

    ``media``: encoders' part of the step.
    """

    releases: list[int] = []  # rows
    starts: list[RowStart] = []
    appends: list[PageAppend] = []
    drafts: list[RowDraft] = []
    num_proposals: int = 0
    last_tokens: list[int] = []  # [num_decodes], or []
    replica_tokens: list[int] = []  # [replicas]
    adapter_loads: list[AdapterLoad] = []
    moves: list[PageMove] = []
    media: MediaPlan = MediaPlan()


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
    """What one step did. ``token_ids`` are the new tokens of the spans that sample, in plan order: one of each, or
    ``counts[j]`` of the j-th where the step had drafts.

    ``logprobs`` is None unless a row wants them; else aligned with ``token_ids``, None for rows that do not.
    ``failed_rows`` are ``(row, message)`` of rows whose logits were not finite: they fail alone. ``refused_rows`` are
    those of rows whose own grammar or limits allow no token: the request was wrong. ``pooled`` are ``(row, float32
    values, little-endian)`` of the rows with ``pooling`` whose last token was computed. ``drafts`` are tokens that a
    row's grammar forces next; they are guesses like any other until the model has sampled them. ``arrived`` are the
    tickets of page moves that ended since the last result.
    """

    step_id: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    prompt_logprobs: list[PromptLogprobs] = []
    failed_rows: list[tuple[int, str]] = []
    pooled: list[tuple[int, bytes]] = []
    refused_rows: list[tuple[int, str]] = []
    drafts: list[RowDraft] = []
    counts: list[int] = []
    arrived: list[Arrival] = []
