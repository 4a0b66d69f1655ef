"""From the fields that say what output must look like to one `Grammar`, whatever their dialect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from headrace.base.errors import RequestError
from headrace.base.grammar import Grammar
from headrace.base.messages import ErrorInfo
from headrace.serving.http.protocol.structure import ResponseFormat

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


def name_field(error: ErrorInfo, kind: str, field: str) -> ErrorInfo:
    """The engine's error about a grammar of this kind, told of the field that asked for it."""
    if error.param != kind or not field:
        return error
    message = field + error.message.removeprefix(kind) if error.message.startswith(kind + ":") else error.message
    return ErrorInfo(error.kind, message, field, error.retry_after)


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
