"""Row-wise operations in Triton, one pass over the input each. Sums, norms and rotations are float32; values are
rounded when they are stored.

T tokens, D hidden size, F gated width, H heads, K kv heads, E head dim, B requests, G cache groups.
"""

from functools import partial
from typing import Unpack

import torch
import triton
import triton.language as tl

from headrace.kernels.launch import ceil_div, next_power_of_2, wait_for_previous
from headrace.kernels.rowwise import HeadShape


@triton.jit
def _rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, x_stride, eps, offset, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    # one program per row, whose BLOCK >= D columns stay in registers between the sum and the scaling
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < D
    # the weight may be loaded before the wait: no kernel writes it
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32) + offset
    wait_for_previous(PDL)
    x = tl.load(x_ptr + row * x_stride + cols, mask=inside, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
    tl.store(out_ptr + row * D + cols, (x * rstd * weight).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_splits(x, x_at, split_stride, num_splits, inside):
    """``x``, the first of ``num_splits`` partial sums, and the others, in order. Their number is no constant, as it
    depends on the rows of a step, and nothing may be compiled for one; seven loads are on their way at once."""
    for first in range(1, num_splits, 7):
        for i in tl.static_range(7):
            is_there = inside & (first + i < num_splits)
            x += tl.load(x_at + (first + i) * split_stride, mask=is_there, other=0.0)
    return x


@triton.jit(do_not_specialize=["num_splits"])
def _add_rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, x_stride, split_stride, residual_stride, num_splits, eps, offset,
    D: tl.constexpr, BLOCK: tl.constexpr, HAS_SUMS: tl.constexpr, PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < D
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32) + offset
    wait_for_previous(PDL)
    x_at = x_ptr + row * x_stride + cols
    x = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    if HAS_SUMS:
        # x [S, T, D] are split-K partial sums, added in a fixed order
        x = add_splits(x, x_at, split_stride, num_splits, inside)
        x = x.to(residual_ptr.dtype.element_ty).to(tl.float32)  # as a product of its own would have stored it
    residual_at = residual_ptr + row * residual_stride + cols
    residual = tl.load(residual_at, mask=inside, other=0.0).to(tl.float32)
    total = (x + residual).to(residual_ptr.dtype.element_ty)  # rounded first: the norm sees what the next layer will
    # in place: this program alone reads and writes the row
    tl.store(residual_at, total, mask=inside)
    total = total.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(total * total, axis=0) / D + eps)
    tl.store(out_ptr + row * D + cols, (total * rstd * weight).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_splits"])
def _add_layer_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, x_stride, split_stride, residual_stride, num_splits, eps,
    offset, D: tl.constexpr, BLOCK: tl.constexpr, HAS_SUMS: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):
    # as _add_rms_norm_kernel
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < D
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32) + offset
    bias = tl.load(bias_ptr + cols, mask=inside & HAS_BIAS, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    x_at = x_ptr + row * x_stride + cols
    x = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    if HAS_SUMS:
        x = add_splits(x, x_at, split_stride, num_splits, inside)
        x = x.to(residual_ptr.dtype.element_ty).to(tl.float32)
    residual_at = residual_ptr + row * residual_stride + cols
    total = (x + tl.load(residual_at, mask=inside, other=0.0).to(tl.float32)).to(residual_ptr.dtype.element_ty)
    tl.store(residual_at, total, mask=inside)
    total = total.to(tl.float32)
    centred = tl.where(inside, total - tl.sum(total, axis=0) / D, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=0) / D + eps)
    tl.store(out_ptr + row * D + cols, (centred * rstd * weight + bias).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_splits"])
def _write_sum_kernel(
    x_ptr, residual_ptr, out_ptr, x_stride, split_stride, residual_stride, out_stride, num_splits,
    D: tl.constexpr, BLOCK: tl.constexpr, HAS_X: tl.constexpr, PDL: tl.constexpr,
):
    # partial sums [S, T, D], as in _add_rms_norm_kernel, or one x
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < D
    wait_for_previous(PDL)
    total = tl.load(residual_ptr + row * residual_stride + cols, mask=inside, other=0.0).to(tl.float32)
    if HAS_X:
        x_at = x_ptr + row * x_stride + cols
        x = add_splits(
            tl.load(x_at, mask=inside, other=0.0).to(tl.float32), x_at, split_stride, num_splits, inside
        )
        total += x.to(residual_ptr.dtype.element_ty).to(tl.float32)
    total = total.to(residual_ptr.dtype.element_ty)
    tl.store(out_ptr + row * out_stride + cols, total.to(out_ptr.dtype.element_ty), mask=inside)


def count_warps(block: int) -> int:
    """16 values per thread, up to 16 warps."""
    return min(16, max(1, block // 512))


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0, *, pdl: bool = False
) -> torch.Tensor:
    """See `RMS_NORM`."""
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    block = next_power_of_2(width)
    if rows:
        _rms_norm_kernel[(rows,)](
            x, weight, out, x.stride(0), eps, offset, D=width, BLOCK=block, PDL=pdl, num_warps=count_warps(block),
            launch_pdl=pdl
        )
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0, *, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ADD_RMS_NORM`; writes the new residual in place."""
    rows, width = residual.shape
    out = torch.empty((rows, width), dtype=x.dtype if x.dim() == 2 else residual.dtype, device=x.device)
    block = next_power_of_2(width)
    if rows:
        _add_rms_norm_kernel[(rows,)](
            x, residual, weight, out, x.stride(-2), x.stride(0), residual.stride(0), len(x), eps, offset, D=width,
            BLOCK=block, HAS_SUMS=x.dim() == 3, PDL=pdl, num_warps=count_warps(block), launch_pdl=pdl,
        )
    return out, residual


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float,
    offset: float = 0.0, *, pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ADD_LAYER_NORM`; writes the new residual in place."""
    rows, width = residual.shape
    out, block = torch.empty_like(residual), next_power_of_2(width)
    if rows:
        _add_layer_norm_kernel[(rows,)](
            x, residual, weight, weight if bias is None else bias, out, x.stride(-2), x.stride(0), residual.stride(0),
            len(x), eps, offset, D=width, BLOCK=block, HAS_SUMS=x.dim() == 3, HAS_BIAS=bias is not None, PDL=pdl,
            num_warps=count_warps(block), launch_pdl=pdl,
        )
    return out, residual


def write_sum(
    x: torch.Tensor | None, residual: torch.Tensor, out: torch.Tensor, *, pdl: bool = False
) -> None:
    """See `WRITE_SUM`."""
    rows, width = residual.shape
    num_splits = 1 if x is None or x.dim() == 2 else len(x)
    source = residual if x is None else x
    if rows:
        _write_sum_kernel[(rows, ceil_div(width, GATE_BLOCK))](
            source, residual, out, source.stride(-2), source.stride(0), residual.stride(0), out.stride(0), num_splits,
            D=width, BLOCK=GATE_BLOCK, HAS_X=x is not None, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )


rms_norm_pdl = partial(rms_norm, pdl=True)
add_rms_norm_pdl = partial(add_rms_norm, pdl=True)
add_layer_norm_pdl = partial(add_layer_norm, pdl=True)
write_sum_pdl = partial(write_sum, pdl=True)


GATE_BLOCK = 1024
GATES = {"silu": 1, "gelu_tanh": 2, "clamped": 3}


@triton.jit
def apply_gate(gate, up, limit, alpha, up_offset, GATE: tl.constexpr):
    """``activation(gate) * up`` in float32. GATE is one of `GATES`; ``limit``, ``alpha`` and ``up_offset`` are read for
    the clamped one alone (`CLAMPED_SWIGLU`)."""
    if GATE == 2:
        # gate * (1 + tanh(u)) / 2 with tanh(u) = 1 - 2 / (exp(2u) + 1), which does not overflow to NaN for large u
        u = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * (1.0 - 1.0 / (tl.exp(2.0 * u) + 1.0)) * up
    elif GATE == 1:
        return gate / (1.0 + tl.exp(-gate)) * up
    else:
        gate = tl.minimum(gate, limit)
        return gate / (1.0 + tl.exp(-alpha * gate)) * (tl.minimum(tl.maximum(up, -limit), limit) + up_offset)


@triton.jit
def _gated_kernel(
    x_ptr, out_ptr, x_stride, limit, alpha, up_offset, F: tl.constexpr, GATE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < F
    wait_for_previous(PDL)
    # x [T, 2F]: gate in the first half of a row, up in the second
    gate = tl.load(x_ptr + row * x_stride + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + F + cols, mask=inside, other=0.0).to(tl.float32)
    out = apply_gate(gate, up, limit, alpha, up_offset, GATE)
    tl.store(out_ptr + row * F + cols, out.to(out_ptr.dtype.element_ty), mask=inside)


def _gated(x: torch.Tensor, kind: str, *clamp: float, pdl: bool) -> torch.Tensor:
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        _gated_kernel[(rows, ceil_div(width, GATE_BLOCK))](
            x, out, x.stride(0), *(clamp or (0.0, 0.0, 0.0)), F=width, GATE=GATES[kind], BLOCK=GATE_BLOCK, PDL=pdl,
            num_warps=4, launch_pdl=pdl,
        )
    return out


def silu_mul(x: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """See `SILU_MUL`."""
    return _gated(x, "silu", pdl=pdl)


def gelu_tanh_mul(x: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """See `GELU_TANH_MUL`."""
    return _gated(x, "gelu_tanh", pdl=pdl)


def clamped_swiglu(x: torch.Tensor, *, limit: float, alpha: float, up_offset: float, pdl: bool = False) -> torch.Tensor:
    """See `CLAMPED_SWIGLU`."""
    return _gated(x, "clamped", float(limit), float(alpha), float(up_offset), pdl=pdl)


silu_mul_pdl = partial(silu_mul, pdl=True)
gelu_tanh_mul_pdl = partial(gelu_tanh_mul, pdl=True)
clamped_swiglu_pdl = partial(clamped_swiglu, pdl=True)


HEADS_AT_ONCE = 8
"""Heads of q, k and v that a program of `_rope_write_kernel` takes."""


@triton.jit
def _load_tile(source, dim, inside):
    """[HEADS, dims] float32 of ``source`` [HEADS, 1] pointers to heads."""
    return tl.load(source + dim[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _norm_weight(q_norm_ptr, k_norm_ptr, dim, count, is_q, offset):
    """[HEADS, dims] float32: weights [E] of q or k, by the kind of head. One norm per head."""
    q_weight = tl.load(q_norm_ptr + dim, mask=dim < count, other=0.0).to(tl.float32)
    k_weight = tl.load(k_norm_ptr + dim, mask=dim < count, other=0.0).to(tl.float32)
    return tl.where(is_q, q_weight[None, :], k_weight[None, :]) + offset


@triton.jit
def _full_norm_weight(q_norm_ptr, k_norm_ptr, head, dim, inside, is_q, is_k, offset, H: tl.constexpr, E: tl.constexpr):
    """[HEADS, dims] float32: each head's own part of weights [H * E] and [K * E]. One norm over all heads."""
    q_weight = tl.load(q_norm_ptr + head * E + dim[None, :], mask=inside & is_q, other=0.0).to(tl.float32)
    k_weight = tl.load(k_norm_ptr + (head - H) * E + dim[None, :], mask=inside & is_k, other=0.0).to(tl.float32)
    return tl.where(is_q, q_weight, k_weight) + offset


@triton.jit
def _mean_square(source, COUNT: tl.constexpr):
    """The mean square of COUNT adjacent values, a float32 scalar."""
    at = tl.arange(0, triton.next_power_of_2(COUNT))
    x = tl.load(source + at, mask=at < COUNT, other=0.0).to(tl.float32)
    return tl.sum(x * x, axis=0) / COUNT


@triton.jit
def _store_tile(x, dim, inside, q_row, k_row, v_row, is_q, is_k, is_v):
    """Store x [HEADS, dims] where each head belongs: q to the result, k and v to their pages."""
    tl.store(q_row + dim[None, :], x.to(q_row.dtype.element_ty), mask=inside & is_q)
    tl.store(k_row + dim[None, :], x.to(k_row.dtype.element_ty), mask=inside & is_k)
    tl.store(v_row + dim[None, :], x.to(v_row.dtype.element_ty), mask=inside & is_v)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr"])  # of decodes behind a chunk of any length
def _rope_write_kernel(
    qkv_ptr, positions_ptr, cos_sin_ptr, slots_ptr, q_ptr, k_ptr, v_ptr, q_norm_ptr, k_norm_ptr, qkv_stride,
    page_stride_k, page_stride_v, norm_eps, norm_offset, PAGE: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    E: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr, FULL: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, PDL: tl.constexpr,
):
    HALF: tl.constexpr = ROTARY // 2
    token = tl.program_id(0).to(tl.int64)
    # heads [HEADS, 1] in the order of qkv: H of q, K of k, K of v
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    is_q, is_k, is_v = head < H, (head >= H) & (head < H + K), (head >= H + K) & (head < H + 2 * K)
    pair = tl.arange(0, BLOCK_HALF)
    # the two dims of a rotated pair, and the dims behind ROTARY, which are normalised but not rotated
    first, second = (2 * pair, 2 * pair + 1) if INTERLEAVED else (pair, pair + HALF)
    rest = ROTARY + tl.arange(0, BLOCK_REST)
    in_half = (head < H + 2 * K) & (pair < HALF)[None, :]
    in_rest = (head < H + 2 * K) & (rest < E)[None, :]
    if FULL:
        first_weight = _full_norm_weight(q_norm_ptr, k_norm_ptr, head, first, in_half, is_q, is_k, norm_offset, H, E)
        second_weight = _full_norm_weight(q_norm_ptr, k_norm_ptr, head, second, in_half, is_q, is_k, norm_offset, H, E)
        rest_weight = _full_norm_weight(q_norm_ptr, k_norm_ptr, head, rest, in_rest, is_q, is_k, norm_offset, H, E)
    elif NORM:
        first_weight = _norm_weight(q_norm_ptr, k_norm_ptr, first, E, is_q, norm_offset)
        second_weight = _norm_weight(q_norm_ptr, k_norm_ptr, second, E, is_q, norm_offset)
        rest_weight = _norm_weight(q_norm_ptr, k_norm_ptr, rest, E, is_q, norm_offset)
    wait_for_previous(PDL)

    source = qkv_ptr + token * qkv_stride + head * E
    slot = tl.load(slots_ptr + token)
    page, at = slot // PAGE, slot % PAGE
    q_row = q_ptr + token * (H * E) + head * E
    # pages [P, PAGE, K, E]; rows of other kinds of heads are out of range, and masked in `_store_tile`
    k_row = k_ptr + page * page_stride_k + at * (K * E) + (head - H) * E
    v_row = v_ptr + page * page_stride_v + at * (K * E) + (head - H - K) * E
    # each head is loaded once, whole: its sum of squares is complete before any of it is scaled and stored
    square = tl.zeros([HEADS], tl.float32)
    if ROTARY > 0:
        x1, x2 = _load_tile(source, first, in_half), _load_tile(source, second, in_half)
        square += tl.sum(x1 * x1 + x2 * x2, axis=1)
    if ROTARY < E:
        x3 = _load_tile(source, rest, in_rest)
        square += tl.sum(x3 * x3, axis=1)
    if FULL:  # every program reads all heads of q and k again: the token's other programs keep them in the cache
        row = qkv_ptr + token * qkv_stride
        rstd = tl.rsqrt(tl.where(is_q, _mean_square(row, H * E), _mean_square(row + H * E, K * E)) + norm_eps)
    elif NORM:
        rstd = tl.rsqrt(square / E + norm_eps)[:, None]
    if ROTARY > 0:
        table = cos_sin_ptr + tl.load(positions_ptr + token) * ROTARY + pair
        cos = tl.load(table, mask=pair < HALF, other=1.0)[None, :]
        sin = tl.load(table + HALF, mask=pair < HALF, other=0.0)[None, :]
        n1, n2 = x1, x2
        if NORM:
            n1, n2 = x1 * rstd * first_weight, x2 * rstd * second_weight
        # v is stored as it came
        _store_tile(tl.where(is_v, x1, n1 * cos - n2 * sin), first, in_half, q_row, k_row, v_row, is_q, is_k, is_v)
        _store_tile(tl.where(is_v, x2, n2 * cos + n1 * sin), second, in_half, q_row, k_row, v_row, is_q, is_k, is_v)
    if ROTARY < E:
        n3 = x3
        if NORM:
            n3 = tl.where(is_v, x3, x3 * rstd * rest_weight)
        _store_tile(n3, rest, in_rest, q_row, k_row, v_row, is_q, is_k, is_v)


def _launch(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor],
    pages: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor | None, torch.Tensor | None], shape: HeadShape, *, pdl: bool,
) -> torch.Tensor:
    (qkv, positions, cos_sin, slots), (k_pages, v_pages), (q_norm, k_norm) = inputs, pages, norms
    num_heads, num_kv_heads, head_dim = shape["num_heads"], shape["num_kv_heads"], shape["head_dim"]
    q = torch.empty((qkv.shape[0], num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    rotary_dim = 0 if cos_sin is None else shape["rotary_dim"]
    # qkv stands in for absent tensors: the kernel does not read them
    q_weight, k_weight = (qkv, qkv) if q_norm is None or k_norm is None else (q_norm, k_norm)
    has_norm = q_weight is not qkv
    if qkv.shape[0]:
        _rope_write_kernel[(qkv.shape[0], ceil_div(num_heads + 2 * num_kv_heads, HEADS_AT_ONCE))](
            qkv, positions, qkv if cos_sin is None else cos_sin, slots, q, k_pages, v_pages, q_weight, k_weight,
            qkv.stride(0), k_pages.stride(0), v_pages.stride(0), shape["norm_eps"], shape["norm_offset"],
            PAGE=k_pages.shape[1], H=num_heads, K=num_kv_heads, E=head_dim, ROTARY=rotary_dim,
            INTERLEAVED=shape["interleaved"], NORM=has_norm, FULL=has_norm and q_weight.shape[0] > head_dim,
            HEADS=HEADS_AT_ONCE, BLOCK_HALF=next_power_of_2(max(1, rotary_dim // 2)),
            BLOCK_REST=next_power_of_2(max(1, head_dim - rotary_dim)), PDL=pdl, num_warps=4, launch_pdl=pdl,
        )
    return q


def rope_write(
    qkv: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor | None, slots: torch.Tensor,
    k_pages: torch.Tensor, v_pages: torch.Tensor,
    *, q_norm: torch.Tensor | None = None, k_norm: torch.Tensor | None = None, **shape: Unpack[HeadShape],
) -> torch.Tensor:
    """See `ROPE_WRITE`."""
    return _launch((qkv, positions, cos_sin, slots), (k_pages, v_pages), (q_norm, k_norm), shape, pdl=False)


def rope_write_pdl(
    qkv: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor | None, slots: torch.Tensor,
    k_pages: torch.Tensor, v_pages: torch.Tensor,
    *, q_norm: torch.Tensor | None = None, k_norm: torch.Tensor | None = None, **shape: Unpack[HeadShape],
) -> torch.Tensor:
    """See `ROPE_WRITE`; with programmatic dependent launch."""
    return _launch((qkv, positions, cos_sin, slots), (k_pages, v_pages), (q_norm, k_norm), shape, pdl=True)
