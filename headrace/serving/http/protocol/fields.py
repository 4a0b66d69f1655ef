"""Request fields shared by the OpenAI routes, in layers: identity, drawing, stopping. Bounds stand in the types, so
that the OpenAPI document tells them. ``null`` always means the same as leaving the field out.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from headrace.base.sampling import MAX_BAD_WORDS, MAX_BIASED_TOKENS, MAX_N, MAX_STOP_TEXT, MAX_STOPS, MAX_TOP_LOGPROBS
from headrace.serving.http.protocol.structure import Choice, ResponseFormat, Schema, Source, StructuredOutputs, Tag

INT32 = 2**31 - 1

TokenId = Annotated[int, Meta(ge=0, le=INT32)]
StopText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_TEXT)]
Stop = StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)]
StopIds = Annotated[list[TokenId], Meta(max_length=MAX_STOPS * 4)]
BadWords = Annotated[list[StopText], Meta(max_length=MAX_BAD_WORDS)]
AllowedIds = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_BIASED_TOKENS)]
LogitBias = Annotated[
    dict[int, Annotated[float, Meta(ge=-100, le=100)]],
    Meta(max_length=MAX_BIASED_TOKENS, extra_json_schema={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"}}),
]
Count = Annotated[int, Meta(ge=0, le=INT32)]
Truncation = Annotated[int, Meta(ge=-1, le=INT32)]
Positive = Annotated[int, Meta(ge=1, le=INT32)]
NumTop = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Choices = Annotated[int, Meta(ge=1, le=MAX_N)]
Priority = Annotated[int, Meta(ge=-INT32, le=INT32)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
TopP = Annotated[float, Meta(ge=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=INT32)]
MinP = Annotated[float, Meta(ge=0, le=1)]
Repetition = Annotated[float, Meta(gt=0, le=10)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
REQUEST_ID_PATTERN = r"^[A-Za-z0-9._:-]{1,128}$(?!\n)"  # in Python alone, $ also matches before a last line break
RequestId = Annotated[str, Meta(pattern=REQUEST_ID_PATTERN)]
Deadline = Annotated[float, Meta(gt=0, le=86_400)]
Salt = Annotated[str, Meta(min_length=1, max_length=256)]


class StreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """``include_usage`` adds a last chunk with the usage; ``continuous_usage_stats`` puts it on every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class IdentityFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """Who asks, for which model, under which id. ``user`` to ``prompt_cache_retention`` are accepted and change
    nothing here. ``cache_salt`` keeps the prefix cache apart from requests with another salt."""

    model: Annotated[str, Meta(max_length=512)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    request_id: RequestId | None = None
    rid: RequestId | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    return_token_ids: bool | None = None


class DrawFields(IdentityFields, kw_only=True, forbid_unknown_fields=True):
    """How tokens are drawn; what is left open comes from the model's own generation config, then the OpenAI default."""

    n: Choices | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: Repetition | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Seed | None = None
    logit_bias: LogitBias | None = None
    bad_words: BadWords | None = None
    allowed_token_ids: AllowedIds | None = None
    prompt_logprobs: NumTop | None = None


class StructureFields(DrawFields, kw_only=True, forbid_unknown_fields=True):
    """What output must look like: ``response_format`` (OpenAI), ``structured_outputs`` and ``guided_*`` (vLLM), and
    the rest (SGLang)."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Source | None = None
    guided_choice: Choice | None = None
    guided_grammar: Source | None = None
    json_schema: Schema | None = None
    regex: Source | None = None
    ebnf: Source | None = None
    choice: Choice | None = None
    structural_tag: Tag | None = None


class StopFields(StructureFields, kw_only=True, forbid_unknown_fields=True):
    """When output ends, what it must look like, and how it becomes text. ``deadline_s``: seconds from arrival after
    which the request fails with 504, however far it has come. ``truncate_prompt_tokens``: of longer prompts the last so
    many tokens are read, -1: as many as leave room for the output."""

    max_tokens: Count | None = None
    min_tokens: Count | None = None
    stop: Stop | None = None
    stop_token_ids: StopIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Truncation | None = None
    deadline_s: Deadline | None = None
