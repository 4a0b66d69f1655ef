"""Request fields that several routes share: sampling, output form, stopping; and the fields that are refused by name.
Bounds are part of the types, so the OpenAPI document shows them. ``null`` means the same as a missing field.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from headrace.base.grammar import MAX_CHOICES, MAX_GRAMMAR_BYTES
from headrace.base.sampling import (
    MAX_BAD_WORDS,
    MAX_BIASED_TOKENS,
    MAX_BREAKER_TEXT,
    MAX_BREAKERS,
    MAX_DRY_LENGTH,
    MAX_LOGPROB_IDS,
    MAX_N,
    MAX_STOP_REGEX,
    MAX_STOP_TEXT,
    MAX_STOPS,
    MAX_TOP_LOGPROBS,
)

INT32 = 2**31 - 1

Source = Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_BYTES)]
Schema = Source | dict[str, Any] | bool
Choice = Annotated[list[str], Meta(min_length=1, max_length=MAX_CHOICES)]
Tag = Source | dict[str, Any]
TokenId = Annotated[int, Meta(ge=0, le=INT32)]
StopText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_TEXT)]
Stop = StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)]
StopPattern = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_REGEX)]
StopRegex = StopPattern | Annotated[list[StopPattern], Meta(max_length=MAX_STOPS)]
StopIds = Annotated[list[TokenId], Meta(max_length=MAX_STOPS * 4)]
BadWords = Annotated[list[StopText], Meta(max_length=MAX_BAD_WORDS)]
AllowedIds = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_BIASED_TOKENS)]
LogitBias = Annotated[
    dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]],
    Meta(max_length=MAX_BIASED_TOKENS, extra_json_schema={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"}}),
]
Count = Annotated[int, Meta(ge=0, le=INT32)]
Truncation = Annotated[int, Meta(ge=-1, le=INT32)]
Side = Literal["left", "right"]
Positive = Annotated[int, Meta(ge=1, le=INT32)]
NumTop = Annotated[int, Meta(ge=-1, le=MAX_TOP_LOGPROBS)]
"""A number of most likely tokens; -1: all tokens of the vocabulary."""
LogprobIds = Annotated[list[TokenId], Meta(max_length=MAX_LOGPROB_IDS)]
Breaker = Annotated[str, Meta(min_length=1, max_length=MAX_BREAKER_TEXT)]
Breakers = Annotated[list[Breaker], Meta(max_length=MAX_BREAKERS)]
Choices = Annotated[int, Meta(ge=1, le=MAX_N)]
Priority = Annotated[int, Meta(ge=-INT32, le=INT32)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
TopP = Annotated[float, Meta(ge=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=INT32)]
MinP = Annotated[float, Meta(ge=0, le=1)]
Repetition = Annotated[float, Meta(gt=0, le=10)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
REQUEST_ID_PATTERN = r"^[A-Za-z0-9._:-]{1,128}$(?!\n)"  # Python's $ also matches before a final newline
RequestId = Annotated[str, Meta(pattern=REQUEST_ID_PATTERN)]
MAX_TOOL_NAME = 128
TOOL_NAME_PATTERN = r"^[A-Za-z0-9_.:/-]{1,128}$(?!\n)"
ToolName = Annotated[str, Meta(pattern=TOOL_NAME_PATTERN)]
IN_WORDS = {
    REQUEST_ID_PATTERN: "1 to 128 characters of A-Z, a-z, 0-9, '.', '_', ':' and '-'",
    TOOL_NAME_PATTERN: "1 to 128 characters of A-Z, a-z, 0-9, '_', '.', ':', '/' and '-'",
}
"""What each pattern allows, for errors."""
Deadline = Annotated[float, Meta(gt=0, le=86_400)]
Salt = Annotated[str, Meta(min_length=1, max_length=256)]
ModelName = Annotated[str, Meta(max_length=512)]


# Requests forbid unknown fields: a misspelled field must not be ignored silently. Optional fields default to None,
# which means "not set"; real defaults come from the model (`sampling_params`).
class JsonSchemaFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    """A named JSON schema. It is enforced with and without ``strict``."""

    schema: Schema
    name: Annotated[str, Meta(max_length=256)] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's output format: ``text`` is unconstrained; ``json_object`` is any JSON object, or one that follows
    ``schema`` (llama.cpp's form); ``json_schema`` follows the schema, given by either field; ``structural_tag`` is free
    text with structured parts, given by ``format`` or ``structures`` and ``triggers``."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema: Schema | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class StructuredOutputs(Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's output format; exactly one field. ``disable_fallback`` has no effect: every grammar is enforced."""

    json: Schema | None = None
    regex: Source | None = None
    choice: Choice | None = None
    grammar: Source | None = None
    json_object: bool | None = None
    structural_tag: Tag | None = None
    disable_fallback: bool | None = None


class StreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """``include_usage`` adds a last chunk with the usage; ``continuous_usage_stats`` adds usage to every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class RepetitionFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """DRY and XTC; see `headrace.base.sampling.RepetitionParams`. ``dry_range`` is another name of
    ``dry_penalty_last_n``, in which 0 means the whole context."""

    dry_multiplier: Annotated[float, Meta(ge=0, le=100)] | None = None
    dry_base: Annotated[float, Meta(ge=1, le=100)] | None = None
    dry_allowed_length: Annotated[int, Meta(ge=1, le=MAX_DRY_LENGTH)] | None = None
    dry_penalty_last_n: Truncation | None = None
    dry_range: Count | None = None
    dry_sequence_breakers: Breakers | None = None
    xtc_probability: Annotated[float, Meta(ge=0, le=1)] | None = None
    xtc_threshold: Annotated[float, Meta(ge=0, le=1)] | None = None


class SharedSampling(RepetitionFields, kw_only=True, forbid_unknown_fields=True):
    """How tokens are sampled, on every route where clients of other servers set it."""

    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: Repetition | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Seed | None = None
    logit_bias: LogitBias | None = None
    bad_words: BadWords | None = None
    allowed_token_ids: AllowedIds | None = None


class SamplingFields(SharedSampling, kw_only=True, forbid_unknown_fields=True):
    """How tokens are sampled. Defaults: the model's generation config, then OpenAI's."""

    n: Choices | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None


class OutputFields(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """What the output must look like (one of the first five), when it stops, and how it becomes text."""

    json_schema: Schema | None = None
    regex: Source | None = None
    ebnf: Source | None = None
    choice: Choice | None = None
    structural_tag: Tag | None = None
    stop: Stop | None = None
    stop_regex: StopRegex | None = None
    stop_token_ids: StopIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None


class IdentityFields(OutputFields, kw_only=True, forbid_unknown_fields=True):
    """The model, the request id and scheduling. ``user`` to ``prompt_cache_options`` are accepted without effect.
    Requests with different ``cache_salt`` share no cached prefix."""

    model: ModelName | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    request_id: RequestId | None = None
    rid: RequestId | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None


class AnswerFields(IdentityFields, kw_only=True, forbid_unknown_fields=True):
    """Further parts of the answer. ``logprob_token_ids``: tokens whose logprobs are returned at every position, besides
    the most likely ones. ``return_tokens_as_token_ids`` writes the tokens of logprobs as ``token_id:7``;
    ``return_timings`` adds ``timings``."""

    logprob_token_ids: LogprobIds | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_timings: bool | None = None


BootstrapHost = Annotated[str, Meta(min_length=1, max_length=255)]
BootstrapPort = Annotated[int, Meta(ge=1, le=65535)]
BootstrapRoom = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class TransferParams(Struct, kw_only=True):
    """vLLM's ``kv_transfer_params``; keys of its connectors that are not listed are ignored."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_request_id: Annotated[str, Meta(max_length=256)] | None = None
    remote_host: BootstrapHost | None = None
    remote_port: BootstrapPort | None = None


class ExchangeFields(AnswerFields, kw_only=True, forbid_unknown_fields=True):
    """Prefill-decode disaggregation: set by routers, in SGLang's form (``bootstrap_*``; lists have one entry for each
    prompt) or vLLM's."""

    bootstrap_host: BootstrapHost | list[BootstrapHost | None] | None = None
    bootstrap_port: BootstrapPort | list[BootstrapPort | None] | None = None
    bootstrap_room: BootstrapRoom | list[BootstrapRoom] | None = None
    kv_transfer_params: TransferParams | None = None


