"""Attention within spans on a GPU, in half precision: a span of up to 64 tokens is one program per head, which rotates,
too; longer ones are rotated in place and go through torch's flash attention. T tokens, H heads, E head dim.
"""

import torch
import triton
import triton.language as tl

from headrace.kernels.launch import next_power_of_2
from headrace.kernels.span_attention import Spans

MOST_SHORT = 64
"""Tokens of a span whose logits fit one program's registers. Also the kernel's only block size, so that images of no
size compile another one."""
LOG2_E = 1.4426950408889634


@triton.jit
def _rotate_halves(first, second, cos, sin):
    """Both halves of the dims, rotated in float32."""
    a, b = first.to(tl.float32), second.to(tl.float32)
    return (a * cos - b * sin).to(first.dtype), (b * cos + a * sin).to(first.dtype)


@triton.jit
def _load_halves(at, inside, E: tl.constexpr):
    return tl.load(at, mask=inside, other=0.0), tl.load(at + E // 2, mask=inside, other=0.0)


@triton.jit
def _rotate_kernel(
    q_ptr, k_ptr, cos_sin_ptr, stride, H: tl.constexpr, E: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr
):
    # one program per token, and q or k: [BLOCK_H, BLOCK_HALF] of both halves
    token = tl.program_id(0).to(tl.int64)
    base = q_ptr
    if tl.program_id(1) == 1:
        base = k_ptr
    head, dim = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_HALF)
    cos = tl.load(cos_sin_ptr + token * E + dim, mask=dim < E // 2, other=0.0)
    sin = tl.load(cos_sin_ptr + token * E + E // 2 + dim, mask=dim < E // 2, other=0.0)
    at = base + token * stride + head[:, None] * E + dim[None, :]
    inside = (head < H)[:, None] & (dim < E // 2)[None, :]
    first, second = _load_halves(at, inside, E)
    first, second = _rotate_halves(first, second, cos[None, :], sin[None, :])
    tl.store(at, first, mask=inside)
    tl.store(at + E // 2, second, mask=inside)


@triton.jit
def _short_kernel(
    q_ptr, k_ptr, v_ptr, cos_sin_ptr, starts_ptr, out_ptr, stride, scale, H: tl.constexpr, E: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_HALF: tl.constexpr, ROTATES: tl.constexpr
):
    # The dims are held as two halves padded to BLOCK_HALF, which is what rotation needs; q.k is the sum of both.
    head, span = tl.program_id(0), tl.program_id(1)
    begin = tl.load(starts_ptr + span)
    length = tl.load(starts_ptr + span + 1) - begin
    row, dim = tl.arange(0, BLOCK), tl.arange(0, BLOCK_HALF)
    inside = (row < length)[:, None] & (dim < E // 2)[None, :]
    tokens = (begin + row).to(tl.int64)
    at = tokens[:, None] * stride + head * E + dim[None, :]
    q_first, q_second = _load_halves(q_ptr + at, inside, E)
    k_first, k_second = _load_halves(k_ptr + at, inside, E)
    if ROTATES:
        cos, sin = _load_halves(cos_sin_ptr + tokens[:, None] * E + dim[None, :], inside, E)
        q_first, q_second = _rotate_halves(q_first, q_second, cos, sin)
        k_first, k_second = _rotate_halves(k_first, k_second, cos, sin)
    logits = tl.dot(q_first, tl.trans(k_first))
    logits = tl.dot(q_second, tl.trans(k_second), logits) * scale
    logits = tl.where((row < length)[None, :], logits, float("-inf"))
    share = tl.exp2(logits - tl.max(logits, axis=1)[:, None])
    total = tl.sum(share, axis=1)[:, None]
    share = share.to(q_ptr.dtype.element_ty)
    v_first, v_second = _load_halves(v_ptr + at, inside, E)
    out = out_ptr + (tokens * H + head)[:, None] * E + dim[None, :]
    tl.store(out, (tl.dot(share, v_first) / total).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out + E // 2, (tl.dot(share, v_second) / total).to(out_ptr.dtype.element_ty), mask=inside)


def rotate(q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Rotate q and k [T, H, E] in place."""
    num_tokens, heads, dim = q.shape
    _rotate_kernel[(num_tokens, 2)](
        q, k, cos_sin, q.stride(0), H=heads, E=dim, BLOCK_H=next_power_of_2(heads),
        BLOCK_HALF=next_power_of_2(dim // 2), num_warps=2,
    )


def attend_short(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans, scale: float, cos_sin: torch.Tensor | None
) -> torch.Tensor:
    """`SPAN_ATTENTION` for spans of at most `MOST_SHORT` tokens."""
    heads, dim = q.shape[1:]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _short_kernel[(heads, len(spans.lengths))](
        q, k, v, q if cos_sin is None else cos_sin, spans.starts, out, q.stride(0), scale * LOG2_E, H=heads, E=dim,
        BLOCK=MOST_SHORT, BLOCK_HALF=max(16, next_power_of_2(dim // 2)), ROTATES=cos_sin is not None, num_warps=4,
    )
    return out


def span_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans, scale: float,
    cos_sin: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `SPAN_ATTENTION`."""
    longest = max(spans.lengths)
    if longest <= MOST_SHORT:
        return attend_short(q, k, v, spans, scale, cos_sin)
    from torch.nn.attention.varlen import varlen_attn  # takes a while, and is for GPUs only

    if cos_sin is not None:
        rotate(q, k, cos_sin)
    own = q.shape[-1] ** -0.5
    # the kernel's scale is 1 / sqrt(E); another one is a factor of the queries
    q = q if abs(scale - own) < 1e-6 * own else q * (scale / own)
    out = varlen_attn(q, k, v, spans.starts, spans.starts, longest, longest)
    assert isinstance(out, torch.Tensor)
    return out
