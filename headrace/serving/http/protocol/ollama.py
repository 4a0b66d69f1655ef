"""``/api/...``, Ollama's API: requests and responses (a stream has one per line)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from headrace.serving.http.protocol.fields import (
    INT32,
    MinP,
    NumTop,
    Penalty,
    Positive,
    Repetition,
    Seed,
    Stop,
    Temperature,
    TopK,
    TopP,
)
from headrace.serving.http.protocol.media import Base64
from headrace.serving.http.protocol.messages import JsonObject
from headrace.serving.http.protocol.openai import ContentLogprob
from headrace.serving.http.protocol.tools import MAX_CALLS, MAX_TOOLS, CallId, CallRecord, FunctionTool

ModelName = Annotated[str, Meta(min_length=1, max_length=512)]
Format = Literal["json", ""] | dict[str, Any]
"""A JSON object, no constraint (an empty string), or a JSON schema."""


class OllamaMessage(Struct, kw_only=True):
    """One message; ``tool_name`` and ``tool_call_id`` name the call of a result."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[Base64] | None = None
    tool_calls: Annotated[list[CallRecord], Meta(max_length=MAX_CALLS)] | None = None
    tool_name: str | None = None
    tool_call_id: CallId | None = None


class PlacementOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """Model placement: accepted without effect, it is decided when the server starts."""

    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    numa: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    low_vram: bool | None = None


class OllamaOptions(PlacementOptions, kw_only=True, forbid_unknown_fields=True):
    """Sampling. ``num_predict`` of 0 or less means no limit; ``num_ctx`` must fit the server's context."""

    # Ollama's special values: -1 for no limit, -2 to fill the context.
    num_predict: Annotated[int, Meta(ge=-2, le=INT32)] | None = None
    num_ctx: Annotated[int, Meta(ge=1, le=INT32)] | None = None
    stop: Stop | None = None
    seed: Seed | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    repeat_penalty: Repetition | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


class OllamaRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of ``/api/chat`` and ``/api/generate``. ``stream`` defaults to true; ``keep_alive`` has no effect, the
    model stays loaded."""

    model: ModelName
    stream: bool | None = None
    format: Format | None = None
    options: OllamaOptions | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    keep_alive: str | float | None = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None


class OllamaTool(Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool; only functions are served."""

    type: Literal["function"]
    function: FunctionTool


class OllamaChatRequest(OllamaRequest, kw_only=True, forbid_unknown_fields=True):
    """A conversation; without messages, a check that the model is loaded."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=65536)] | None = None
    tools: Annotated[list[OllamaTool], Meta(max_length=MAX_TOOLS)] | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True, forbid_unknown_fields=True):
    """A prompt for the chat template; an empty one checks that the model is loaded."""

    prompt: str | None = None
    system: str | None = None
    images: list[Base64] | None = None


class OllamaEmbedRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Texts to embed. ``truncate`` defaults to true: texts that are too long are cut at the end."""

    model: ModelName
    input: str | Annotated[list[str], Meta(min_length=1)]
    truncate: bool | None = None
    dimensions: Positive | None = None
    options: OllamaOptions | None = None
    keep_alive: str | float | None = None


class OllamaLegacyEmbedRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """One text to embed (older clients)."""

    model: ModelName
    prompt: str
    options: OllamaOptions | None = None
    keep_alive: str | float | None = None


class OllamaEmbeddings(Struct):
    """One vector per text, at unit length; durations in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(Struct):
    """The vector of one text."""

    embedding: list[float]


class OllamaShowRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The model to describe, under either field name."""

    model: ModelName | None = None
    name: ModelName | None = None
    verbose: bool | None = None


class OllamaResponseFunction(Struct):
    """A function to call."""

    index: int
    name: str
    arguments: JsonObject


class OllamaResponseCall(Struct):
    """A complete call in the response."""

    id: str
    function: OllamaResponseFunction


class OllamaResponseMessage(Struct):
    """New parts of the message, or all of it."""

    content: str = ""
    role: Literal["assistant"] = "assistant"
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaResponseCall] | UnsetType = UNSET


class OllamaResponse(Struct, kw_only=True):
    """A line of the response. The last is ``done`` and has the stop reason, token counts and durations in
    nanoseconds."""

    model: str
    created_at: str
    done: bool
    logprobs: list[ContentLogprob] | UnsetType = UNSET
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaChatResponse(OllamaResponse, kw_only=True):
    """A line of ``/api/chat``."""

    message: OllamaResponseMessage


class OllamaGenerateResponse(OllamaResponse, kw_only=True):
    """A line of ``/api/generate``."""

    response: str
    thinking: str | UnsetType = UNSET


class OllamaDetails(Struct):
    """Facts of a model."""

    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    parent_model: str = ""
    format: str = ""


class OllamaCard(Struct):
    """A model in the list; the digest is a hash of its name."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaList(Struct):
    """The served model and its adapters."""

    models: list[OllamaCard]


class OllamaRunning(Struct):
    """A loaded model: total bytes, and bytes on a GPU."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: int
    context_length: int


class OllamaRunningList(Struct):
    """The loaded models."""

    models: list[OllamaRunning]


class OllamaModel(Struct):
    """Details of a model."""

    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
    modelfile: str = ""
    parameters: str = ""
    template: str = ""


class OllamaVersion(Struct):
    """The server's version."""

    version: str
