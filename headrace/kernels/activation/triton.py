"""Gated activations in one pass over the input. T tokens, F gated width."""

from functools import partial

import torch
import triton
import triton.language as tl

from headrace.kernels.launch import ceil_div, wait_for_previous

BLOCK = 1024
GATES = {"silu": 1, "gelu_tanh": 2, "clamped": 3}


@triton.jit
def apply_gate(gate, up, limit, alpha, up_offset, GATE: tl.constexpr):
    """The activation of ``gate`` times ``up``, float32 both; the numbers are those of `CLAMPED_SWIGLU` and read by that
    alone."""
    if GATE == 2:
        # tanh(u) = 1 - 2 / (exp(2u) + 1), with u the tanh approximation's argument
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
    gate = tl.load(x_ptr + row * x_stride + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + F + cols, mask=inside, other=0.0).to(tl.float32)
    out = apply_gate(gate, up, limit, alpha, up_offset, GATE)
    tl.store(out_ptr + row * F + cols, out.to(out_ptr.dtype.element_ty), mask=inside)


def _gated(x: torch.Tensor, kind: str, *clamp: float, pdl: bool) -> torch.Tensor:
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        _gated_kernel[(rows, ceil_div(width, BLOCK))](
            x, out, x.stride(0), *(clamp or (0.0, 0.0, 0.0)), F=width, GATE=GATES[kind], BLOCK=BLOCK, PDL=pdl,
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
