"""From request fields to `SamplingParams`, `Grammar` and the request id."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from headrace.base.errors import RequestError
from headrace.base.generation import DEFAULT_FIELDS
from headrace.base.grammar import Grammar
from headrace.base.sampling import SamplingParams
from headrace.service.client.prompts import new_request_id
from headrace.serving.http.generation.context import context_of
from headrace.serving.http.protocol.fields import (
    IdentityFields,
    OpenAIFields,
    OutputFields,
    ResponseFormat,
    SamplingFields,
    StructuredOutputs,
)
from headrace.serving.http.transport.access import names_request, read_request_id

RANGE = "dry_range"
NO_SEED = -1
"""The seed with which vLLM's, llama.cpp's and Ollama's clients ask for sampling without one."""
COPIED_FIELDS = (
    *(name for name in SamplingFields.__struct_fields__ if name != RANGE), "stop", "stop_regex", "stop_token_ids",
    "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens",
)
"""Fields of `OutputFields` that `SamplingParams` has under the same names."""
NATIVE_PREFIX = "gen-"
T = TypeVar("T")
GrammarField = tuple[str, Callable[..., Grammar | None], object]
"""Request field, constructor taking the value and ``param``, value."""
NO_FIELDS, NO_OUTPUTS = OpenAIFields(), StructuredOutputs()


def sampling_params(
    fields: OutputFields, model_defaults: dict[str, float], *, max_tokens: int | None, logprobs: int | None,
    within: str = "", **own: Any,
) -> SamplingParams:
    """The sampling parameters of a request. Precedence: ``own`` (parameters that the API names differently), then
    ``fields``, then ``model_defaults`` (from the generation config), then those of `SamplingParams`. None counts as
    not set. ``max_tokens`` None: up to the context's end. ``logprobs``: number of alternatives, None for no
    logprobs. Bounds that involve several fields are checked at submission."""
    values: dict[str, Any] = {name: float(model_defaults[name]) for name in DEFAULT_FIELDS if name in model_defaults}
    if "top_k" in values:
        values["top_k"] = int(values["top_k"])
    values |= {name: value for name in COPIED_FIELDS if (value := getattr(fields, name)) is not None}
    values |= {name: value for name, value in own.items() if value is not None}
    if values.get("seed") == NO_SEED:
        del values["seed"]
    if fields.dry_range is not None:
        if fields.dry_penalty_last_n is not None:
            raise RequestError(f"{within}{RANGE} and dry_penalty_last_n are the same; give one", param=within + RANGE)
        values["dry_penalty_last_n"] = fields.dry_range or -1
    grammar = read_grammar(fields, within=within)
    return SamplingParams(**values, max_tokens=max_tokens, logprobs=logprobs, grammar=grammar)


