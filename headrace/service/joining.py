"""Outputs of several steps merged into one message, which makes a client that falls behind do less work per token."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.base.messages import FromEngine, Outputs, RequestOutput


def join_outputs(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Merge consecutive outputs of one request, oldest first: tokens and logprobs are concatenated, the end and the
    pooled result are the last one's. A single output is returned as it is, not copied."""
    if len(outputs) == 1:
        return outputs[0]
    first, last = outputs[0], outputs[-1]
    return RequestOutput(
        last.request_id, [token for output in outputs for token in output.token_ids], last.finish,
        max(output.num_cached_tokens for output in outputs),
        [entry for output in outputs for entry in output.logprobs or ()] or None,
        [entry for output in outputs for entry in output.prompt_logprobs or ()] or None, last.pooled,
        first.queued_s if first.queued_s is not None else last.queued_s,
        sum(output.num_draft_tokens for output in outputs), sum(output.num_accepted_tokens for output in outputs),
    )


def join_messages(messages: Sequence[FromEngine]) -> list[FromEngine]:
    """Messages in their order; `Outputs` with no other message between them are merged into one."""
    joined: list[FromEngine] = []
    steps: list[Outputs] = []
    for message in messages:
        if isinstance(message, Outputs):
            steps.append(message)
        else:
            joined += [*_join_steps(steps), message]
            steps = []
    return joined + _join_steps(steps)


def _join_steps(steps: list[Outputs]) -> list[FromEngine]:
    if len(steps) < 2:
        return [*steps]
    # One list of outputs per request, in the order of first outputs. Keyed by more than the id: a client may use the
    # id of a finished request again, and its outputs must not be merged with those of the earlier request.
    lives: list[list[RequestOutput]] = []
    latest: dict[str, list[RequestOutput]] = {}
    for output in (output for step in steps for output in step.outputs):
        life = latest.get(output.request_id)
        if life is None or life[-1].finish is not None:
            life = latest[output.request_id] = []
            lives.append(life)
        life.append(output)
    stats = next((step.stats for step in reversed(steps) if step.stats is not None), None)
    return [Outputs([join_outputs(life) for life in lives], stats)]
