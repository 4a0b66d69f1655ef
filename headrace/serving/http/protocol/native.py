"""SGLang's native ``/generate``, and ``/tokenize``, ``/detokenize``, ``/tokenizer_info``."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from headrace.serving.http.protocol.fields import (
    BootstrapHost,
    BootstrapPort,
    BootstrapRoom,
    Count,
    Deadline,
    LogprobIds,
    ModelName,
    NumTop,
    OutputFields,
    Priority,
    RequestId,
    Salt,
    Seed,
    TokenId,
    TransferParams,
    Truncation,
)
from headrace.serving.http.protocol.media import MediaFields
from headrace.serving.http.protocol.openai import ChatMessage, ChatTemplate, Timings
from headrace.serving.http.protocol.tools import MAX_TOOLS, AnyTool

DEFAULT_MAX_NEW_TOKENS = 128  # SGLang's default
MAX_IDS = 1 << 24


class NativeSampling(OutputFields, kw_only=True, forbid_unknown_fields=True):
    """``sampling_params``. ``seed`` and ``sampling_seed`` are the same, as are ``no_stop_trim`` and
    ``include_stop_str_in_output``."""

    max_new_tokens: Count | None = None
    min_new_tokens: Count | None = None
    sampling_seed: Seed | None = None
    no_stop_trim: bool | None = None


class NativeHandling(MediaFields, kw_only=True, forbid_unknown_fields=True):
    """Scheduling of a request. ``deadline_s``: seconds from arrival after which it fails with 504."""

    priority: Priority | None = None
    deadline_s: Deadline | None = None
    cache_salt: Salt | None = None
    extra_key: Salt | None = None
    log_metrics: bool | None = None
    no_logs: bool | None = None
    bootstrap_host: BootstrapHost | list[BootstrapHost | None] | None = None
    bootstrap_port: BootstrapPort | list[BootstrapPort | None] | None = None
    bootstrap_room: BootstrapRoom | list[BootstrapRoom] | None = None
    kv_transfer_params: TransferParams | None = None


class GenerateRequest(NativeHandling, kw_only=True, forbid_unknown_fields=True):
    """One prompt or a batch, as ``text`` or ``input_ids``. ``sampling_params``, ``rid`` and ``lora_path`` (the
    name of an adapter) may be single values or lists with one entry per prompt. ``logprob_start_len`` -1 returns
    logprobs of the output only. ``token_ids_logprob``: tokens whose logprobs are told at every position."""

    text: str | Annotated[list[str], Meta(min_length=1)] | None = None
    input_ids: Annotated[list[TokenId | list[TokenId]], Meta(min_length=1)] | None = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    rid: RequestId | list[RequestId] | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: Truncation | None = None
    top_logprobs_num: NumTop | None = None
    token_ids_logprob: LogprobIds | None = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_timings: bool | None = None
    lora_path: ModelName | list[ModelName | None] | None = None


class FinishReason(Struct):
    """``type`` is ``stop``, ``length`` or ``abort``; ``matched`` the stop string or token id, end of text included."""

    type: str
    matched: str | int | UnsetType = UNSET
    length: int | UnsetType = UNSET
    message: str | UnsetType = UNSET


LogprobTriple = tuple[float | None, int, str | None]
"""``[logprob, token id, text]``; the logprob of the prompt's first token is null."""


class MetaInfo(Struct):
    """Metadata of one output. ``finish_reason`` is null until it has ended; ``e2e_latency`` is in seconds."""

    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float
    prompt_token_ids: list[int] | UnsetType = UNSET
    input_token_logprobs: list[LogprobTriple] | UnsetType = UNSET
    output_token_logprobs: list[LogprobTriple] | UnsetType = UNSET
    input_top_logprobs: list[list[LogprobTriple] | None] | UnsetType = UNSET
    output_top_logprobs: list[list[LogprobTriple]] | UnsetType = UNSET
    input_token_ids_logprobs: list[list[LogprobTriple] | None] | UnsetType = UNSET
    output_token_ids_logprobs: list[list[LogprobTriple]] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class Generated(Struct):
    """One output; when streamed, all of it so far. ``index`` is the output's position in a batch."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | UnsetType = UNSET


# `Raw` fields are copied as JSON text: a million ids as Python objects would block the event loop and fill memory. The
# schemas tell the OpenAPI document what the text contains.
IdsJson = Annotated[Raw, Meta(extra_json_schema={"type": "array", "items": {"type": ["integer", "array"]}})]
TextsJson = Annotated[Raw, Meta(extra_json_schema={"type": "array", "items": {"type": ["string", "array"]}})]
TextJson = Annotated[Raw, Meta(extra_json_schema={"type": "string"})]


class TokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Texts (``prompt`` or ``text``: one or a list) or a conversation (``messages`` and ``tools``) to tokenize."""

    model: ModelName | None = None
    prompt: str | Annotated[list[str], Meta(min_length=1)] | None = None
    text: str | Annotated[list[str], Meta(min_length=1)] | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=65536)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Annotated[list[AnyTool], Meta(max_length=MAX_TOOLS)] | None = None
    chat_template: ChatTemplate | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Tokenized(Struct):
    """Token ids, their count, and ``token_strs`` if requested; for a list of texts lists of these. ``tokens`` and
    ``token_strs`` are encoded JSON."""

    count: int | list[int]
    max_model_len: int
    tokens: IdsJson
    token_strs: TextsJson | UnsetType = UNSET


class RenderedPrompt(Struct):
    """The prompt that the chat template makes of a conversation."""

    prompt: str


class DetokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Token ids to decode."""

    tokens: Annotated[list[TokenId], Meta(max_length=MAX_IDS)]
    model: ModelName | None = None
    skip_special_tokens: bool | None = None


class Detokenized(Struct):
    """The text, under vLLM's name (``prompt``) and SGLang's (``text``), as encoded JSON."""

    prompt: TextJson
    text: TextJson


class TokenizerInfo(Struct):
    """Facts for clients that tokenize through this server, such as evaluation harnesses."""

    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None
    tokenizer_class: str = "remote"
