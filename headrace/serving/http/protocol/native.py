"""SGLang's native ``/generate``, and ``/tokenize``, ``/detokenize``, ``/tokenizer_info``."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from headrace.serving.http.protocol.fields import (
    INT32,
    AllowedIds,
    BadWords,
    Choice,
    Choices,
    Count,
    Deadline,
    LogitBias,
    MinP,
    NumTop,
    Penalty,
    Priority,
    Repetition,
    RequestId,
    Salt,
    Schema,
    Seed,
    Source,
    Stop,
    StopIds,
    Tag,
    Temperature,
    TokenId,
    TopK,
    TopP,
)
from headrace.serving.http.protocol.openai import ChatMessage
from headrace.serving.http.protocol.tools import MAX_TOOLS, Tool

DEFAULT_MAX_NEW_TOKENS = 128
PromptLen = Annotated[int, Meta(ge=-1, le=2**31 - 1)]


class NativeDraw(Struct, kw_only=True, forbid_unknown_fields=True):
    """How tokens are drawn."""

    n: Choices | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: Repetition | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Seed | None = None
    sampling_seed: Seed | None = None
    logit_bias: LogitBias | None = None
    bad_words: BadWords | None = None
    allowed_token_ids: AllowedIds | None = None


class NativeStructure(NativeDraw, kw_only=True, forbid_unknown_fields=True):
    """What output must look like; one of them."""

    json_schema: Schema | None = None
    regex: Source | None = None
    ebnf: Source | None = None
    choice: Choice | None = None
    structural_tag: Tag | None = None


class NativeSampling(NativeStructure, kw_only=True, forbid_unknown_fields=True):
    """``sampling_params``. ``seed`` and ``sampling_seed`` are the same, as are ``no_stop_trim`` and
    ``include_stop_str_in_output``."""

    max_new_tokens: Count | None = None
    min_new_tokens: Count | None = None
    stop: Stop | None = None
    stop_token_ids: StopIds | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None


class NativeHandling(Struct, kw_only=True, forbid_unknown_fields=True):
    """How a request is treated. ``deadline_s``: seconds from arrival after which it fails with 504."""

    priority: Priority | None = None
    deadline_s: Deadline | None = None
    cache_salt: Salt | None = None
    extra_key: Salt | None = None
    log_metrics: bool | None = None
    no_logs: bool | None = None


class GenerateRequest(NativeHandling, kw_only=True, forbid_unknown_fields=True):
    """One prompt or a batch, as ``text`` or ``input_ids``. ``sampling_params`` and ``rid`` may be one for all, or a
    list with one for each prompt. ``logprob_start_len`` -1 gives logprobs of the output only."""

    text: str | Annotated[list[str], Meta(min_length=1)] | None = None
    input_ids: Annotated[list[TokenId | list[TokenId]], Meta(min_length=1)] | None = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    rid: RequestId | list[RequestId] | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: PromptLen | None = None
    top_logprobs_num: NumTop | None = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None


class FinishReason(Struct):
    """``type`` is ``stop``, ``length`` or ``abort``; ``matched`` the stop string or token id."""

    type: str
    matched: str | int | UnsetType = UNSET
    length: int | UnsetType = UNSET
    message: str | UnsetType = UNSET


LogprobTriple = tuple[float | None, int, str | None]


class MetaInfo(Struct):
    """Facts of one output. ``finish_reason`` is null while it still grows; ``e2e_latency`` is in seconds."""

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


class Generated(Struct):
    """One output; when streamed, all of it so far. ``index`` tells streams of a batch apart."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | UnsetType = UNSET


GivenIds = Annotated[
    Raw, Meta(extra_json_schema={"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": INT32}})
]
WrittenIds = Annotated[Raw, Meta(extra_json_schema={"type": "array", "items": {"type": "integer"}})]
WrittenTexts = Annotated[Raw, Meta(extra_json_schema={"type": "array", "items": {"type": "string"}})]
WrittenText = Annotated[Raw, Meta(extra_json_schema={"type": "string"})]


class TokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Text (``prompt`` or ``text``) or a conversation (``messages``, with its ``tools``) to turn into token ids."""

    model: Annotated[str, Meta(max_length=512)] | None = None
    prompt: str | None = None
    text: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=65536)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Tokenized(Struct):
    """The ids and how many; ``token_strs`` when asked for. Lists are JSON already."""

    count: int
    max_model_len: int
    tokens: WrittenIds
    token_strs: WrittenTexts | UnsetType = UNSET


class DetokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Token ids to turn into text. ``tokens`` is JSON still, to be read in pieces."""

    tokens: GivenIds
    model: Annotated[str, Meta(max_length=512)] | None = None
    skip_special_tokens: bool | None = None


class Detokenized(Struct):
    """The text, under vLLM's name (``prompt``) and SGLang's (``text``); JSON already."""

    prompt: WrittenText
    text: WrittenText


class TokenizerInfo(Struct):
    """What a client needs to tokenize by this server alone: evaluation harnesses ask for it."""

    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None
    tokenizer_class: str = "remote"
