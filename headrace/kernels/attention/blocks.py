"""What kernels of paged attention share: blocks of keys and values in Triton, the online softmax, a layer's constants.

T tokens, R requests, H heads, K kv heads, G = H / K, E head dim. All G query heads of a kv head share a tile, so keys
and values are read once a kv head. Softmax runs in base 2 with a running maximum (Milakov & Gimelshein,
arXiv:1805.02867; Dao, arXiv:2307.08691).

q and out are [T, H, E] contiguous, pages [P, page_size, K, E] with any stride between pages, page tables [R, *] int32.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from headrace.kernels.launch import next_power_of_2
from headrace.kernels.operation import LARGE_BLOCK, count_block_bytes

LOG2_E = 1.4426950408889634
MASKED = tl.constexpr(-1.0e38)  # finite: a row whose first blocks are all masked must not turn into NaN


def block_dim(dim: int) -> int:
    """Tile width for a head: a power of two, at least 16 for the tensor cores."""
    return max(16, next_power_of_2(dim))


@dataclass(frozen=True)
class Tile:
    """Block sizes of one kernel: ``rows`` are query rows (tokens times the G query heads of a kv head), ``keys`` cached
    positions per iteration, ``num_stages`` the depth of Triton's software pipeline."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


@triton.jit
def load_block(
    pages_ptr, table_ptr, at, low, last, head, page_stride, PAGE: tl.constexpr, K: tl.constexpr, E: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr, BOUNDED: tl.constexpr,
):
    """Keys or values at positions ``at + [0, BLOCK_N)`` of one kv head, [BLOCK_N, BLOCK_E]; ``at`` is a multiple of
    BLOCK_N. When BOUNDED, zeros outside [low, last), where pages may hold another request's data or NaN; otherwise the
    caller guarantees that all positions are inside. ``page_stride`` counts elements."""
    dim = tl.arange(0, BLOCK_E)
    # int64: page * page_stride exceeds 2**31 elements in a large pool
    if PAGE % BLOCK_N == 0:
        # the block lies inside one page: one page-table load
        page = tl.load(table_ptr + at // PAGE).to(tl.int64)
        row = (at % PAGE) + tl.arange(0, BLOCK_N)
        base = pages_ptr + page * page_stride + head * E
        pointers = base + row[:, None] * (K * E) + dim[None, :]
    else:
        position = at + tl.arange(0, BLOCK_N)
        page = tl.load(table_ptr + position // PAGE, mask=(position >= low) & (position < last), other=0).to(tl.int64)
        row = page * page_stride + (position % PAGE) * (K * E) + head * E
        pointers = pages_ptr + row[:, None] + dim[None, :]
    if BOUNDED:
        key = at + tl.arange(0, BLOCK_N)
        inside = ((key >= low) & (key < last))[:, None]
        if BLOCK_E != E:
            inside = inside & (dim < E)[None, :]
        return tl.load(pointers, mask=inside, other=0.0)
    elif BLOCK_E != E:
        return tl.load(pointers, mask=(dim < E)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def as_half(q):
    """q in float16, in which products with pages of 8-bit floats are: these become it in one instruction, and bfloat16
    in four. It is finer than bfloat16; larger queries than it holds are cut."""
    return tl.minimum(tl.maximum(q.to(tl.float32), -65504.0), 65504.0).to(tl.float16)


@triton.jit
def find_scores(q, k, scale, softcap, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Logits times log2(e), [M, N] float32, of q [M, E] and k [N, E]. ``scale`` (from `Head.constants`) includes
    log2(e); with a soft-cap it includes the division by the cap instead, and log2(e) is applied after the cap."""
    logits = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION) * scale  # pages may be of 8-bit floats
    if SOFTCAP:
        # softcap * tanh(x): tanh(x) = 1 - 2 / (exp(2x) + 1), 2 log2(e) = 2.8853900817779268
        logits = softcap * (1.0 - 2.0 / (tl.exp2(logits * 2.8853900817779268) + 1.0)) * 1.4426950408889634
    return logits


@triton.jit
def accumulate(logits, v, acc, top, total, PRECISION: tl.constexpr):
    """One step of the online softmax: ``top`` [M] running maximum (base 2), ``total`` [M] denominator, ``acc`` [M, EV]
    un-normalised output; all float32."""
    new_top = tl.maximum(top, tl.max(logits, axis=1))
    weights = tl.exp2(logits - new_top[:, None])
    # Earlier sums are relative to the old maximum. This also erases blocks in which a row was masked throughout: they
    # counted as weights of 1 (MASKED - MASKED = 0), and the first real logit makes ``fade`` 0.
    fade = tl.exp2(top - new_top)
    total = total * fade + tl.sum(weights, axis=1)
    # weights are rounded to v's dtype for the tensor cores; the denominator adds them unrounded
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    return acc, new_top, total


@dataclass(frozen=True)
class Head:
    """A layer's constants, as `AttentionParams` of ``layers/attention/contract``; ``sinks`` [H]."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None

    def constants(self) -> dict[str, object]:
        """The launch arguments of these values. See `find_scores` for what ``scale`` includes."""
        scale = self.scale / self.softcap if self.softcap else self.scale * LOG2_E
        return dict(
            scale=scale, softcap=float(self.softcap), WINDOW=self.window, SOFTCAP=self.softcap > 0,
            SINKS=self.sinks is not None
        )


def list_geometry(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor) -> dict[str, Any]:
    num_kv_heads, head_dim, value_dim = k_pages.shape[2], k_pages.shape[3], v_pages.shape[3]
    return dict(
        PAGE=k_pages.shape[1], K=num_kv_heads, G=q.shape[1] // num_kv_heads, E=head_dim, EV=value_dim,
        BLOCK_E=block_dim(head_dim), BLOCK_EV=block_dim(value_dim),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        page_stride_k=k_pages.stride(0), page_stride_v=v_pages.stride(0),
    )


def rounds_to_half(q: torch.Tensor, k_pages: torch.Tensor) -> bool:
    """See `as_half`; queries in float32 stay what they are."""
    return k_pages.dtype == torch.float8_e4m3fn and q.element_size() == 2


def find_block_bytes(device: torch.device) -> int:
    """See `count_block_bytes`; of the interpreter as of Hopper."""
    return count_block_bytes(torch.cuda.get_device_capability(device)) if device.type == "cuda" else LARGE_BLOCK
