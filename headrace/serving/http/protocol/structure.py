"""Request fields that say what output must look like, in the spellings of OpenAI, vLLM and SGLang. All mean the same; a
request may use one of them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from headrace.base.grammar import MAX_CHOICES, MAX_GRAMMAR_BYTES

Source = Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_BYTES)]
Schema = Source | dict[str, Any] | bool
Choice = Annotated[list[str], Meta(min_length=1, max_length=MAX_CHOICES)]
Tag = Source | dict[str, Any]


class JsonSchemaFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    """A named JSON schema. With ``strict`` or without it the output is what the schema allows."""

    schema: Schema
    name: Annotated[str, Meta(max_length=256)] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's way. ``text`` is free; ``json_object`` any JSON object; ``json_schema`` what the schema allows;
    ``structural_tag`` free text with structured parts, by ``format``, or ``structures`` and ``triggers``."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class StructuredOutputs(Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's way; one of the fields. ``disable_fallback`` changes nothing: nothing is ever left unenforced."""

    json: Schema | None = None
    regex: Source | None = None
    choice: Choice | None = None
    grammar: Source | None = None
    json_object: bool | None = None
    structural_tag: Tag | None = None
    disable_fallback: bool | None = None
