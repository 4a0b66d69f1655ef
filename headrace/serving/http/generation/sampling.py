"""From request fields to `SamplingParams`: what the client left open comes from the model's own defaults.

From the fields that say what output must look like to one `Grammar`, whatever their dialect."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request

from headrace.base.errors import RequestError
from headrace.base.grammar import Grammar
from headrace.base.sampling import SamplingParams
from headrace.serving.http.generation.context import context_of
from headrace.serving.http.protocol.fields import IdentityFields, ResponseFormat, StopFields
from headrace.serving.http.transport.access import read_request_id

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


MAKERS: dict[str, Callable[..., Grammar]] = {
    "json_schema": Grammar.json_schema, "guided_json": Grammar.json_schema,
    "structured_outputs.json": Grammar.json_schema,
    "regex": Grammar.regex, "guided_regex": Grammar.regex, "structured_outputs.regex": Grammar.regex,
    "ebnf": Grammar.ebnf, "guided_grammar": Grammar.ebnf, "structured_outputs.grammar": Grammar.ebnf,
    "choice": Grammar.choice, "guided_choice": Grammar.choice, "structured_outputs.choice": Grammar.choice,
    "structural_tag": Grammar.structural_tag, "structured_outputs.structural_tag": Grammar.structural_tag,
}


def read_grammar(fields: Any, *, within: str = "") -> Grammar | None:
    """The grammar that a request asks for, None for free text. ``fields`` have those of `MAKERS` that their dialect
    knows; ``within`` stands before their names. Raises `RequestError` when there are two, or one is wrong."""
    asked = {name: value for name in MAKERS if (value := _find(fields, name)) is not None}
    made = [(within + name, MAKERS[name](value, param=within + name)) for name, value in asked.items()]
    if _find(fields, "structured_outputs.json_object"):
        made.append(("structured_outputs.json_object", Grammar.json_object()))
    response_format = getattr(fields, "response_format", None)
    if response_format is not None and (grammar := _read_format(response_format)) is not None:
        made.append(("response_format", grammar))
    if len(made) > 1:
        raise RequestError(f"{' and '.join(name for name, _ in made)} exclude each other; give one", param=made[1][0])
    if not made and getattr(fields, "structured_outputs", None) is not None:
        raise RequestError(
            "structured_outputs needs one of json, regex, choice, grammar, json_object and structural_tag",
            param="structured_outputs"
        )
    return made[0][1] if made else None


def grammar_field(fields: Any, *, within: str = "") -> str:
    """The field that asks for a grammar, as `read_grammar` found it; empty for free text."""
    names = (*MAKERS, "structured_outputs.json_object", "response_format")
    return next((within + name for name in names if _find(fields, name) is not None), "")


def _find(fields: Any, path: str) -> Any:
    for name in path.split("."):
        fields = getattr(fields, name, None)
    return fields


def _read_format(asked: ResponseFormat) -> Grammar | None:
    param = f"response_format.{'format' if asked.type == 'structural_tag' else 'json_schema'}"
    if asked.json_schema is not None and asked.type != "json_schema":
        raise RequestError(
            f"response_format.json_schema belongs to the type json_schema, not {asked.type}",
            param="response_format.json_schema"
        )
    if asked.type == "json_object":
        return Grammar.json_object()
    if asked.type == "json_schema":
        if asked.json_schema is None:
            raise RequestError("response_format.json_schema is required", param=param)
        return Grammar.json_schema(asked.json_schema.schema, param=param + ".schema")
    if asked.type == "structural_tag":
        tag = {name: value for name, value in msgspec.structs.asdict(asked).items() if value is not None}
        return Grammar.structural_tag(tag, param=param)
    return None
