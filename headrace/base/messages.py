"""All messages between processes, as msgspec records. No pickle: bytes are decoded against these types only. Records
with ``array_like`` are encoded without field names, so the order of their fields is the wire format.

Client to engine: `ToEngine`. Engine to client: `FromEngine`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.base.adapters import AdapterStats
from headrace.base.errors import HeadraceError, error_from_kind
from headrace.base.media import MediaItem, give_data, take_data
from headrace.base.media_facts import MediaFacts
from headrace.base.pooling import PoolingFacts, PoolingSpec
from headrace.base.sampling import SamplingSpec, StopSpec, TransferSpec
from headrace.base.step import TokenLogprobs
from headrace.base.token_ids import TokenIds, from_wire, pack_ids, to_wire


class ErrorInfo(msgspec.Struct, frozen=True, array_like=True):
    """A typed error on the wire."""

    kind: str
    message: str
    param: str | None = None
    retry_after: float | None = None

    @classmethod
    def of(cls, error: BaseException) -> ErrorInfo:
        """Describe an error; one that is not ours becomes an internal error naming its type."""
        if isinstance(error, HeadraceError):
            return cls(error.kind, error.message, error.param, error.retry_after)
        return cls("internal_error", f"{type(error).__name__}: {error}")

    def to_error(self) -> HeadraceError:
        """The typed exception again."""
        return error_from_kind(self.kind, self.message, param=self.param, retry_after=self.retry_after)


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A rank is the one numbered ``index`` of ``count`` on its machine, those of other replicas counted in: it takes
    that GPU, or that part of the cores."""

    index: int = 0
    count: int = 1


class EngineRequest(msgspec.Struct, frozen=True, array_like=True, tag="submit", weakref=True):
    """One sequence to generate, or with ``pooling`` one to pool; validated and tokenized. The client splits a request
    with ``n > 1`` into n of these.

    ``namespace`` separates prefix caches (cache_salt); the engine adds the content of ``adapter``, which is the name of
    a loaded one, empty for the base model. ``deadline_s`` is seconds from arrival, None for no
    limit. Higher ``priority`` runs first under the priority policy. ``origin`` says who sent it, for fair shares: the
    client, in one part or several, then its HTTP request; empty when there is only one client. ``transfer``: with which
    engine its pages are exchanged, in an engine that has a role. ``media``: what stands at placeholders of the prompt,
    ascending. Token ids may be given as any sequence, and are packed; raises `TypeError` for what is no 32-bit integer.
    """

    request_id: str
    prompt_token_ids: TokenIds
    sampling: SamplingSpec
    stop: StopSpec
    namespace: str = ""
    priority: int = 0
    deadline_s: float | None = None
    pooling: PoolingSpec | None = None
    origin: tuple[str, ...] = ()
    adapter: str = ""
    transfer: TransferSpec | None = None
    media: list[MediaItem] = []

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "prompt_token_ids", pack_ids(self.prompt_token_ids))


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """End a request now. ``reason`` becomes the finish reason: ``abort``, or ``stop`` when the client found a stop
    string. Unknown and finished ids are ignored (the race is normal)."""

    request_id: str
    reason: str = "abort"


