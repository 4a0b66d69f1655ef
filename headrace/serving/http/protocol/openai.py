"""``/v1/chat/completions``, ``/v1/completions`` and ``/v1/models``: requests and responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from headrace.serving.http.protocol.fields import Choices, NumTop, OpenAIFields, Positive, TokenId
from headrace.serving.http.protocol.media import ContentPart, MediaData
from headrace.serving.http.protocol.tools import MAX_CALLS, CallDelta, CallId, CallRecord, ResponseCall, ToolFields

Verbosity = Literal["low", "medium", "high"]
ChatTemplate = Annotated[str, Meta(max_length=65_536)]


# In responses UNSET leaves a field out of the JSON, None sends null. Times named ``created`` are seconds since the
# epoch.
class PromptTokensDetails(Struct):
    """Prompt tokens that came from the prefix cache, and those that stand for media, if there are any."""

    cached_tokens: int = 0
    image_tokens: int | UnsetType = UNSET
    audio_tokens: int | UnsetType = UNSET
    video_tokens: int | UnsetType = UNSET

    def add_media(self, kind: str, count: int) -> None:
        """Count tokens that stand for media of a kind."""
        match kind:
            case "image":
                self.image_tokens = count + (self.image_tokens or 0)
            case "audio":
                self.audio_tokens = count + (self.audio_tokens or 0)
            case "video":
                self.video_tokens = count + (self.video_tokens or 0)


class Usage(Struct):
    """Token counts of a request, summed over its choices and prompts; every prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
        """Usage from the three counts."""
        details = PromptTokensDetails(cached_tokens)
        return cls(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details)


class Timings(Struct):
    """Where a request's time went: seconds in the queue, from there to the first token, and from there to the end or so
    far; and prompt tokens from the prefix cache. Of several prompts: until the first began, until all had a token.
    ``draft_tokens`` were verified, and ``accepted_tokens`` of the output were drafts; its other tokens took a step
    each."""

    queue_s: float
    prefill_s: float
    decode_s: float
    cached_tokens: int
    draft_tokens: int
    accepted_tokens: int


class PromptLogprob(Struct):
    """One candidate at a prompt position; ``rank`` is 1 for the most likely token, null for one that was asked for by
    its id."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobsJson = dict[str, PromptLogprob]
"""Candidates of one prompt position by token id."""


class ModelCard(Struct):
    """A served model, its ``task``, and what prompts may hold. An adapter has its ``parent``, the model that it
    changes; ``root`` is then where it comes from, of a path on this machine its last part."""

    id: str
    created: int
    max_model_len: int
    root: str
    task: Literal["generate", "embed", "classify"] = "generate"
    input_modalities: tuple[str, ...] = ("text",)
    object: Literal["model"] = "model"
    owned_by: str = "headrace"
    parent: str | None = None


class ModelList(Struct):
    """All served models."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class ChatMessage(Struct, kw_only=True):
    """One message. ``reasoning`` is another name of ``reasoning_content``. ``refusal`` is the text of a message without
    content. ``audio`` and ``function_call`` must be null or empty. Unknown keys, such as ``annotations``, are ignored:
    clients send back the messages they received, with fields of their own or of other servers."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Annotated[list[CallRecord], Meta(max_length=MAX_CALLS)] | None = None
    tool_call_id: CallId | None = None
    refusal: str | None = None
    audio: dict[str, Any] | None = None
    function_call: dict[str, Any] | None = None

    @property
    def text_or_parts(self) -> str | list[ContentPart] | None:
        """The content, else the refusal."""
        return self.refusal if self.content is None else self.content


class ChatRequest(ToolFields, kw_only=True, forbid_unknown_fields=True):
    """A conversation. ``max_completion_tokens`` and ``max_tokens`` are the same limit; the default is the rest of the
    context. ``continue_final_message`` continues the last message instead of starting a new one. ``verbosity`` is
    accepted without effect. ``chat_template``, Jinja text, replaces the model's, if the server allows it."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=65536)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Verbosity | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: ChatTemplate | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TopLogprob(Struct):
    """A candidate token. ``bytes`` are exact; ``token`` may hold replacement characters."""

    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(Struct):
    """The sampled token and the most likely ones."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """One entry per output token."""

    content: list[ContentLogprob]
    refusal: None = None


class AssistantMessage(Struct):
    """The message: text (null if there are only calls), reasoning under both names, calls."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ResponseCall] | UnsetType = UNSET


class ChatChoice(Struct):
    """One of the ``n`` choices. ``stop_reason`` is the stop string or token id of the request that matched;
    ``matched_stop`` is the same, or the id of the model's own end of text."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    matched_stop: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class TransferAnswer(Struct):
    """vLLM's form: what a router sends to the decode server as ``kv_transfer_params``."""

    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    remote_block_ids: list[int] = []
    tp_size: int = 1


class ChatCompletion(Struct):
    """The whole response."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    object: Literal["chat.completion"] = "chat.completion"
    prompt_logprobs: list[PromptLogprobsJson | None] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    kv_transfer_params: TransferAnswer | UnsetType = UNSET


class ChatDelta(Struct):
    """New parts of a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET

    @property
    def is_content_alone(self) -> bool:
        """Whether the delta holds content and nothing else."""
        return bool(self.content) and self.role is UNSET and self.reasoning is UNSET and self.tool_calls is UNSET


class ChatChunkChoice(Struct):
    """New parts of one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType = UNSET
    matched_stop: str | int | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct):
    """One server-sent event of a stream."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    # with ``include_usage`` null in all chunks but the last, as OpenAI does it; otherwise left out
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


DEFAULT_MAX_TOKENS = 16  # OpenAI's default for completions; chats have no limit but the context
PromptItem = str | TokenId | list[TokenId]
Prompt = str | Annotated[list[PromptItem], Meta(min_length=1)]


class CompletionRequest(OpenAIFields, kw_only=True, forbid_unknown_fields=True):
    """``prompt`` is a string, token ids, or a list of either. ``echo`` puts the prompt before the output; with
    ``max_tokens`` 0 nothing follows it. ``best_of`` must equal ``n``. ``suffix``: the text after the output, for models
    that fill in the middle. ``image_data`` and the like: media at the placeholders of the prompts."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: NumTop | None = None
    best_of: Choices | None = None
    suffix: str | None = None
    image_data: MediaData | None = None
    audio_data: MediaData | None = None
    video_data: MediaData | None = None


class CompletionLogprobs(Struct):
    """Parallel lists, one entry per token; ``text_offset`` counts characters from the start of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct):
    """One choice, or a streamed piece of it. Choice ``i * n + j`` is the j-th of prompt i."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    matched_stop: str | int | None = None
    prompt_logprobs: list[PromptLogprobsJson | None] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(Struct):
    """The whole response, or one server-sent event of a stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str
    object: Literal["text_completion"] = "text_completion"
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    kv_transfer_params: TransferAnswer | UnsetType = UNSET
