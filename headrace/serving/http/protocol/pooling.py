"""``/v1/embeddings``, ``/v1/classify``, ``/v1/score``, ``/v1/rerank`` and ``/encode``."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from headrace.serving.http.protocol.fields import Positive, Priority, RequestId, Salt, TokenId, Truncation

MAX_LABELS = 128
ModelName = Annotated[str, Meta(max_length=512)]
Texts = Annotated[list[str], Meta(min_length=1)]
Ids = Annotated[list[TokenId], Meta(min_length=1)]
Input = str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]


class ReadFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """What all of these routes take. ``truncate_prompt_tokens``: the end of longer texts is cut off, -1 at what the
    model takes; left out, they are refused. ``user`` changes nothing."""

    model: ModelName | None = None
    user: str | None = None
    truncate_prompt_tokens: Truncation | None = None
    request_id: RequestId | None = None
    rid: RequestId | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None


class EmbeddingRequest(ReadFields, kw_only=True, forbid_unknown_fields=True):
    """Texts or token ids, one or many. ``dimensions`` keeps the first numbers of each embedding, at unit length."""

    input: Input
    dimensions: Positive | None = None
    encoding_format: Literal["float", "base64"] | None = None
    add_special_tokens: bool | None = None


class ReadUsage(Struct):
    """Tokens read."""

    prompt_tokens: int
    total_tokens: int


class Embedding(Struct):
    """One embedding: numbers, or base64 of little-endian float32."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingAnswer(Struct):
    """All embeddings in the order of the input."""

    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: ReadUsage
    object: Literal["list"] = "list"


class ClassifyRequest(ReadFields, kw_only=True, forbid_unknown_fields=True):
    """Texts or token ids. ``use_activation`` false gives the raw logits (``activation`` is its older name)."""

    input: Input
    use_activation: bool | None = None
    activation: bool | None = None
    add_special_tokens: bool | None = None


class Classification(Struct):
    """The likeliest class of a text, and the probabilities (or raw logits) of all."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyAnswer(Struct):
    """All classifications in the order of the input."""

    id: str
    created: int
    model: str
    data: list[Classification]
    usage: ReadUsage
    object: Literal["list"] = "list"


class ScoreRequest(ReadFields, kw_only=True, forbid_unknown_fields=True):
    """Pairs: ``text_1`` with each of ``text_2`` (also ``queries`` and ``documents``), or one with one where both are
    lists of a length. ``query``, ``items`` and ``label_token_ids`` ask a model that generates for the probabilities of
    these tokens after query and item (``item_first``: item and query); ``apply_softmax``: among themselves."""

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
    """How well the texts of a pair go together."""

    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreAnswer(Struct):
    """One score for each pair in ``data``; or, in ``scores``, the probabilities of the label tokens for each item."""

    id: str
    created: int
    model: str
    usage: ReadUsage
    data: list[Score] | UnsetType = UNSET
    scores: list[list[float]] | UnsetType = UNSET
    object: Literal["list", "scoring"] = "list"


class Document(Struct, kw_only=True, forbid_unknown_fields=True):
    """A document's text."""

    text: str


class RerankRequest(ReadFields, kw_only=True, forbid_unknown_fields=True):
    """Documents to be ordered by how well they answer the query; the ``top_n`` best are told. ``instruct`` tells a
    model that is asked in words what to look for."""

    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1)]
    top_n: Positive | None = None
    return_documents: bool | None = None
    instruct: str | None = None


class Ranked(Struct):
    """A document's place in the request, its score, and itself if wanted."""

    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class RerankAnswer(Struct):
    """Best first."""

    id: str
    model: str
    results: list[Ranked]
    usage: ReadUsage


class EncodeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """SGLang's form: one text or a batch, as ``text`` or ``input_ids``."""

    text: str | Texts | None = None
    input_ids: Annotated[list[TokenId | list[TokenId]], Meta(min_length=1)] | None = None
    dimensions: Positive | None = None
    truncate_prompt_tokens: Truncation | None = None
    rid: RequestId | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None


class EncodeInfo(Struct):
    """Facts of one text; ``e2e_latency`` is in seconds."""

    id: str
    prompt_tokens: int
    cached_tokens: int
    e2e_latency: float


class Encoded(Struct):
    """One embedding in SGLang's form."""

    embedding: list[float]
    meta_info: EncodeInfo