class Call(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """A control call answered by `Reply` between two steps: ``stats``, ``reset_prefix_cache``, ``check``, ``pause``,
    ``continue``, ``freeze_gc``, ``shutdown``, those of base/admin with their records as ``arguments``, and ``ping``,
    a sign of life whose result is the engine's bound for the duration of a step, in seconds."""

    call_id: int
    method: str
    arguments: dict[str, object] = {}


class Decline(msgspec.Struct, frozen=True, array_like=True, tag="decline"):
    """A request was refused whose pages another engine waits for, in these rooms: see `headrace.base.transfer`."""

    rooms: list[str]
    reason: str


class WithData(msgspec.Struct, frozen=True, array_like=True, tag="with_data"):
    """A request whose media have no data: these follow the message, ``sizes`` bytes each. So they are neither encoded
    nor decoded, and each is read into the memory that it stays in."""

    request: EngineRequest
    sizes: list[int]

    @classmethod
    def of(cls, request: EngineRequest) -> tuple[WithData, list[bytes]]:
        """The message, and what follows it."""
        media, data = take_data(request.media)
        return cls(msgspec.structs.replace(request, media=media), list(map(len, data))), data

    def join(self, data: Sequence[bytes]) -> EngineRequest:
        """The request again."""
        return msgspec.structs.replace(self.request, media=give_data(self.request.media, data))


ToEngine = EngineRequest | Abort | Call | Decline


class Finish(msgspec.Struct, frozen=True, array_like=True):
    """Why a request ended: ``stop``, ``length``, ``abort`` or ``error`` (then ``error`` is set).

    ``stop_id`` is the id of the stop or end-of-text token that ended it, if one did.
    """

    reason: str
    stop_id: int | None = None
    error: ErrorInfo | None = None


class RequestOutput(msgspec.Struct, frozen=True, array_like=True):
    """New output of one request since the last one; the last carries ``finish`` and there is exactly one such.
    ``pooled`` is the result of a request with ``pooling``, as in `StepResult`. ``queued_s`` comes with the first token
    and with the last output: the seconds that the request waited for its first step, None when it had none.
    ``num_draft_tokens`` were verified to make ``token_ids``, of which ``num_accepted_tokens`` are accepted drafts: the
    others took a step each."""

    request_id: str
    token_ids: list[int]
    finish: Finish | None = None
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    pooled: bytes | None = None
    queued_s: float | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class MemoryLine(msgspec.Struct, frozen=True, array_like=True):
    """One line of the memory plan: what takes ``num_bytes`` on the device, with a note such as a token count."""

    name: str
    num_bytes: int
    note: str = ""


class FamilyParsers(msgspec.Struct, frozen=True):
    """The parsers of tool calls and of reasoning that a model's family names; None: as its chat template tells."""

    tool: str | None = None
    reasoning: str | None = None


class CacheFacts(msgspec.Struct, frozen=True):
    """The KV cache of an engine: tokens of a page and of all pages."""

    page_size: int
    num_kv_tokens: int


class ModelFacts(CacheFacts, frozen=True):
    """Facts of the loaded model for clients and routes. ``sampling_sources`` says of each field of ``default_sampling``
    where its value came from. ``pooling`` is None for a generating model, ``media`` for one that takes
    text alone."""

    model: str
    architecture: str
    family: str
    dtype: str
    device: str
    max_model_len: int
    vocab_size: int
    eos_ids: list[int]
    num_parameters: int
    default_sampling: dict[str, int | float] = {}
    sampling_sources: dict[str, str] = {}
    parsers: FamilyParsers = FamilyParsers()
    pooling: PoolingFacts | None = None
    media: MediaFacts | None = None


class SpeculationStats(msgspec.Struct, frozen=True):
    """Counters of speculation since start: how often a request had drafts in a step, their tokens, those that were
    right, and these by position in the draft."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_position: list[int] = []


class ExpertStats(msgspec.Struct, frozen=True):
    """Of experts that move between ranks: choices computed by each rank in the windows looked at since start, how
    evenly ranks were loaded at the last look (mean load over the largest), and experts that were moved."""

    tokens_by_rank: list[int] = []
    balancedness: float = 0.0
    num_moved: int = 0


class TierStats(msgspec.Struct, frozen=True):
    """Pages of prefixes in one tier behind the device, summed over cache groups. ``hit_tokens_total``: prompt tokens
    that came from it; ``failed_pages_total``: pages whose copy failed, in either direction; ``late_total``: requests
    that computed because a copy took too long."""

    num_pages: int = 0
    num_used_pages: int = 0
    written_pages_total: int = 0
    read_pages_total: int = 0
    evicted_pages_total: int = 0
    failed_pages_total: int = 0
    hit_tokens_total: int = 0
    late_total: int = 0


class TransferStats(msgspec.Struct, frozen=True):
    """Of an engine that exchanges pages with others: requests whose pages were sent, came, or (prefill) were not
    fetched and (decode) did not come; pages of all cache groups."""

    sent_requests_total: int = 0
    received_requests_total: int = 0
    lost_requests_total: int = 0
    sent_pages_total: int = 0
    received_pages_total: int = 0


class HotSlotStats(msgspec.Struct, frozen=True):
    """Of KV in host memory: entries that layers of decodes wanted, and those that had to be copied to the device."""

    wanted_entries_total: int = 0
    loaded_entries_total: int = 0


class StatsByTier(msgspec.Struct, frozen=True):
    """Of the tiers behind the device. ``storage`` is disk and remote stores together, which do not tell how much they
    hold. ``hot_slots``: of what decodes read from host memory."""

    host: TierStats = TierStats()
    storage: TierStats = TierStats()
    peers: TransferStats = TransferStats()
    hot_slots: HotSlotStats = HotSlotStats()


class PageStats(msgspec.Struct, frozen=True):
    """KV pages of one engine."""

    num_pages: int = 0
    num_used_pages: int = 0
    num_evictable_pages: int = 0
    evicted_pages_total: int = 0


class StepStats(PageStats, frozen=True):
    """Steps of one engine. ``late_kernels_total``: kernels compiled, and plans of libraries built, while a step waited
    for them. ``kernel_fallbacks_total``: kernels in whose place slower ones run, as they could not be compiled or
    loaded."""

    steps_total: int = 0
    failed_steps_total: int = 0
    late_kernels_total: int = 0
    kernel_fallbacks_total: int = 0


class EngineStats(StepStats, frozen=True):
    """Counters (``*_total``, since start) and gauges of one engine; sent with outputs a few times a second."""

    num_queued: int = 0
    num_running: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    computed_tokens_total: int = 0
    generation_tokens_total: int = 0
    requests_total: int = 0
    aborted_total: int = 0
    retracted_total: int = 0
    speculation: SpeculationStats = SpeculationStats()
    experts: ExpertStats = ExpertStats()
    adapters: AdapterStats = AdapterStats()
    tiers: StatsByTier = StatsByTier()


class Starting(msgspec.Struct, frozen=True, array_like=True, tag="starting"):
    """Progress of start-up; ``fraction`` in [0, 1]."""

    stage: str
    fraction: float


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The engine has completed its warm-up request and takes requests."""

    facts: ModelFacts
    memory: list[MemoryLine]


class Outputs(msgspec.Struct, frozen=True, array_like=True, tag="outputs"):
    """All outputs of one step."""

    outputs: list[RequestOutput]
    stats: EngineStats | None = None


class Reply(msgspec.Struct, frozen=True, array_like=True, tag="reply"):
    """Answer to `Call` with the same ``call_id``."""

    call_id: int
    result: object = None
    error: ErrorInfo | None = None


class Fatal(msgspec.Struct, frozen=True, array_like=True, tag="fatal"):
    """The engine cannot start or go on; it exits after this."""

    error: ErrorInfo


FromEngine = Starting | Ready | Outputs | Reply | Fatal

# Made once: building a decoder for these types is slow.
encode = msgspec.msgpack.Encoder(enc_hook=to_wire).encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine | WithData, dec_hook=from_wire).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
