"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from headrace.serving.http.protocol.chat import ChatMessage
from headrace.serving.http.protocol.fields import INT32
from headrace.serving.http.protocol.tools import MAX_TOOLS, Tool

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
