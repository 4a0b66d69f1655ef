"""Outputs as the edges see them: deltas of one choice, whole results, and the collector that adds deltas up.
Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec

from headrace.base.errors import Conflict, HeadraceError
from headrace.base.messages import EngineStats, ErrorInfo, ModelFacts
from headrace.base.step import TokenLogprobs


class ChoiceDelta(msgspec.Struct):
    """New output of choice ``index`` since its last delta. ``text`` is final: text that may still become part of a
    stop string is held back until it is certain. The last delta of a choice has ``finish_reason``:
    ``stop``, ``length``, ``abort`` or ``error``; ``stop_reason`` is the stop string or stop id that matched, if any.
    ``matched_stop`` is the same, or the id of the model's own end of text. ``logprobs`` is aligned with ``token_ids``.
    The first delta carries the prompt facts and ``queued_s``, the seconds
    waited for the first step. ``pooled`` is the result of a pooling request
    (`headrace.base.pooling.unpack_floats`). ``num_accepted_tokens`` of ``token_ids`` were drafts, of
    ``num_draft_tokens`` that were verified."""

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
    matched_stop: str | int | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(slots=True)
class CompletionOutput:
    """One finished choice, in the shape vLLM's users know. ``error`` is set when ``finish_reason`` is ``error``. With
    speculation ``num_accepted_tokens`` of ``token_ids`` were drafts, of ``num_draft_tokens`` that were verified; the
    other tokens took a step each."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    error: ErrorInfo | None = None
    pooled: bytes | None = None
    matched_stop: str | int | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(slots=True)
class GenerationOutput:
    """One finished request: its prompt and ``n`` outputs."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None


def first_error(output: GenerationOutput) -> HeadraceError | None:
    """The typed error that ended one of the choices, if one did."""
    errors = [c.error for c in output.outputs if c.error is not None]
    return errors[0].to_error() if errors else None


def pooled_of(output: GenerationOutput) -> bytes:
    """The packed result of a pooling request. Raises `Conflict` for one that was aborted, which has none."""
    packed = output.outputs[0].pooled
    if packed is None:
        raise Conflict("the request was aborted before its result was computed; send it again")
    return packed


class Collector:
    """Adds the deltas of one request up to its output. ``num_choices`` is ``n`` of its sampling parameters."""

    def __init__(self, request_id: str, prompt: str | None, prompt_token_ids: list[int], num_choices: int):
        choices = [CompletionOutput(index=i, text="", token_ids=[]) for i in range(num_choices)]
        self._output = GenerationOutput(request_id, prompt, prompt_token_ids, choices)

    def add(self, delta: ChoiceDelta) -> None:
        """Append a delta to its choice."""
        output, choice = self._output, self._output.outputs[delta.index]
        choice.text += delta.text
        choice.token_ids += delta.token_ids
        choice.num_draft_tokens += delta.num_draft_tokens
        choice.num_accepted_tokens += delta.num_accepted_tokens
        if delta.logprobs is not None:
            choice.logprobs = (choice.logprobs or []) + delta.logprobs
            choice.cumulative_logprob = (choice.cumulative_logprob or 0.0) + sum(p.logprob for p in delta.logprobs)
        if delta.pooled is not None:
            choice.pooled = delta.pooled
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason, choice.error = delta.finish_reason, delta.stop_reason, delta.error
            choice.matched_stop = delta.matched_stop
        output.num_cached_tokens = max(output.num_cached_tokens, delta.num_cached_tokens)
        if delta.prompt_logprobs is not None:
            output.prompt_logprobs = delta.prompt_logprobs

    @property
    def output(self) -> GenerationOutput:
        """The output itself; it grows with further deltas."""
        return self._output

    def snapshot(self) -> GenerationOutput:
        """A copy that later deltas do not change."""
        choices = [
            replace(c, token_ids=list(c.token_ids), logprobs=c.logprobs and list(c.logprobs))
            for c in self._output.outputs
        ]
        return replace(self._output, outputs=choices)


@dataclass(frozen=True)
class ReplicaStatus:
    """One engine for reports. ``state`` is as of `headrace.service.client.replica.Replica`; ``stage`` and ``progress``
    are those of its start. ``num_restarts``: within ten minutes."""

    index: int
    state: str
    stats: EngineStats
    stage: str = ""
    progress: float = 0.0
    pid: int | None = None
    num_restarts: int = 0
    facts: ModelFacts | None = None
