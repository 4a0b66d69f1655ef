"""`Collector`: adds the deltas of one request up to a `GenerationOutput`, for those who want results and not a
stream."""

from __future__ import annotations

from dataclasses import replace

from headrace.base.errors import HeadraceError
from headrace.service.client.outputs import ChoiceDelta, CompletionOutput, GenerationOutput


def first_error(output: GenerationOutput) -> HeadraceError | None:
    """The typed error that ended one of the choices, if one did."""
    errors = [c.error for c in output.outputs if c.error is not None]
    return errors[0].to_error() if errors else None


class Collector:
    """The output of one request as far as it is known. ``num_choices`` is ``n`` of its sampling parameters."""

    def __init__(self, request_id: str, prompt: str | None, prompt_token_ids: list[int], num_choices: int):
        choices = [CompletionOutput(index=i, text="", token_ids=[]) for i in range(num_choices)]
        self._output = GenerationOutput(request_id, prompt, prompt_token_ids, choices)

    def add(self, delta: ChoiceDelta) -> None:
        """Append a delta to its choice."""
        output, choice = self._output, self._output.outputs[delta.index]
        choice.text += delta.text
        choice.token_ids += delta.token_ids
        if delta.logprobs is not None:
            choice.logprobs = (choice.logprobs or []) + delta.logprobs
            choice.cumulative_logprob = (choice.cumulative_logprob or 0.0) + sum(p.logprob for p in delta.logprobs)
        if delta.pooled is not None:
            choice.pooled = delta.pooled
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason, choice.error = delta.finish_reason, delta.stop_reason, delta.error
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
