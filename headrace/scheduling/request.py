"""`Request`: the scheduler's record of one request, integers only; `Counters`: totals since start.

Refuses: deciding anything. Admission, planner and commit change a request's state; this is the record they share.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from headrace.base.media import key_ids
from headrace.base.messages import EngineRequest
from headrace.scheduling.cache.ledger import Holding


class State(IntEnum):
    """Where a request is in its life. A retracted request waits again, and resumes from all tokens known so far. One
    that awaits pages has a row, and pages that are being filled from another tier or machine."""

    QUEUED = 0
    RETRACTED = 1
    AWAITING_PAGES = 2
    PREFILLING = 3
    DECODING = 4
    FINISHED = 5


class Request:
    """One request. Lengths are in tokens. ``tokens`` (int32) are all known ones, prompt then output. While it runs,
    ``cached_len <= computed_len <= planned_len <= max(goal_len, limit_len)``.

    ======================  ==============================================================================
    ``prompt_len``          tokens the user sent
    ``output_len``          tokens sampled and committed
    ``known_len``           both together
    ``cached_len``          tokens found in the prefix tree at the latest admission
    ``computed_len``        positions whose KV is in the cache for certain: their step was committed
    ``planned_len``         the same, counting steps still in flight as if all their drafts were right: an upper bound
    ``num_unsure``          drafts of steps in flight; ``planned_len - num_unsure`` is a lower bound
    ``goal_len``            where the current prefill ends: ``known_len`` at the latest admission
    ``limit_len``           positions that can ever need computing: the last sampled token is not computed
    ======================  ==============================================================================

    ``epoch`` counts how often the request left the running set. A step in flight remembers the epoch it was planned in;
    when they differ at commit, the request has finished or been retracted meanwhile and the result is ignored.
    """

    __slots__ = (
        "adapter", "adapter_name", "arrived_at", "arriving_len", "awaits_until", "cached_len", "charged_len",
        "computed_len", "deadline", "epoch", "followers", "goal_len", "hit_pages", "hit_version", "holding", "is_warm",
        "leader", "limit_len", "max_len", "max_output_len", "media", "min_tokens", "namespace", "num_cached_tokens",
        "num_proposed", "num_shared_waits", "num_unsure", "origin", "page_keys", "path", "places", "planned_len",
        "pooling", "priority", "prompt_len", "prompt_logprobs_len", "queued_s", "request_id", "row",
        "sampling", "seq", "shared_pages", "skips_tiers", "state", "stop_ids", "tickets", "tokens", "wait_mark",
        "was_doubted",
    )  # fmt: skip

    def __init__(
        self, submitted: EngineRequest, *, seq: int, max_model_len: int, deadline: float | None, adapter: int = 0
    ):
        self.request_id = submitted.request_id
        self.seq = seq  # arrival number: the age of a request, kept through retractions
        self.tokens = submitted.prompt_token_ids[:]
        self.sampling = submitted.sampling
        self.pooling = submitted.pooling
        self.media = submitted.media
        self.places = [item.place for item in submitted.media]
        self.namespace = submitted.namespace
        self.adapter = adapter  # 0: the base model
        self.adapter_name = submitted.adapter
        self.priority = submitted.priority
        self.origin = submitted.origin
        self.path: tuple[str, ...] = ()  # among whom it has its share; set when it is queued
        self.charged_len = 0  # tokens counted against that share
        self.deadline = deadline

        self.prompt_len = len(self.tokens)
        most = 0 if submitted.pooling is not None else submitted.stop.max_tokens
        self.max_output_len = max(0, min(most, max_model_len - self.prompt_len))
        # At least one: a request for prompt logprobs alone (max_tokens 0) samples a token, which is then dropped.
        self.max_len = self.prompt_len + max(1, self.max_output_len)
        self.limit_len = self.max_len - 1
        self.min_tokens = submitted.stop.min_tokens
        self.stop_ids = frozenset(submitted.stop.eos_ids) | frozenset(submitted.stop.stop_ids)

        self.state = State.QUEUED
        self.epoch = 0
        self.row = -1
        self.holding: Holding = None  # type: ignore[assignment]  # its pages, only while it runs
        self.cached_len = self.computed_len = self.planned_len = self.num_unsure = 0
        self.num_proposed = 0  # drafts that the device makes for it in the latest step; none once it was left out
        self.is_warm = True  # the device's drafter has computed all of its positions
        self.goal_len = self.prompt_len

        self.arrived_at = 0.0  # by the scheduler's clock
        self.queued_s: float | None = None  # from then to the first admission
        self.was_doubted = False  # computed anew, beside the prefix cache, as its numbers were not finite
        self.num_cached_tokens = -1  # reported to users: the hit of the first admission
        self.prompt_logprobs_len = 1  # prompt positions already reported; position 0 has no logprob

        self.wait_mark: int | None = None  # the queue's clock of overtakings when it began to wait
        self.leader: Request | None = None  # the request whose prefill it waits for (in-batch prefix sharing)
        self.followers: list[Request] = []
        self.shared_pages = 0
        self.num_shared_waits = 0
        self.hit_pages = 0  # prefix hit as of the tree's ``hit_version``, for the longest-prefix policy
        self.hit_version = -1
        self.page_keys: list[bytes] = []  # names of its leading pages in tiers other than the device
        self.tickets: set[int] = set()  # page moves that it waits for
        self.arriving_len = 0  # tokens of the prefix that is complete with them; of whole pages, or all of the prompt
        self.awaits_until = 0.0  # by the scheduler's clock: then it computes instead
        self.skips_tiers = False  # a copy has failed: it computes what the device does not have

    @property
    def known_len(self) -> int:
        return len(self.tokens)

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def needs_all_tokens(self) -> bool:
        """Whether every position must be computed for it, prefix cache or not."""
        return self.sampling.num_prompt_logprobs >= 0 or (self.pooling is not None and self.pooling.needs_all_tokens)

    @property
    def is_running(self) -> bool:
        """Whether it has a row and pages."""
        return State.AWAITING_PAGES <= self.state <= State.DECODING

    def key_bytes(self, begin: int, end: int) -> bytes:
        """Tokens ``[begin, end)`` in the form the prefix tree is keyed by: with digests in place of placeholders."""
        if self.places:
            return key_ids(self.tokens, begin, end, self.places).tobytes()
        return self.tokens[begin:end].tobytes()

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.state.name}, prompt={self.prompt_len}, output={self.output_len}, "
            f"planned={self.planned_len})"
        )


@dataclass(slots=True)
class Counters:
    """Totals since start, in tokens, requests or steps as named."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    generation_tokens: int = 0
    aborted: int = 0
    retracted: int = 0
    failed_steps: int = 0
    steps: int = 0
