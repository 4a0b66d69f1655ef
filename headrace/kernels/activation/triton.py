"""Gated activations in one pass over the input. T tokens, F gated width."""

from functools import partial

import torch
import triton
import triton.language as tl

from headrace.kernels.launch import ceil_div, wait_for_previous

BLOCK = 1024


@triton.jit
def _gated_kernel(
    x_ptr, out_ptr, x_stride, limit, alpha, up_offset, F: tl.constexpr, GELU: tl.constexpr, CLAMP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < F
    wait_for_previous(PDL)
    gate = tl.load(x_ptr + row * x_stride + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + F + cols, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        # tanh(u) = 1 - 2 / (exp(2u) + 1), with u the tanh approximation's argument
        u = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        activated = gate * (1.0 - 1.0 / (tl.exp(2.0 * u) + 1.0))
    elif CLAMP:
        gate = tl.minimum(gate, limit)
        activated = gate / (1.0 + tl.exp(-alpha * gate))
        up = tl.minimum(tl.maximum(up, -limit), limit) + up_offset
    else:
        activated = gate / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + row * F + cols, (activated * up).to(out_ptr.dtype.element_ty), mask=inside)


def _gated(x: torch.Tensor, *, pdl: bool, gelu: bool = False, clamp: tuple[float, float, float] | None = None) -> torch.Tensor:
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        _gated_kernel[(rows, ceil_div(width, BLOCK))](
            x, out, x.stride(0), *(clamp or (0.0, 0.0, 0.0)), F=width, GELU=gelu, CLAMP=clamp is not None, BLOCK=BLOCK, PDL=pdl,
            num_warps=4, launch_pdl=pdl,
        )
    return out


def silu_mul(x: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """See `SILU_MUL`."""
    return _gated(x, pdl=pdl)


def gelu_tanh_mul(x: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """See `GELU_TANH_MUL`."""
    return _gated(x, gelu=True, pdl=pdl)


def clamped_swiglu(x: torch.Tensor, *, limit: float, alpha: float, up_offset: float, pdl: bool = False) -> torch.Tensor:
    """See `CLAMPED_SWIGLU`."""
    return _gated(x, clamp=(float(limit), float(alpha), float(up_offset)), pdl=pdl)


silu_mul_pdl = partial(silu_mul, pdl=True)
gelu_tanh_mul_pdl = partial(gelu_tanh_mul, pdl=True)
clamped_swiglu_pdl = partial(clamped_swiglu, pdl=True)
