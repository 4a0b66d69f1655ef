"""Pools: the storage of one cache group each, by kind of cache. P pages, K kv heads, E head dim.

Full and sliding-window attention store the same bytes; only their accounting differs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from headrace.base.cache import CACHE_POOLS, CacheGroup, CacheSpec
from headrace.base.registry import Registry
from headrace.kernels.attention.reference import MOST_LOT

if TYPE_CHECKING:
    from headrace.memory.hot_pool import HotLayer

ALIGNMENT = 64
"""Bytes: a cache line, and the widest CPU vector (AVX-512)."""

Allocate = Callable[[tuple[int, ...], torch.dtype, torch.device], torch.Tensor]
"""Makes zeros of a shape and dtype, as tensors of a device."""

CODES = "int8"
"""`CacheSpec.dtype` of keys and values quantised to 8 bits."""
FLOAT8 = "float8_e4m3fn"
"""That of keys and values rounded to 8-bit floats, without scales."""


@dataclass(frozen=True)
class PagePart:
    """One tensor of a pool: of a model layer, [P, ...], contiguous. ``name`` says which of the layer's; ``head_dim``
    is the dim of its kv heads, None where it has none that could be divided."""

    layer: int
    name: str
    tensor: torch.Tensor
    head_dim: int | None = None


class Pool(ABC):
    """Pages of one cache group on one device, built as ``Class(group, page_size, device)``. Unwritten pages read as
    finite numbers: attention may load them under a mask, and 0 * NaN is not 0.

    ``is_mappable``: the class takes ``allocate`` by name, a function like `allocate_zeros` whose memory may be the
    host's, and has one part per layer, in which an entry stands for ``compress_ratio`` tokens: `HotPool` builds on it.
    ``counts`` [2] int64, on the device: entries that layers wanted of the pool so far, and those that had to be copied
    from the host; None where all are on the device."""

    is_mappable: ClassVar[bool] = False
    num_bytes: int
    counts: torch.Tensor | None = None

    @abstractmethod
    def __init__(self, group: CacheGroup, page_size: int, device: torch.device): ...

    @classmethod
    def reason_against(cls, spec: CacheSpec, device: torch.device) -> str | None:
        """Why the spec's dtype cannot be held, as the end of a sentence; None if it can."""
        return f"is for plain keys and values, and it caches {spec.kind}" if spec.dtype == CODES else None

    @staticmethod
    @abstractmethod
    def page_bytes(spec: CacheSpec, page_size: int) -> int:
        """Bytes of one page of one layer."""

    @staticmethod
    def resident_bytes(spec: CacheSpec, page_size: int) -> int:
        """Of a page of one layer, bytes on the device where those of the group are in host memory."""
        return 0

    @abstractmethod
    def layer(self, layer: int) -> tuple[torch.Tensor, ...]:
        """The page tensors of a model layer of this group: ``(k, v)``, or ``(k, v, scales)`` for int8."""

    @property
    @abstractmethod
    def parts(self) -> list[PagePart]:
        """All bytes of the pool, each once, in a fixed order: what a page is copied from and to."""

    def hot(self, layer: int) -> HotLayer | None:
        """What the device keeps of a layer whose pages are in host memory; None where they are on the device."""
        return None

    def clear_rows(self, rows: torch.Tensor) -> None:
        """Forget what belongs to rows [n] int64, which requests take or give back, in order of the current stream."""
        return None