class OpenAIFields(ExchangeFields, kw_only=True, forbid_unknown_fields=True):
    """Fields of both OpenAI routes. ``deadline_s``: seconds from arrival after which the request fails with 504.
    ``truncate_prompt_tokens``: keep the last so many prompt tokens (the first with ``truncation_side`` "right"); -1: as
    many as leave room for the output.
    ``response_format`` is OpenAI's, ``structured_outputs`` and ``guided_*`` are vLLM's."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Source | None = None
    guided_choice: Choice | None = None
    guided_grammar: Source | None = None
    prompt_logprobs: NumTop | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Truncation | None = None
    truncation_side: Side | None = None
    deadline_s: Deadline | None = None


TOOLS = "use tools and tool_choice, and the role 'tool' for results"
STRUCTURE = "the server chooses the grammar library and allows whitespace where JSON does"
MEDIA = (
    "put media into messages, as image_url, input_audio or video_url; /generate and /v1/completions take image_data, "
    "audio_data and video_data"
)
SPEECH = "the output is text alone"
REASONING = (
    "use reasoning_effort, enable_thinking, separate_reasoning, stream_reasoning, include_reasoning or "
    "chat_template_kwargs"
)
ADAPTERS = "name the adapter as the model, alone or as base:name"
INTERNALS = "model internals are not returned"
PLACEMENT = "requests cannot be placed by hand"

_REASONS: tuple[tuple[str, str], ...] = (
    ("functions function_call", TOOLS),
    ("guided_decoding_backend guided_whitespace_pattern", STRUCTURE),
    ("image_data video_data audio_data images", MEDIA),
    ("audio modalities", SPEECH),
    (
        "mm_processor_kwargs media_io_kwargs mm_hashes video_config use_audio_in_video",
        "media are prepared as the model's own processor says"
    ),
    ("reasoning require_reasoning", REASONING),
    ("lora_path lora_id lora_request", ADAPTERS),
    (
        "return_hidden_states return_routed_experts return_indexer_topk return_entropy return_meta_info "
        "return_sampling_mask", INTERNALS
    ),
    (
        "bootstrap_host bootstrap_port bootstrap_room kv_transfer_params",
        "KV pages are exchanged for /v1/chat/completions, /v1/completions and /generate"
    ),
    (
        "bootstrap_pair_key routed_dp_rank data_parallel_rank routing_key disagg_prefill_dp_rank decode_tp_size "
        "kv_hints", PLACEMENT
    ),
    ("input_embeds prompt_embeds", "embeddings as input are not supported; send text or token ids"),
    (
        "session_id session_params conversation_id",
        "sessions are not supported; the prefix cache makes them unnecessary"
    ),
    ("use_beam_search length_penalty early_stopping", "beam search is not supported"),
    ("chat_template_content_format", "the server finds out what the template takes"),
    (
        "custom_logit_processor logits_processors custom_params vllm_xargs",
        "code and parameters of other servers are not run"
    ),
    ("extra_body", "put its fields into the body itself, as OpenAI's client does with extra_body"),
    ("suffix", "text after the gap (fill in the middle) belongs to /v1/completions"),
    ("documents", "retrieval templates are not supported yet; put the documents into a message"),
    ("prediction", "predicted output is not supported yet"),
    ("web_search_options", "the server cannot search the web"),
    ("moderation", "the server moderates nothing"),
    ("speed", "the server has one speed"),
    ("inference_geo", "the server computes where it runs"),
    ("repetition_detection", "repetition detection is not supported; use repetition_penalty or stop"),
    ("typical_p", "typical sampling is not supported; use top_p or min_p"),
    ("stream_interval", "chunks are sent as they arrive"),
    ("mcp_servers container", "the server runs no tools; run them in the client"),
    ("context_management", "conversations are never shortened; send only the messages the model should see"),
    ("conversation", "conversations are not stored; use previous_response_id, or send all items as input"),
    ("max_tool_calls", "the server runs no tools; use parallel_tool_calls"),
    ("raw template context", "prompts are made by the model's chat template; use /v1/completions for others"),
)
DEFERRED: dict[str, str] = {name: reason for names, reason in _REASONS for name in names.split()}
"""Fields that other servers know and this one does not support, with what to do instead."""

RESTRICTED = frozenset({"modalities", "context_management"})
"""Deferred fields that some route accepts with values that need no support."""

MEANINGFUL_WHEN_EMPTY = frozenset({"web_search_options"})
"""Deferred fields that request something even as an empty object."""
