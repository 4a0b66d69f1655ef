"""From request fields to `SamplingParams`: what the client left open comes from the model's own defaults."""

from __future__ import annotations

import re
import uuid
from typing import Any

from starlette.requests import Request

from headrace.base.errors import RequestError
from headrace.base.sampling import SamplingParams
from headrace.serving.http.context import context_of
from headrace.serving.http.protocol.fields import REQUEST_ID_PATTERN, IdentityFields, StopFields
from headrace.serving.http.structure import read_grammar

REQUEST_ID = re.compile(REQUEST_ID_PATTERN)
DRAWN = (
    "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "seed", "logit_bias",
    "bad_words", "allowed_token_ids", "prompt_logprobs", "min_tokens", "stop", "stop_token_ids", "ignore_eos",
    "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens",
)
MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_defaults(model_defaults: dict[str, float]) -> dict[str, Any]:
    """Those of the model's generation defaults that sampling knows, in its types."""
    known = {name: model_defaults[name] for name in MODEL_DEFAULTS if name in model_defaults}
    return {name: int(value) if name == "top_k" else float(value) for name, value in known.items()}


def sampling_params(
    fields: StopFields, model_defaults: dict[str, float], *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """The parameters of an OpenAI request; bounds that need several fields are checked at submission."""
    asked = {name: value for name in DRAWN if (value := getattr(fields, name)) is not None}
    return SamplingParams(
        **{**read_defaults(model_defaults), **asked}, max_tokens=max_tokens, logprobs=logprobs,
        grammar=read_grammar(fields)
    )


def draw_request_id(prefix: str) -> str:
    """An id no other request has."""
    return f"{prefix}{uuid.uuid4().hex}"


def read_request_id(header: str | None) -> str | None:
    """The header ``X-Request-Id`` when it can name a request, else None."""
    return header if header and REQUEST_ID.fullmatch(header) else None


def given_request_id(fields: IdentityFields) -> str | None:
    """The id a body brings, under either name."""
    if fields.request_id and fields.rid and fields.request_id != fields.rid:
        raise RequestError("request_id and rid are the same field; give one", param="rid")
    return fields.request_id or fields.rid


def pick_request_id(given: str | None, request: Request, prefix: str) -> str:
    """The client's id (``given`` in the body, then the header ``X-Request-Id``), else a new one. A header is drawn by
    proxies, who repeat it when they try again: while a request of that id runs, another one gets a new id."""
    header = request.headers.get("x-request-id")
    if header and read_request_id(header) is None:
        raise RequestError("X-Request-Id must be 1 to 128 letters, digits and . _ : -", param="X-Request-Id")
    if given is None and header and header not in context_of(request).running:
        given = header
    return given or draw_request_id(prefix)


def check_stream_options(fields: IdentityFields) -> tuple[bool, bool]:
    """``(include_usage, continuous_usage_stats)``; options without ``stream`` are an error, as at OpenAI."""
    options = fields.stream_options
    if options is None:
        return False, False
    if not fields.stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    return bool(options.include_usage), bool(options.continuous_usage_stats)
