"""What a client hands to the edges: text and tokens of one choice, as they come. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from headrace.base.messages import ErrorInfo
from headrace.base.step import TokenLogprobs


class ChoiceDelta(msgspec.Struct):
    """News of choice ``index`` of a request since its last delta. ``text`` never has to be taken back: text that may
    still become part of a stop string is held until it is certain. The last delta of a choice has ``finish_reason``:
    ``stop``, ``length``, ``abort`` or ``error``; ``stop_reason`` is the stop string or stop id that matched, if any.
    ``logprobs`` is aligned with ``token_ids``. The first delta carries the prompt facts and ``queued_s``, the seconds
    waited for the first step. ``pooled`` is the result of a text that was read
    (`headrace.base.pooling.unpack_floats`)."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: ErrorInfo | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    pooled: bytes | None = None
    queued_s: float | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One finished choice, in the shape vLLM's users know. ``error`` is set when ``finish_reason`` is ``error``."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    error: ErrorInfo | None = None
    pooled: bytes | None = None


@dataclass(slots=True)
class GenerationOutput:
    """One finished request: its prompt and ``n`` outputs."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
