"""Prompts to token ids, and prompts with parameters to engine requests. Torch-free.

Refuses: chat templates; chat routes render them and pass text or ids.
"""

from __future__ import annotations

import logging
import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from headrace.base.errors import ContextLengthExceeded, RequestError, UnsupportedFeature
from headrace.base.messages import EngineRequest, ModelFacts
from headrace.base.pooling import PoolingSpec
from headrace.base.sampling import SamplingParams
from headrace.service.client.assembler import OutputAssembler, PooledAssembler
from headrace.service.client.requests import build_pooling_request, build_requests
from headrace.service.tokenization import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestTags:
    """What a request carries beside its prompt and parameters: ``origin`` as of `EngineRequest`, and the name of its
    adapter."""

    origin: tuple[str, ...] = ()
    adapter: str = ""

    def mark(self, requests: list[EngineRequest]) -> list[EngineRequest]:
        """The requests with these."""
        if self == RequestTags():
            return requests
        return [msgspec.structs.replace(one, origin=self.origin, adapter=self.adapter) for one in requests]


def new_request_id(prefix: str = "") -> str:
    """A unique request id."""
    return prefix + uuid.uuid4().hex


def encode_prompt(
    prompt: str | Sequence[int], tokenizer: Tokenizer | None, *, add_special_tokens: bool = True,
    most: int | None = None,
) -> list[int]:
    """Token ids of a prompt. Ids pass as they are (their range is checked with the rest of the request). ``most``: the
    model's limit; a text far beyond it is refused after encoding a prefix, as encoding megabytes would take seconds."""
    if not isinstance(prompt, str):
        if most is not None and len(prompt) > most:  # before it is copied: it may have millions
            raise ContextLengthExceeded.of(most, f"the prompt has {len(prompt)}", param="prompt")
        return list(prompt)
    return encode_text(prompt, require_tokenizer(tokenizer), most, "prompt", add_special_tokens=add_special_tokens)


def encode_prompt_end(
    prompt: str | Sequence[int], tokenizer: Tokenizer | None, kept: int, *, add_special_tokens: bool = True
) -> list[int]:
    """At most ``kept`` ids from the end of a prompt. A leading bos token stays in front and counts."""
    ids = (
        require_tokenizer(tokenizer).encode_ends(prompt, kept, add_special_tokens=add_special_tokens)
        if isinstance(prompt, str) else prompt
    )
    if len(ids) <= kept:
        return list(ids)
    begin = ids[:1] if kept > 1 and tokenizer is not None and ids[0] == tokenizer.bos_id else []
    return [*begin, *ids[len(ids) - kept + len(begin) :]]


def encode_prompt_begin(
    prompt: str | Sequence[int], tokenizer: Tokenizer | None, kept: int, *, add_special_tokens: bool = True
) -> list[int]:
    """At most ``kept`` ids from the begin of a prompt."""
    if not isinstance(prompt, str):
        return list(prompt[:kept])
    return require_tokenizer(tokenizer).encode(prompt, add_special_tokens=add_special_tokens, limit=kept)


def encode_around_gap(
    prompt: str, suffix: str, tokenizer: Tokenizer | None, most: int, *, add_special_tokens: bool = True
) -> list[int]:
    """Token ids of the texts before and after a gap, in the form in which the model fills it. Raises
    `UnsupportedFeature` for a tokenizer without tokens for that, `ContextLengthExceeded` for more than ``most``."""
    known = require_tokenizer(tokenizer)
    marks = known.gap_marks
    if marks is None:
        raise UnsupportedFeature(
            "suffix is not supported: this model's tokenizer has no fill-in-the-middle tokens", param="suffix"
        )
    before = encode_text(prompt, known, most, "prompt", add_special_tokens=False)
    after = encode_text(suffix, known, most, "suffix", add_special_tokens=False)
    begin = [known.bos_id] if add_special_tokens and known.begins_with_bos and known.bos_id is not None else []
    return [*begin, *marks.fill(before, after)]


def encode_text(
    text: str, tokenizer: Tokenizer, most: int | None, param: str, *, add_special_tokens: bool = True
) -> list[int]:
    """Token ids of a text. Raises `ContextLengthExceeded` for a long text of more than ``most``. The result may still
    have more (see `Tokenizer.encode_within`), which the request's own check refuses."""
    if most is None:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    ids = tokenizer.encode_within(text, most, add_special_tokens=add_special_tokens)
    if ids is None:
        raise _too_long(most, param)
    return ids


def check_length(text: str, tokenizer: Tokenizer, most: int, param: str) -> None:
    """Raise `ContextLengthExceeded` for a text that certainly has more than ``most`` tokens, without encoding it."""
    if tokenizer.bound.proves_more(text, most):
        raise _too_long(most, param)


def _too_long(most: int, param: str) -> ContextLengthExceeded:
    advice = "Shorten it, or have it cut off by truncate_prompt_tokens at the routes that take it"
    return ContextLengthExceeded.of(most, f"the {param} has more. {advice}", param=param)


def read_truncation(truncate: int, max_len: int, num_out: int = 0) -> int:
    """Most prompt tokens that ``truncate_prompt_tokens`` keeps: the value itself, or for -1 ``max_len`` minus
    ``num_out`` tokens of output. Raises `RequestError` for a value out of range."""
    if truncate == 0 or truncate < -1 or truncate > max_len:
        raise RequestError(
            f"truncate_prompt_tokens must be -1, or from 1 to {max_len}; got {truncate}", param="truncate_prompt_tokens"
        )
    return truncate if truncate != -1 else max(max_len - num_out, 1)


def require_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer, or a `RequestError` that says that only ids can be served."""
    if tokenizer is None:
        raise RequestError("this model is served without a tokenizer: pass token ids instead of text", param="prompt")
    return tokenizer


def open_request(
    request_id: str, token_ids: list[int], params: SamplingParams | PoolingSpec, *, facts: ModelFacts,
    tokenizer: Tokenizer | None,
    namespace: str = "", priority: int = 0, deadline_s: float | None = None,
) -> tuple[list[EngineRequest], OutputAssembler | PooledAssembler]:
    """The engine requests of a prompt (generation: one per choice; pooling: one) and the assembler of their outputs."""
    if isinstance(params, PoolingSpec):
        request = build_pooling_request(
            request_id, token_ids, params, facts=facts, namespace=namespace, priority=priority, deadline_s=deadline_s
        )
        return [request], PooledAssembler()
    requests = build_requests(
        request_id, token_ids, params, facts=facts, tokenizer=tokenizer, namespace=namespace, priority=priority,
        deadline_s=deadline_s,
    )
    return requests, OutputAssembler(requests, params, tokenizer)


def with_seed(params: SamplingParams, seeds: random.Random) -> SamplingParams:
    """The parameters with a seed: the user's, or the next from ``seeds``, so that a run with a configured seed can be
    repeated. ``params`` is not changed."""
    return params if params.seed is not None else msgspec.structs.replace(params, seed=seeds.getrandbits(31))
