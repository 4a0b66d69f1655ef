"""Engine requests for texts that are read, not continued, and what comes back of them.

Refuses: text; tokens come in (``service/client/texts`` makes them), packed numbers go out.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.base.errors import ContextLengthExceeded, RequestError
from headrace.base.messages import Abort, EngineRequest, ModelFacts, RequestOutput
from headrace.base.pooling import PoolingSpec
from headrace.base.sampling import SamplingSpec, StopSpec
from headrace.service.client.outputs import ChoiceDelta
from headrace.service.tokenization.requests import USES, check_ids, check_schedule


def build_reading(
    request_id: str, token_ids: Sequence[int], spec: PoolingSpec, *, facts: ModelFacts, namespace: str = "",
    priority: int = 0,
    deadline_s: float | None = None,
) -> EngineRequest:
    """One text to be read, checked. Raises `RequestError` naming the field that is wrong, and `ContextLengthExceeded`
    when the text is longer than ``facts.max_model_len``."""
    if not token_ids:
        raise RequestError("the text must hold at least one token", param="input")
    if len(token_ids) > facts.max_model_len:
        raise ContextLengthExceeded(
            f"this model's maximum context length is {facts.max_model_len} tokens (max_model_len); the text has "
            f"{len(token_ids)}. Shorten it, or send "
            "truncate_prompt_tokens: -1 to have its end cut off", param="input",
        )
    check_ids(token_ids, "input", facts.vocab_size)
    check_schedule(priority, deadline_s)
    check_ids(spec.label_ids, "label_token_ids", facts.vocab_size)
    if facts.pooling is None and not spec.label_ids:
        raise RequestError(
            f"{facts.model} generates text; it makes no embeddings and no scores of texts. Serve a model made for "
            "that, or start with --task embed",
            param="model",
        )
    if facts.pooling is not None:
        if spec.label_ids:
            raise RequestError(
                f"{facts.model} has no logits of tokens; it makes {USES[facts.pooling.kind]}", param="label_token_ids"
            )
        spec = msgspec.structs.replace(spec, needs_all_tokens=facts.pooling.needs_all_tokens)
    return EngineRequest(
        request_id, list(token_ids), SamplingSpec(), StopSpec(0), namespace=namespace, priority=priority,
        deadline_s=deadline_s, pooling=spec,
    )


class ReadAssembler:
    """What `OutputAssembler` is for generation: passes the one result on."""

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
        """Nothing: a text that is read ends by itself."""
        return []
