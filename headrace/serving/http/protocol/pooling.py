"""``/v1/embeddings``, ``/v1/classify``, ``/v1/score``, ``/v1/rerank`` and ``/encode``."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from headrace.serving.http.protocol.fields import (
    ModelName,
    Positive,
    Priority,
    RequestId,
    Salt,
    Side,
    TokenId,
    Truncation,
)
from headrace.serving.http.protocol.openai import ChatMessage

MAX_LABELS = 128  # label tokens per request
Texts = Annotated[list[str], Meta(min_length=1)]
Ids = Annotated[list[TokenId], Meta(min_length=1)]
# Wider than allowed, as msgspec cannot express a union of list types; `split_inputs` refuses mixtures.
Input = str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]


class PoolingFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of all pooling routes. ``truncate_prompt_tokens``: longer texts are cut at the end, -1: at the model's
    limit; without it they are refused. ``truncation_side`` "left" cuts the begin of single texts instead. ``user`` has
    no effect."""

    model: ModelName | None = None
    user: str | None = None
    truncate_prompt_tokens: Truncation | None = None
    truncation_side: Side | None = None
    request_id: RequestId | None = None
    rid: RequestId | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None


class EmbeddingRequest(PoolingFields, kw_only=True, forbid_unknown_fields=True):
    """Texts or token ids, one or many; or ``messages``, which may have images: one embedding of the conversation in the
    model's chat template, or of its only part where the model embeds a text or an image. ``dimensions`` keeps the first
    values of each embedding, at unit length."""

    input: Input | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=1024)] | None = None
    add_generation_prompt: bool | None = None
    dimensions: Positive | None = None
    encoding_format: Literal["float", "base64"] | None = None
    add_special_tokens: bool | None = None


class PoolingUsage(Struct):
    """Prompt tokens."""

    prompt_tokens: int
    total_tokens: int


class Embedding(Struct):
    """One embedding: floats, or base64 of little-endian float32."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingResponse(Struct):
    """Embeddings in input order."""

    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: PoolingUsage
    object: Literal["list"] = "list"


class ClassifyRequest(PoolingFields, kw_only=True, forbid_unknown_fields=True):
    """Texts or token ids. ``use_activation`` false returns raw logits (``activation`` is its older name)."""

    input: Input
    use_activation: bool | None = None
    activation: bool | None = None
    add_special_tokens: bool | None = None


class Classification(Struct):
    """The most likely class, and the probabilities (or raw logits) of all classes."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyResponse(Struct):
    """Classifications in input order."""

    id: str
    created: int
    model: str
    data: list[Classification]
    usage: PoolingUsage
    object: Literal["list"] = "list"


class ScoreRequest(PoolingFields, kw_only=True, forbid_unknown_fields=True):
    """Pairs: one ``text_1`` with every ``text_2`` (also ``queries`` and ``documents``), or lists of equal length
    pairwise. SGLang's form, for models that generate: probabilities of ``label_token_ids`` after ``query`` and each of
    ``items`` (``item_first``: item, then query); ``apply_softmax`` normalises over the labels."""

    text_1: str | Texts | None = None
    text_2: str | Texts | None = None
    queries: str | Texts | None = None
    documents: str | Texts | None = None
    instruct: str | None = None
    query: str | Ids | None = None
    items: str | Annotated[list[str | Ids], Meta(min_length=1)] | None = None
    label_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_LABELS)] | None = None
    apply_softmax: bool | None = None
    item_first: bool | None = None


class Score(Struct):
    """The score of one pair."""

    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreResponse(Struct):
    """``data``: one score per pair; or ``scores``: probabilities of the label tokens per item."""

    id: str
    created: int
    model: str
    usage: PoolingUsage
    data: list[Score] | UnsetType = UNSET
    scores: list[list[float]] | UnsetType = UNSET
    object: Literal["list", "scoring"] = "list"


class Document(Struct, kw_only=True, forbid_unknown_fields=True):
    """A document's text."""

    text: str


class RerankRequest(PoolingFields, kw_only=True, forbid_unknown_fields=True):
    """Documents to order by relevance; the ``top_n`` best are returned. ``instruct`` is the instruction for models that
    score by a prompt."""

    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1)]
    top_n: Positive | None = None
    return_documents: bool | None = None
    instruct: str | None = None


class Ranked(Struct):
    """A document's index in the request, its score, and the document if requested."""

    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class RerankResponse(Struct):
    """Documents, best first."""

    id: str
    model: str
    results: list[Ranked]
    usage: PoolingUsage


class EncodeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """SGLang's form: one text or a batch, as ``text`` or ``input_ids``. ``lora_path``: the name of an adapter."""

    text: str | Texts | None = None
    input_ids: Annotated[list[TokenId | list[TokenId]], Meta(min_length=1)] | None = None
    dimensions: Positive | None = None
    truncate_prompt_tokens: Truncation | None = None
    rid: RequestId | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    lora_path: ModelName | None = None


class EncodeInfo(Struct):
    """Metadata of one text; ``e2e_latency`` is in seconds."""

    id: str
    prompt_tokens: int
    cached_tokens: int
    e2e_latency: float


class Encoded(Struct):
    """One embedding in SGLang's form."""

    embedding: list[float]
    meta_info: EncodeInfo
