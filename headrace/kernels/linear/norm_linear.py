"""A GEMV that normalises its own input: every program repeats the residual addition and the norm, which costs less than
launching a kernel that does it once. M rows (compiled for each number, see `linear.fits`), D inputs, N outputs (a gate
and its up count once).

Persistent: as many programs as the device holds, striding over blocks of outputs. The first weight block, which no
kernel writes, is loaded before the previous kernel has ended.
"""

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from headrace.kernels.cuda_source import count_sms
from headrace.kernels.launch import ceil_div, next_power_of_2, wait_for_previous
from headrace.kernels.linear import Norm
from headrace.kernels.rowwise.triton import GATES, apply_gate

PROGRAMS_PER_PROCESSOR = 4
"""Programs launched per SM; together they stride over all outputs."""


@dataclass(frozen=True)
class Tile:
    """``outputs`` per program and iteration; each reads a whole row of inputs."""

    outputs: int
    num_warps: int


def choose_tile(num_outputs: int, width: int, *, gated: bool, programs: int) -> Tile:
    """8,192 values of the weight (16 KiB in half precision) in flight per program; up to twice as many if all outputs
    then fit one iteration of ``programs`` programs."""
    block = next_power_of_2(width)
    matrices = 2 if gated else 1
    outputs = max(1, 8192 // (block * matrices))
    while ceil_div(num_outputs, outputs) > programs and outputs * block * matrices < 16384:
        outputs *= 2
    return Tile(outputs, 8 if outputs * block * matrices > 8192 else 4)


@triton.jit
def _load_weight(weight_ptr, n, k, N, D: tl.constexpr, EVEN: tl.constexpr):
    """Rows ``n`` of the weight, [BLOCK_N, BLOCK_K]. EVEN: blocks divide both sizes, so no mask is needed. Read once by
    the whole grid, hence evicted first."""
    pointers = weight_ptr + n.to(tl.int64)[:, None] * D + k[None, :]
    if EVEN:
        return tl.load(pointers, eviction_policy="evict_first")
    return tl.load(pointers, mask=(n < N)[:, None] & (k < D)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _product(weight, scaled, rstd, bias_ptr, n, last, HAS_BIAS: tl.constexpr):
    """[BLOCK_N] float32, rounded to the weight's dtype as if stored; ``scaled`` [BLOCK_K] is the row times the norm's
    weight, biases end at ``last``. rstd multiplies the sum, not the input, so that the product need not wait for the
    norm's reduction."""
    total = tl.sum(weight.to(tl.float32) * scaled[None, :], axis=1) * rstd
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=n < last, other=0.0).to(tl.float32)
    return total.to(weight.dtype).to(tl.float32)


@triton.jit
def _store_block(
    weight, up_weight, scaled, rstds, bias_ptr, out_ptr, n, N, M: tl.constexpr, GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr
):
    for m in tl.static_range(M):
        value = _product(weight, scaled[m], rstds[m], bias_ptr, n, N, HAS_BIAS)
        if GATED > 0:
            up = _product(up_weight, scaled[m], rstds[m], bias_ptr, N + n, 2 * N, HAS_BIAS)
            value = apply_gate(value, up, 0.0, 0.0, 0.0, GATED)
        tl.store(out_ptr + m * N + n, value.to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def _norm_linear_kernel(
    x_ptr, residual_ptr, norm_ptr, weight_ptr, bias_ptr, out_ptr, total_ptr, x_stride, residual_stride, eps, offset,
    N: tl.constexpr, D: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):
    first = tl.program_id(0)
    k = tl.arange(0, BLOCK_K)
    inside = k < D
    n = first * BLOCK_N + tl.arange(0, BLOCK_N)
    weight = _load_weight(weight_ptr, n, k, N, D, EVEN)
    up_weight = _load_weight(weight_ptr, N + n, k, 2 * N, D, EVEN) if GATED > 0 else weight
    norm = tl.load(norm_ptr + k, mask=inside, other=0.0).to(tl.float32) + offset
    # above: weights, which no kernel writes; below: x and residual, which the previous kernels wrote
    wait_for_previous(PDL)
    scaled, rstds = (), ()
    for m in tl.static_range(M):
        x = tl.load(x_ptr + m * x_stride + k, mask=inside, other=0.0).to(tl.float32)
        residual = tl.load(residual_ptr + m * residual_stride + k, mask=inside, other=0.0).to(tl.float32)
        total = (x + residual).to(total_ptr.dtype.element_ty)
        # every program computes the new residual, one stores it: in memory of its own, as others still read the old
        if first == 0:
            tl.store(total_ptr + m * D + k, total, mask=inside)
        total = total.to(tl.float32)  # rounded first: the norm sees what the next layer will read
        rstds = rstds + (tl.rsqrt(tl.sum(total * total, axis=0) / D + eps),)  # noqa: RUF005 (no starred tuples in Triton)
        scaled = scaled + (total * norm,)  # noqa: RUF005
    _store_block(weight, up_weight, scaled, rstds, bias_ptr, out_ptr, n, N, M, GATED, HAS_BIAS)
    for block in tl.range(first + tl.num_programs(0), (N + BLOCK_N - 1) // BLOCK_N, tl.num_programs(0)):
        n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        weight = _load_weight(weight_ptr, n, k, N, D, EVEN)
        up_weight = _load_weight(weight_ptr, N + n, k, 2 * N, D, EVEN) if GATED > 0 else weight
        _store_block(weight, up_weight, scaled, rstds, bias_ptr, out_ptr, n, N, M, GATED, HAS_BIAS)


def norm_linear(
    x: torch.Tensor, residual: torch.Tensor, norm: Norm, weight: torch.Tensor, bias: torch.Tensor | None,
    activation: str = "", *, tile: Tile | None = None, pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `NORM_LINEAR`."""
    (rows, width), gated = x.shape, bool(activation)
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    programs = count_sms(x.device) * PROGRAMS_PER_PROCESSOR
    tile = tile or choose_tile(outputs, width, gated=gated, programs=programs)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    total = torch.empty((rows, width), dtype=residual.dtype, device=x.device)
    block = next_power_of_2(width)
    _norm_linear_kernel[(min(programs, ceil_div(outputs, tile.outputs)),)](
        x, residual, norm.weight, weight, x if bias is None else bias, out, total, x.stride(0), residual.stride(0),
        norm.eps, norm.offset, N=outputs, D=width, M=rows, BLOCK_N=tile.outputs, BLOCK_K=block,
        GATED=GATES[activation] if activation else 0, HAS_BIAS=bias is not None,
        EVEN=width == block and outputs % tile.outputs == 0, PDL=pdl, num_warps=tile.num_warps, launch_pdl=pdl,
    )
    return out, total


norm_linear_pdl = partial(norm_linear, pdl=True)
