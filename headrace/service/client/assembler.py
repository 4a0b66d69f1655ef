"""Engine outputs to deltas of each choice: text, stop strings, aligned logprobs, finish reasons."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.base.messages import Abort, EngineRequest, Finish, RequestOutput
from headrace.base.sampling import SamplingParams
from headrace.base.step import TokenLogprobs
from headrace.service.client.outputs import ChoiceDelta
from headrace.service.client.requests import special_stops
from headrace.service.tokenization.detokenizer import Detokenizer, Stops
from headrace.service.tokenization.tokenizer import Tokenizer


class OutputAssembler:
    """Assembles the outputs of all choices of one request. ``requests`` and ``params`` are those of `build_requests`.
    Token counts for ``usage`` are the sums of the deltas' ``token_ids``. ``can_end_early``: a stop string may end a
    choice before the engine does, so outputs must be fed as they come and not in batches."""

    def __init__(self, requests: Sequence[EngineRequest], params: SamplingParams, tokenizer: Tokenizer | None):
        stop_texts = special_stops(params, tokenizer)
        self._choices = {r.request_id: _Choice(i, r, params, tokenizer, stop_texts) for i, r in enumerate(requests)}
        self.can_end_early = any(choice.can_end_early for choice in self._choices.values())
        self._num_unfinished = len(self._choices)
        self._aborts: list[Abort] = []

    @property
    def is_finished(self) -> bool:
        """Whether every choice has had its last delta."""
        return self._num_unfinished == 0

    def feed(self, output: RequestOutput) -> ChoiceDelta | None:
        """The delta of one choice; None when there is nothing new, or when it has finished already (the engine may have
        run on past a stop string)."""
        choice = self._choices.get(output.request_id)
        if choice is None or choice.is_finished:
            return None
        delta = choice.feed(output)
        if choice.is_finished:
            self._num_unfinished -= 1
            if output.finish is None:
                self._aborts.append(Abort(output.request_id, "stop"))
        return delta

    def to_abort(self) -> list[Abort]:
        """Requests that a stop string ended and the engine still runs; each is returned once."""
        aborts, self._aborts = self._aborts, []
        return aborts


class _Choice:
    """Assembly of one choice. Prompt logprobs are collected over prefill chunks and sent with the first delta; position
    0 has none, which is their first entry."""

    def __init__(
        self, index: int, request: EngineRequest, params: SamplingParams, tokenizer: Tokenizer | None,
        stop_texts: dict[int, str]
    ):
        self.is_finished = False
        self._index = index
        self._params = params
        self._stop_texts = stop_texts
        self._num_tokens = 0  # in all deltas so far
        self._prompt_logprobs: list[TokenLogprobs | None] | None = (
            [None] if request.sampling.num_prompt_logprobs >= 0 else None
        )
        self._text = None
        if tokenizer is not None and params.detokenize:
            self._text = Detokenizer(
                tokenizer, prompt_ids=request.prompt_token_ids,
                stops=Stops(
                    [s for s in params.stop_strings() if s not in stop_texts.values()], params.stop_patterns(),
                    params.include_stop_str_in_output
                ), skip_special_tokens=params.skip_special_tokens,
                keep_special_tokens=params.keep_special_tokens or (),
                spaces_between_special_tokens=params.spaces_between_special_tokens, min_tokens=params.min_tokens,
            )

    @property
    def can_end_early(self) -> bool:
        return self._text is not None and self._text.can_stop

    def feed(self, output: RequestOutput) -> ChoiceDelta | None:
        if self._prompt_logprobs is not None and output.prompt_logprobs:
            self._prompt_logprobs += output.prompt_logprobs
        if not output.token_ids and output.finish is None:  # a prefill chunk: its logprobs wait for the first token
            return None
        delta = ChoiceDelta(
            self._index, "", output.token_ids, output.logprobs, num_cached_tokens=output.num_cached_tokens,
            queued_s=output.queued_s, num_draft_tokens=output.num_draft_tokens,
            num_accepted_tokens=output.num_accepted_tokens
        )
        delta.prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        if self._text is not None:
            delta.text = (
                self._text.push(output.token_ids) if output.finish is None
                else self._last_text(self._text, output.token_ids, output.finish)
            )
        # A stop string wins over the engine's own reason: tokens behind it were computed in vain.
        if self._text is not None and self._text.stopped is not None:
            self._cut(delta, self._text.num_tokens_kept)
            delta.finish_reason, delta.stop_reason = "stop", self._text.stopped
            delta.matched_stop = self._text.stopped
        elif output.finish is not None:
            delta.finish_reason, delta.error = output.finish.reason, output.finish.error
            delta.stop_reason = self._stop_reason(output.finish)
            delta.matched_stop = output.finish.stop_id if delta.stop_reason is None else delta.stop_reason
        self._num_tokens += len(delta.token_ids)
        self.is_finished = delta.finish_reason is not None
        return delta

    def _last_text(self, text: Detokenizer, ids: list[int], finish: Finish) -> str:
        """Text of the last tokens, and all that was held back."""
        if (
            finish.stop_id is not None and ids and ids[-1] == finish.stop_id
            and not self._params.include_stop_str_in_output
        ):
            ids = ids[:-1]  # the token that stopped is counted but not shown
        return text.push(ids) + text.finish()

    def _cut(self, delta: ChoiceDelta, num_tokens_kept: int) -> None:
        """Drop tokens behind the one that completed a stop string."""
        kept = num_tokens_kept - self._num_tokens
        delta.token_ids = delta.token_ids[:kept]
        if delta.logprobs is not None:
            delta.logprobs = delta.logprobs[:kept]
        # the first token of a step is no draft
        delta.num_accepted_tokens = min(delta.num_accepted_tokens, max(0, kept - 1))

    def _stop_reason(self, finish: Finish) -> str | int | None:
        """The stop string or id the user named; None for the model's own end of text."""
        if finish.stop_id in self._stop_texts:
            return self._stop_texts[finish.stop_id]
        return finish.stop_id if finish.stop_id in (self._params.stop_token_ids or ()) else None


class PooledAssembler:
    """The counterpart of `OutputAssembler` for a pooling request, which has one output and no text."""

    can_end_early = False

    def __init__(self) -> None:
        self.is_finished = False

    def feed(self, output: RequestOutput) -> ChoiceDelta | None:
        """The result, or the end without one."""
        if self.is_finished or output.finish is None:
            return None
        self.is_finished = True
        finish = output.finish
        return ChoiceDelta(
            0, "", [], finish_reason=finish.reason, error=finish.error, num_cached_tokens=output.num_cached_tokens,
            pooled=output.pooled,
            queued_s=output.queued_s,
        )

    def to_abort(self) -> list[Abort]:
        """Nothing: a pooling request ends by itself."""
        return []
