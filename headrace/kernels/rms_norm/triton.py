"""RMS norm in one pass, one program a row. T tokens, D width."""

from functools import partial

import torch
import triton
import triton.language as tl

from headrace.kernels.launch import next_power_of_2, wait_for_previous


@triton.jit
def _rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, x_stride, eps, offset, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < D
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32) + offset
    wait_for_previous(PDL)
    x = tl.load(x_ptr + row * x_stride + cols, mask=inside, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
    tl.store(out_ptr + row * D + cols, (x * rstd * weight).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, x_stride, split_stride, residual_stride, eps, offset,
    D: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < D
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32) + offset
    wait_for_previous(PDL)
    x = tl.load(x_ptr + row * x_stride + cols, mask=inside, other=0.0).to(tl.float32)
    if SPLITS > 1:
        for split in tl.static_range(1, SPLITS):
            x += tl.load(x_ptr + split * split_stride + row * x_stride + cols, mask=inside, other=0.0)
        x = x.to(residual_ptr.dtype.element_ty).to(tl.float32)  # as a product of its own would have stored it
    residual_at = residual_ptr + row * residual_stride + cols
    residual = tl.load(residual_at, mask=inside, other=0.0).to(tl.float32)
    total = (x + residual).to(residual_ptr.dtype.element_ty)  # rounded first: the norm sees what the next layer will
    tl.store(residual_at, total, mask=inside)
    total = total.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(total * total, axis=0) / D + eps)
    tl.store(out_ptr + row * D + cols, (total * rstd * weight).to(out_ptr.dtype.element_ty), mask=inside)


def _warps(block: int) -> int:
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
            x, weight, out, x.stride(0), eps, offset, D=width, BLOCK=block, PDL=pdl, num_warps=_warps(block),
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
            x, residual, weight, out, x.stride(-2), x.stride(0), residual.stride(0), eps, offset,
            D=width, BLOCK=block, SPLITS=1 if x.dim() == 2 else len(x), PDL=pdl, num_warps=_warps(block),
            launch_pdl=pdl,
        )
    return out, residual


rms_norm_pdl = partial(rms_norm, pdl=True)
add_rms_norm_pdl = partial(add_rms_norm, pdl=True)
