"""The attention contract: what a step tells a backend, and what a backend must do.

Letters: T tokens, R requests, H heads, K kv heads, E head dim, P pages. A backend instance serves one cache group;
writing K and V into the pages is not its job (the ``rope_write`` operation does that before ``attend``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.base.cache import CacheSpec
from headrace.base.registry import Registry


@dataclass(frozen=True)
class AttentionGeometry:
    """All that is fixed for a cache group; the query that backends declare support for. ``window`` 0 means all.
    ``values_in_keys``: the value pages are views of the first ``value_dim`` places of each row of the key pages."""

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
    """One layer's pages. ``k`` [P, page_size, K, E] and ``v`` [P, page_size, K, E_value], contiguous but for values
    that are in the keys. Where a cache's type is int8, both hold codes in an order of their own, and ``scales`` [P, 2,
    K, page_size] float32 what they are multiplied with (`headrace.kernels.codes`)."""

    k: torch.Tensor
    v: torch.Tensor
    scales: torch.Tensor | None = None


@dataclass(slots=True)
class AttentionInputs:
    """One step as one cache group sees it. The first ``num_decodes`` requests have exactly one query token.

    Tensors are on the device: ``query_start`` [R + 1] int32, ``kv_lens`` [R] int32 (this step's tokens included),
    ``page_table`` [R, >= ceil(max_kv_len / page_size)] int32, ``slots`` [T] int64 (page * page_size + offset where the
    token's K and V are written). ``query_lens_cpu`` and ``kv_lens_cpu`` are the same facts on the host; under a
    captured graph they are the capture's and only ``max_kv_len`` bounds the real lengths.

    ``is_open``: the step is captured with room for T tokens and R requests, and what fills it is known on the device
    alone. A request of one token is a decode wherever it stands, one of none is padding; ``num_decodes`` and the host's
    lists say nothing. Only backends that say ``takes_open_steps`` are given such.

    ``last_run``: the first page of the last request, if the host knows that its others follow.
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
    is_open: bool = False
    last_run: int | None = None

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


class AttentionBackend(Protocol):
    """Causal paged attention for mixed batches of prefill chunks and decodes.

    ``prepare`` is called once a step, outside any graph, with host work allowed but no device synchronisation.
    ``attend`` takes ``q`` [T, H, E] and returns [T, H, E_value] in q's dtype; query i of a request with kv length L and
    query length Q sits at position L - Q + i and sees positions up to its own (bottom-right causal mask).
    A backend that reads host facts or waits in either says ``is_capturable = False``: no graph is captured over it.
    """

    def __init__(self, geometry: AttentionGeometry, device: torch.device): ...

    def prepare(self, inputs: AttentionInputs) -> None: ...

    def attend(self, q: torch.Tensor, pages: KvPages, params: AttentionParams) -> torch.Tensor: ...


class CacheReader(Protocol):
    """Stands where a backend does for a kind of cache that layers read on their own: works out once a step, for all
    layers of a group, what they share. Its layers know it by its class. ``preferred_page_size`` is taken unless the
    user wants another; a size it cannot have raises `ConfigError`."""

    preferred_page_size: int
    is_capturable: bool

    def __init__(self, spec: CacheSpec, page_size: int, device: torch.device): ...

    def prepare(self, inputs: AttentionInputs) -> None: ...


ATTENTION_BACKENDS: Registry[type[AttentionBackend]] = Registry("attention backend")
