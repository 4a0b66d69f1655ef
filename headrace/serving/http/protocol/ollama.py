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
from headrace.serving.http.protocol.messages import JsonObject
from headrace.serving.http.protocol.openai import ContentLogprob
from headrace.serving.http.protocol.tools import MAX_CALLS, MAX_TOOLS, CallId, Tool

ModelName = Annotated[str, Meta(min_length=1, max_length=512)]
Format = Literal["json", ""] | dict[str, Any]


class OllamaFunction(Struct, kw_only=True, forbid_unknown_fields=True):
    """A call's function; ``index`` is taken and not needed."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    arguments: dict[str, Any]
    index: int | None = None


class OllamaCall(Struct, kw_only=True, forbid_unknown_fields=True):
    """A call of an earlier assistant message."""

    function: OllamaFunction
    id: CallId | None = None
    type: Literal["function"] | None = None


class OllamaMessage(Struct, kw_only=True, forbid_unknown_fields=True):
    """One turn; ``tool_name`` and ``tool_call_id`` say whose result it is."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: Annotated[list[OllamaCall], Meta(max_length=MAX_CALLS)] | None = None
    tool_name: str | None = None
    tool_call_id: CallId | None = None


class PlaceFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """How Ollama would place a model: taken without effect, it is placed when the server starts."""

    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    numa: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    low_vram: bool | None = None


class OllamaOptions(PlaceFields, kw_only=True, forbid_unknown_fields=True):
    """How tokens are drawn. ``num_predict`` of 0 or less is no limit; ``num_ctx`` must fit the server's context."""

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
    """What both ways to ask have. ``stream`` is true unless said otherwise; ``keep_alive`` changes nothing, the model
    stays."""

    model: ModelName
    stream: bool | None = None
    format: Format | None = None
    options: OllamaOptions | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    keep_alive: str | float | None = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None


class OllamaChatRequest(OllamaRequest, kw_only=True, forbid_unknown_fields=True):
    """A conversation to answer; without messages it only asks whether the model is there."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=65536)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True, forbid_unknown_fields=True):
    """A question to answer by the chat template; an empty one only asks whether the model is there."""

    prompt: str | None = None
    system: str | None = None


class OllamaEmbedRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Texts to embed. ``truncate`` is true unless said otherwise: the end of texts that are too long is cut off."""

    model: ModelName
    input: str | Annotated[list[str], Meta(min_length=1)]
    truncate: bool | None = None
    dimensions: Positive | None = None
    options: OllamaOptions | None = None
    keep_alive: str | float | None = None


class OllamaOldEmbedRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """One text to embed, as older clients ask."""

    model: ModelName
    prompt: str
    options: OllamaOptions | None = None
    keep_alive: str | float | None = None


class OllamaEmbeddings(Struct):
    """A vector for each text, at unit length, and what it took: nanoseconds and tokens."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(Struct):
    """The vector of one text."""

    embedding: list[float]


class OllamaShowRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Which model to describe, by either name of the field."""

    model: ModelName | None = None
    name: ModelName | None = None
    verbose: bool | None = None


class AskedFunction(Struct):
    """A function to call."""

    index: int
    name: str
    arguments: JsonObject


class AskedCall(Struct):
    """A call of the answer, always whole."""

    id: str
    function: AskedFunction


class OllamaAnswerMessage(Struct):
    """News of the answer, or all of it."""

    content: str = ""
    role: Literal["assistant"] = "assistant"
    thinking: str | UnsetType = UNSET
    tool_calls: list[AskedCall] | UnsetType = UNSET


class OllamaAnswer(Struct, kw_only=True):
    """A line of the answer. The last is ``done``, says why it ended, and counts tokens and nanoseconds."""

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


class OllamaChatAnswer(OllamaAnswer, kw_only=True):
    """Of ``/api/chat``."""

    message: OllamaAnswerMessage


class OllamaGenerateAnswer(OllamaAnswer, kw_only=True):
    """Of ``/api/generate``."""

    response: str
    thinking: str | UnsetType = UNSET


class OllamaDetails(Struct):
    """Facts of a model in Ollama's words."""

    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    parent_model: str = ""
    format: str = ""


class OllamaCard(Struct):
    """A model in the list; the digest is made from its name."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaList(Struct):
    """The served model."""

    models: list[OllamaCard]


class OllamaRunning(Struct):
    """A model in memory: bytes of all it takes, and of those on a GPU."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: int
    context_length: int


class OllamaRunningList(Struct):
    """The models in memory."""

    models: list[OllamaRunning]


class OllamaModel(Struct):
    """A model described."""

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
