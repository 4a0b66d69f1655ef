"""Products of rows sorted by expert and experts in codes on Hopper, by own CUDA C++: MXFP4 with plain rows
(``csrc/cuda/mxfp4_product.cu``), and FP8 with tens of rows in FP8 each (``csrc/cuda/fp8_experts.cu``; `wide` has more
rows). Alone or with the gated activation.

M rows sorted by expert, N outputs (a gate and its up count once), K inputs, X experts.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_void_p
from dataclasses import dataclass

import torch

from headrace.kernels.coded_linear.device_codes import BLOCK, HALF, DeviceCodes, Fp8Rows
from headrace.kernels.coded_linear.hopper import GATES, NOT_GATED, Gated
from headrace.kernels.coded_linear.wide import SHARED_BYTES, SLACK_BYTES, count_sms, describe_weight
from headrace.kernels.cuda_source import CudaKernel, cache_compiled, compile_source, describe_boxes
from headrace.kernels.launch import ceil_div

MOST_STAGES = 12


@dataclass(frozen=True)
class Tile:
    """A block multiplies ``rows`` rows by 64 * ``groups`` rows of the weight, with as many warpgroups: 2, or 4 for at
    most 128 rows. MXFP4 takes 16 to 256 rows, FP8 to 64."""

    rows: int
    groups: int

    def count_stages(self, *, is_fp8: bool) -> int:
        """Of the ring in shared memory, with 128 inputs each."""
        widths = (BLOCK, BLOCK) if is_fp8 else (2 * BLOCK, HALF)
        stage = self.rows * widths[0] + 64 * self.groups * widths[1]
        return min(MOST_STAGES, (SHARED_BYTES - SLACK_BYTES) // stage)


class _Mxfp4Call(ctypes.Structure):
    """``Call`` of ``mxfp4_product.cu``."""

    _fields_ = (
        ("scales", c_void_p), ("bias", c_void_p), ("ends", c_void_p), ("out", c_void_p), ("outputs", c_int),
        ("inputs", c_int), ("words", c_int), ("limit", c_float), ("alpha", c_float), ("up_offset", c_float),
    )


class _Fp8Call(ctypes.Structure):
    """``Call`` of ``fp8_experts.cu``."""

    _fields_ = (
        ("x_scales", c_void_p), ("scales", c_void_p), ("bias", c_void_p), ("ends", c_void_p), ("out", c_void_p),
        ("rows", c_int), ("outputs", c_int), ("inputs", c_int), ("limit", c_float), ("alpha", c_float),
        ("up_offset", c_float),
    )


@cache_compiled
def find_kernel(source: str, tile: Tile, gate: str, num_experts: int, device: torch.device) -> CudaKernel:
    """The kernel of a source, which is named as its file, compiled (about a second) unless cached. Raises
    `CudaSourceError` and `OSError`."""
    macros = {
        "ROWS": tile.rows, "GROUPS": tile.groups, "STAGES": tile.count_stages(is_fp8=source == "fp8_experts"),
        "GATE": GATES[gate], "EXPERTS": num_experts,
    }
    with torch.cuda.device(device):
        options = ("-arch=sm_90a", "-std=c++17", *(f"-D{name}={value}" for name, value in macros.items()))
        return CudaKernel(compile_source(source, options), source, SHARED_BYTES)


def multiply_mxfp4(
    x: torch.Tensor, weight: DeviceCodes, bias: torch.Tensor | None, ends: torch.Tensor, tile: Tile,
    gated: Gated = NOT_GATED,
) -> torch.Tensor:
    """Rows x [M, K] bfloat16 times those experts of the stacked weight [X * N, K] whose they are (``ends`` [X] of
    `GROUP_PAIRS`), plus their bias, followed by the activation ``gated`` if it has a kind: [M, N] bfloat16. Rows from
    the last end on are not written. K and N are multiples of 8."""
    out = _allocate(x, weight, ends, gated)
    call = _Mxfp4Call(
        scales=weight.scales.data_ptr(), bias=None if bias is None else bias.data_ptr(), ends=ends.data_ptr(),
        out=out.data_ptr(), outputs=out.shape[1], inputs=x.shape[1], words=weight.scales.shape[1] // 4,
        limit=gated.limit, alpha=gated.alpha, up_offset=gated.up_offset,
    )
    _launch("mxfp4_product", x, weight.codes, out, call, ends, tile, gated)
    return out


def multiply_fp8(
    rows: Fp8Rows, weight: DeviceCodes, bias: torch.Tensor | None, ends: torch.Tensor, tile: Tile,
    gated: Gated = NOT_GATED,
) -> torch.Tensor:
    """As `multiply_mxfp4`. Both have scales of 128 inputs, the weight of 128 outputs; K and N are multiples of 128."""
    out = _allocate(rows.codes, weight, ends, gated)
    call = _Fp8Call(
        x_scales=rows.scales.data_ptr(), scales=weight.scales.data_ptr(),
        bias=None if bias is None else bias.data_ptr(), ends=ends.data_ptr(), out=out.data_ptr(), rows=len(out),
        outputs=out.shape[1], inputs=rows.codes.shape[1], limit=gated.limit, alpha=gated.alpha,
        up_offset=gated.up_offset,
    )
    _launch("fp8_experts", rows.codes, weight.codes, out, call, ends, tile, gated)
    return out


def _allocate(x: torch.Tensor, weight: DeviceCodes, ends: torch.Tensor, gated: Gated) -> torch.Tensor:
    outputs = weight.out_features // len(ends) // (2 if gated.kind else 1)
    return torch.empty((len(x), outputs), dtype=torch.bfloat16, device=x.device)


def _launch(
    source: str, x: torch.Tensor, codes: torch.Tensor, out: torch.Tensor, call: ctypes.Structure, ends: torch.Tensor,
    tile: Tile, gated: Gated
) -> None:
    (num_rows, outputs), rows = out.shape, 64 * tile.groups
    if not num_rows:
        return
    # the most that any sorting needs: one partly filled tile an expert
    tiles = min(num_rows, num_rows // tile.rows + len(ends)) * ceil_div(outputs, rows // 2 if gated.kind else rows)
    width = HALF if codes.dtype == torch.uint8 else BLOCK
    find_kernel(source, tile, gated.kind, len(ends), x.device).launch(
        min(tiles, count_sms(x.device)), 128 * (tile.groups + 1),
        describe_boxes(x, (tile.rows, BLOCK // x.element_size())),
        describe_weight(codes, rows, width, outputs if gated.kind else 0), call, is_dependent=True,
    )