def openai_params(
    fields: OpenAIFields, model_defaults: dict[str, float], *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """The parameters of a request to an OpenAI route."""
    return sampling_params(
        fields, model_defaults, max_tokens=max_tokens, logprobs=logprobs, min_tokens=fields.min_tokens,
        prompt_logprobs=fields.prompt_logprobs, logprob_token_ids=fields.logprob_token_ids,
    )


def spread(value: T | list[T], count: int, param: str) -> list[T]:
    """The value of each of ``count`` prompts, of a field that has one for all or a list of them. Raises `RequestError`
    for a list of another length."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{param} must be one, or one for each of the {count} prompts", param=param)
    return value


def body_request_id(fields: IdentityFields) -> str | None:
    """The id in a body, under either name."""
    if fields.request_id and fields.rid and fields.request_id != fields.rid:
        raise RequestError("request_id and rid are the same field; give one", param="rid")
    return fields.request_id or fields.rid


def pick_request_id(given: str | None, request: Request, prefix: str) -> str:
    """The API's ``prefix`` with the client's id (``given`` in the body, then the header ``X-Request-Id``), else with a
    new one, too if the header is no valid id. Proxies set the header and repeat it on retries: while a request with
    that id runs, another one gets a new id."""
    header = request.headers.get("x-request-id")
    if header and read_request_id(header) is None:
        raise RequestError("X-Request-Id must be 1 to 256 printable ASCII characters", param="X-Request-Id")
    # The client's own id in the body is not replaced: `open_generation` refuses one that is in use.
    if given is not None:
        state = request.scope.setdefault("state", {})
        state["request_id"] = state.get("request_id") or given  # the response header has it as it was given
        return _with_prefix(given, prefix)
    if header and names_request(header) and _with_prefix(header, prefix) not in context_of(request).running:
        return _with_prefix(header, prefix)
    return new_request_id(prefix)


def _with_prefix(name: str, prefix: str) -> str:
    # SGLang's own route returns ids as they were given.
    return name if prefix == NATIVE_PREFIX or name.startswith(prefix) else prefix + name


def check_streamed(fields: OpenAIFields, num_top: int | None) -> None:
    """Raise `RequestError` for what cannot be streamed. A chunk with the logprobs of a whole vocabulary would take
    longer to write than the next token to compute, and hold up every other stream."""
    if fields.stream and fields.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    if fields.stream and num_top == -1:
        raise RequestError("logprobs of all tokens (-1) cannot be streamed; leave stream out", param="logprobs")


def check_stream_options(fields: IdentityFields) -> tuple[bool, bool]:
    """``(include_usage, continuous_usage_stats)``; options without ``stream`` are an error, as with OpenAI."""
    options = fields.stream_options
    if options is None:
        return False, False
    if not fields.stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    return bool(options.include_usage), bool(options.continuous_usage_stats)


def _grammar_fields(fields: OutputFields) -> list[GrammarField]:
    """The fields of a request that are set and define the output format."""
    openai = fields if isinstance(fields, OpenAIFields) else NO_FIELDS
    outputs = openai.structured_outputs or NO_OUTPUTS
    candidates: tuple[GrammarField, ...] = (
        ("json_schema", Grammar.json_schema, fields.json_schema),
        ("guided_json", Grammar.json_schema, openai.guided_json),
        ("structured_outputs.json", Grammar.json_schema, outputs.json),
        ("regex", Grammar.regex, fields.regex),
        ("guided_regex", Grammar.regex, openai.guided_regex),
        ("structured_outputs.regex", Grammar.regex, outputs.regex),
        ("ebnf", Grammar.ebnf, fields.ebnf),
        ("guided_grammar", Grammar.ebnf, openai.guided_grammar),
        ("structured_outputs.grammar", Grammar.ebnf, outputs.grammar),
        ("choice", Grammar.choice, fields.choice),
        ("guided_choice", Grammar.choice, openai.guided_choice),
        ("structured_outputs.choice", Grammar.choice, outputs.choice),
        ("structural_tag", Grammar.structural_tag, fields.structural_tag),
        ("structured_outputs.structural_tag", Grammar.structural_tag, outputs.structural_tag),
        ("structured_outputs.json_object", lambda _, param: Grammar.json_object(), outputs.json_object or None),
        ("response_format", _read_response_format, openai.response_format),
    )
    return [candidate for candidate in candidates if candidate[2] is not None]


def read_grammar(fields: OutputFields, *, within: str = "") -> Grammar | None:
    """The grammar of a request, None for unconstrained text. ``within`` prefixes field names in errors. Raises
    `RequestError` when there are two grammars, or one is invalid."""
    # ``response_format`` of type text is set but makes no grammar, hence the filter.
    made = [(within + name, make(value, param=within + name)) for name, make, value in _grammar_fields(fields)]
    found = [(name, grammar) for name, grammar in made if grammar is not None]
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise RequestError(f"{names} exclude each other; give one", param=found[1][0])
    if not found and isinstance(fields, OpenAIFields) and fields.structured_outputs is not None:
        raise RequestError(
            "structured_outputs needs one of json, regex, choice, grammar, json_object and structural_tag",
            param="structured_outputs"
        )
    return found[0][1] if found else None


def grammar_field(fields: OutputFields, *, within: str = "") -> str:
    """The name of the field that holds the grammar; empty for unconstrained text."""
    return next((within + name for name, _, _ in _grammar_fields(fields)), "")


def _read_response_format(given: ResponseFormat, *, param: str) -> Grammar | None:
    if given.json_schema is not None and given.type != "json_schema":
        raise RequestError(
            f"{param}.json_schema belongs to the type json_schema, not {given.type}", param=f"{param}.json_schema"
        )
    if given.schema is not None and (given.json_schema is not None or given.type not in ("json_object", "json_schema")):
        raise RequestError(
            f"{param}.schema belongs to the types json_object and json_schema, and excludes json_schema",
            param=f"{param}.schema"
        )
    if given.schema is not None:
        return Grammar.json_schema(given.schema, param=f"{param}.schema")
    match given.type:
        case "json_object":
            return Grammar.json_object()
        case "json_schema":
            if given.json_schema is None:
                raise RequestError(f"{param}.json_schema is required", param=f"{param}.json_schema")
            return Grammar.json_schema(given.json_schema.schema, param=f"{param}.json_schema.schema")
        case "structural_tag":
            tag = {name: value for name, value in msgspec.structs.asdict(given).items() if value is not None}
            return Grammar.structural_tag(tag, param=f"{param}.format")
    return None