class KeyValuePool(Pool):
    """Per layer k [P, page_size, K, E] and v [P, page_size, K, E_value], contiguous, zero until written. For
    int8 these are codes, with scales [P, 2, K, page_size] float32 per token and kv head; index 0 of dim 1 for keys, 1
    for values."""

    @classmethod
    def reason_against(cls, spec: CacheSpec, device: torch.device) -> str | None:
        """See `Pool`."""
        if spec.dtype == CODES and device.type != "cpu":
            return f"is for CPUs, and this is {device} (there: fp8)"
        if spec.dtype == CODES and spec.head_dim % 4:
            return f"takes head dims that are multiples of 4, not {spec.head_dim}"
        if spec.dtype == FLOAT8 and device.type != "cuda":
            return f"is for GPUs, and this is {device} (there: int8)"
        return None

    def __init__(self, group: CacheGroup, page_size: int, device: torch.device):
        spec, dtype = group.spec, torch_dtype(group.spec)
        k_shape = (group.num_pages, page_size, spec.num_kv_heads, spec.head_dim)
        v_shape = (group.num_pages, page_size, spec.num_kv_heads, spec.value_dim)
        shapes = [(k_shape, dtype), (v_shape, dtype)]
        if dtype == torch.int8:
            shapes.append(((group.num_pages, 2, spec.num_kv_heads, page_size), torch.float32))
        self._layers = {layer: tuple(allocate_zeros(*shape, device) for shape in shapes) for layer in group.layers}
        self.num_bytes = self.page_bytes(spec, page_size) * group.num_pages * len(group.layers)

    @staticmethod
    def page_bytes(spec: CacheSpec, page_size: int) -> int:
        """Bytes of one page of one layer."""
        scale_bytes = 2 * torch.float32.itemsize if torch_dtype(spec) == torch.int8 else 0
        return page_size * spec.num_kv_heads * (
            (spec.head_dim + spec.value_dim) * torch_dtype(spec).itemsize + scale_bytes
        )

    def layer(self, layer: int) -> tuple[torch.Tensor, ...]:
        """``(k, v)`` of a model layer, or ``(k, v, scales)``."""
        return self._layers[layer]

    @property
    def parts(self) -> list[PagePart]:
        """Keys, values and scales, layer by layer; codes in the order in which they are stored."""
        return [
            PagePart(layer, name, _block_codes(tensor) if tensor.dtype == torch.int8 else tensor, head_dim=2)
            for layer, tensors in self._layers.items()
            for name, tensor in zip(("k", "v", "scales"), tensors, strict=False)
        ]


def _block_codes(pages: torch.Tensor) -> torch.Tensor:
    """Codes [P, page_size, K, E] as they are stored: [P, page_size / L, K, L * E], L positions in a block."""
    block = min(pages.shape[1], MOST_LOT)
    return pages.view(pages.shape[0], pages.shape[1] // block, pages.shape[2], block * pages.shape[3])


class LatentPool(Pool):
    """Per layer [P, page_size, 1, L + E] for multi-head latent attention (https://arxiv.org/abs/2405.04434): the latent
    (L = ``value_dim``), then the rotated part; contiguous, zero until written. Keys are whole rows (``head_dim`` =
    L + E), values their first L elements."""

    is_mappable = True

    @classmethod
    def reason_against(cls, spec: CacheSpec, device: torch.device) -> str | None:
        """See `Pool`."""
        is_coded = spec.dtype in (CODES, FLOAT8)
        return f"is for plain keys and values, and it caches {spec.kind}" if is_coded else None

    def __init__(self, group: CacheGroup, page_size: int, device: torch.device, allocate: Allocate | None = None):
        spec, allocate = group.spec, allocate or allocate_zeros
        self._value_dim = spec.value_dim
        shape = (group.num_pages, page_size, 1, spec.head_dim)
        self._layers = {layer: allocate(shape, torch_dtype(spec), device) for layer in group.layers}
        self.num_bytes = self.page_bytes(spec, page_size) * group.num_pages * len(group.layers)

    @staticmethod
    def page_bytes(spec: CacheSpec, page_size: int) -> int:
        """Bytes of one page of one layer."""
        return page_size * spec.head_dim * torch_dtype(spec).itemsize

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``(k, v)`` of a model layer; v is a view of the beginning of each row of k."""
        rows = self._layers[layer]
        return rows, rows[..., : self._value_dim]

    @property
    def parts(self) -> list[PagePart]:
        """Rows, layer by layer."""
        return [PagePart(layer, "rows", rows) for layer, rows in self._layers.items()]


POOLS: Registry[type[Pool]] = CACHE_POOLS
"""By `CacheSpec.kind`."""

POOLS.add("full", "headrace.memory.pools:KeyValuePool", doc="keys and values of all tokens")
POOLS.add(
    "sliding_window", "headrace.memory.pools:KeyValuePool", doc="keys and values of the latest tokens"
)
POOLS.add("mla", "headrace.memory.pools:LatentPool", doc="one vector per token, keys and values in one")


def group_page_bytes(group: CacheGroup, page_size: int) -> int:
    """Bytes of one page in all layers of a group."""
    return POOLS.load(group.spec.kind).page_bytes(group.spec, page_size) * len(group.layers)


def build_pool(group: CacheGroup, page_size: int, device: torch.device) -> Pool:
    """The pool that stores a group's kind."""
    return POOLS.load(group.spec.kind)(group, page_size, device)


def torch_dtype(spec: CacheSpec) -> torch.dtype:
    """The torch dtype a spec names."""
    return getattr(torch, spec.dtype)


def allocate_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that commit no memory on a CPU until they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros writes every byte; numpy's comes from calloc, which maps pages when they are first touched.
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = torch.from_numpy(np.zeros(num_bytes + ALIGNMENT, dtype=np.uint8))
    start = -raw.data_ptr() % ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).view(shape)
