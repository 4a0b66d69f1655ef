"""Outputs of several steps as one: for whoever reads less often than the engine steps. Nothing is lost by it; texts
come in longer pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.base.messages import FromEngine, Outputs, RequestOutput


def join_outputs(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Consecutive outputs of one request as one."""
    if len(outputs) == 1:
        return outputs[0]
    first, last = outputs[0], outputs[-1]
    return RequestOutput(
        last.request_id, [token for output in outputs for token in output.token_ids], last.finish,
        max(output.num_cached_tokens for output in outputs),
        [entry for output in outputs for entry in output.logprobs or ()] or None,
        [entry for output in outputs for entry in output.prompt_logprobs or ()] or None, last.pooled,
        first.queued_s if first.queued_s is not None else last.queued_s,
    )


def join_messages(messages: Sequence[FromEngine]) -> list[FromEngine]:
    """Messages in their order, with the outputs of neighbouring steps in one."""
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
    lives: list[list[RequestOutput]] = []  # of each request; an id that has finished may be used again
    latest: dict[str, list[RequestOutput]] = {}
    for output in (output for step in steps for output in step.outputs):
        life = latest.get(output.request_id)
        if life is None or life[-1].finish is not None:
            life = latest[output.request_id] = []
            lives.append(life)
        life.append(output)
    stats = next((step.stats for step in reversed(steps) if step.stats is not None), None)
    return [Outputs([join_outputs(life) for life in lives], stats)]
