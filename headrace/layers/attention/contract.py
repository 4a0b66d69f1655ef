"""The attention contract: a step's inputs as a backend gets them, and what a backend must do.

T tokens, R requests, H heads, K kv heads, E head dim, P pages. A backend instance serves one cache group. It does not
write K and V into the pages, but in ``rotate_and_attend``: the ``rope_write`` operation does that before ``attend``.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from headrace.base.registry import Registry
from headrace.base.step import MAX_DRAFTS
from headrace.kernels.attention import PrefixGroups
from headrace.kernels.few_decodes import Rotation
from headrace.memory.hot_pool import HotLayer


@dataclass(frozen=True)
class AttentionGeometry:
    """The constants of a cache group, by which backends declare what they support. ``dtype`` is that of queries,
    ``kv_dtype`` that of pages; ``capability`` is (0, 0) off CUDA. ``page_size`` and ``window`` (0: unlimited) in
    tokens. ``values_in_keys``: value pages are views of the first ``value_dim`` elements of each row of the key
    pages."""

    device: str
    dtype: str
    kv_dtype: str
    capability: tuple[int, int]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    page_size: int
    window: int = 0
    has_softcap: bool = False
    has_sinks: bool = False
    values_in_keys: bool = False


@dataclass(slots=True)
class KvPages:
    """One layer's pages. ``k`` [P, page_size, K, E] and ``v`` [P, page_size, K, E_value], contiguous unless values are
    views of the keys. In an int8 cache both hold codes in kernel order, and ``scales`` [P, 2, K, page_size] float32
    multiplies them: keys' scales first (`headrace.kernels.attention.reference`). ``hot``: pages are in host memory,
    slow to read, and this is what the device keeps of them."""

    k: torch.Tensor
    v: torch.Tensor
    scales: torch.Tensor | None = None
    hot: HotLayer | None = field(default=None, kw_only=True)


@dataclass(slots=True)
class AttentionInputs:
    """One step as one cache group sees it. The first ``num_decodes`` requests have exactly one query token.

    Tensors are on the device: ``query_start`` [R + 1] int32, ``kv_lens`` [R] int32 (this step's tokens included),
    ``page_table`` [R, >= ceil(max_kv_len / page_size)] int32, ``slots`` [T] int64 (page * page_size + offset where the
    token's K and V are written). ``query_lens_cpu`` and ``kv_lens_cpu`` [R] are the same lengths on the host, but of
    decodes ``kv_lens_cpu`` are bounds: drafts count in it that may yet be rejected. Under a captured graph they are
    those of the capture, and only ``max_kv_len`` bounds the real ones.

    ``has_dynamic_lengths``: the step is captured with room for T tokens and R requests, and the real lengths are known
    on the device only. A request of one token is a decode at any index, one of none is padding; ``num_decodes`` and
    the lists of host lengths are meaningless. Only backends with ``supports_dynamic_lengths`` are given such steps.

    ``last_run``: the first page of the last request, if the host knows that its pages are contiguous. ``rows`` [R]
    int64: where each request's state is; None in steps with ``has_dynamic_lengths``. ``prefixes``: which of the decodes
    begin with the same pages, where that is known and the backend has `CacheBackend.prefix_members`.
    """

    num_tokens: int
    num_decodes: int
    query_lens_cpu: list[int]
    kv_lens_cpu: list[int]
    max_query_len: int
    max_kv_len: int
    query_start: torch.Tensor
    kv_lens: torch.Tensor
    page_table: torch.Tensor
    slots: torch.Tensor
    has_dynamic_lengths: bool = False
    last_run: int | None = None
    rows: torch.Tensor | None = None
    prefixes: PrefixGroups | None = None

    @property
    def num_requests(self) -> int:
        return self.kv_lens.shape[0]


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """Per-layer constants: logits are ``softcap * tanh(q.k * scale / softcap)`` when ``softcap`` > 0.
    ``window``: a query sees the latest ``window`` positions, itself included (0: all).
    ``sinks`` [H] adds ``exp(sink)`` to each head's softmax denominator."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class MediaBlock:
    """``length`` tokens of request number ``request`` from token ``first`` of the step on, the last ones before its
    position ``end``, that see all positions up to there."""

    request: int
    first: int
    length: int
    end: int


class CacheBackend(ABC):
    """Per-step state of one cache group, shared by its layers: an `AttentionBackend`, or a class of a family whose
    layers read their pages themselves.

    Class attributes declare capabilities. ``preferred_page_size`` in tokens (None: any) is used unless the user sets
    another; a size that the class cannot serve raises `ConfigError`. ``is_capturable``: False if it reads host lengths
    or waits for the device, so that no CUDA graph may be captured over it. ``supports_dynamic_lengths``: accepts
    `AttentionInputs` with ``has_dynamic_lengths``. ``divides_dynamic_keys``: in those, too, it divides the keys of few
    decodes among programs, so that long contexts are no slower. ``fuses_layers``: a kernel for whole layers may replace
    it.
    ``most_drafts``: a request may occur so many more times among the decodes of a step, at consecutive positions (its
    last token and drafts), and the page may hold wrong drafts behind a request's length; 0 where a decode changes
    state that the decode behind it reads. ``prefix_members``: so many decodes at most are computed together where they
    begin with the same pages (`AttentionInputs.prefixes`); 0 where all are computed one by one.
    """

    preferred_page_size: ClassVar[int | None] = None
    is_capturable: ClassVar[bool] = True
    supports_dynamic_lengths: bool = False
    divides_dynamic_keys: ClassVar[bool] = False
    fuses_layers: ClassVar[bool] = False
    most_drafts: int = MAX_DRAFTS
    prefix_members: int = 0

    @abstractmethod
    def prepare(self, inputs: AttentionInputs) -> None:
        """Called once a step before its layers run; must not synchronise with the device. For a step that is captured
        in a CUDA graph it may be called during the capture: replays repeat its device work, not its host work."""

    def short_context(self, num_decodes: int) -> int:
        """Up to how many keys other kernels are faster for so many decodes, 0 if the same are for all: such steps are
        captured once more. On all ranks the same, however heads are divided, as ranks capture in step."""
        return 0

    def context_bytes(self, num_tokens: int, kv_len: int) -> int:
        """Bytes of activations that a chunk of so many tokens takes for the length of its context, ``kv_len``: what
        measuring a chunk at the beginning of a prompt does not find. 0 where they do not grow with it."""
        return 0


class AttentionBackend(CacheBackend):
    """Causal paged attention for mixed batches of prefill chunks and decodes; built as ``Class(geometry, device)``."""

    @abstractmethod
    def attend(self, q: torch.Tensor, pages: KvPages, params: AttentionParams) -> torch.Tensor:
        """``q`` [T, H, E] to [T, H, E_value] in q's dtype. Query i of a request with kv length L and query length Q is
        at position L - Q + i and sees positions up to its own (bottom-right causal mask)."""

    def rotate_and_attend(
        self, qkv: torch.Tensor, rotation: Rotation, pages: KvPages, params: AttentionParams
    ) -> torch.Tensor | None:
        """What ``rope_write`` and `attend` do, if a kernel does both at once for this step; else None, and nothing is
        written. ``qkv`` and ``rotation`` are those of `headrace.kernels.rowwise.ROPE_WRITE`. The step's inputs must
        have been written before the product that gives ``qkv`` began."""
        return None

    def plan_ahead(
        self, pages: KvPages, params: AttentionParams, most_tokens: int, longest: int
    ) -> Iterator[bool]:
        """Build what a library plans for the sizes of later steps, a plan before each item (True): ``pages`` and
        ``params`` are those of a layer, steps have at most ``most_tokens`` tokens, and requests at most ``longest``."""
        return iter(())

    def twin(self) -> AttentionBackend:
        """Another backend for the same pages, which is prepared with inputs of its own. The two are called in turn, on
        one stream: they share workspaces."""
        return copy.copy(self)


class UnusedBackend(AttentionBackend):
    """That of a cache group whose layers are all in other pipeline stages."""

    supports_dynamic_lengths = divides_dynamic_keys = True
    fuses_layers = True

    def prepare(self, inputs: AttentionInputs) -> None:
        """See `CacheBackend`."""

    def attend(self, q: torch.Tensor, pages: KvPages, params: AttentionParams) -> torch.Tensor:
        """See `AttentionBackend`."""
        raise AssertionError("no layer of this group is here")


ATTENTION_BACKENDS: Registry[type[AttentionBackend]] = Registry("attention backend")
