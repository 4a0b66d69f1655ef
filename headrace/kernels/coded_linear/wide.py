"""Products of FP8 rows and FP8 weights for many rows on Hopper, by own CUDA C++ (``csrc/cuda/fp8_product.cu``): one
weight for all rows, or experts stacked, each with the rows sorted to it; alone or with the gated activation.

M rows, N outputs (a gate and its up count once), K inputs, X experts.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_void_p
from dataclasses import dataclass

import torch

from headrace.kernels.coded_linear.device_codes import DeviceCodes, Fp8Rows
from headrace.kernels.coded_linear.hopper import GATES, NOT_GATED, Gated
from headrace.kernels.cuda_source import (
    MOST_BYTES,
    CudaKernel,
    address_of,
    cache_compiled,
    count_sms,
    describe_boxes,
    load_kernel,
)
from headrace.kernels.launch import ceil_div

ROWS, DEPTH = 128, 128
"""Rows of a tile; inputs of a stage, and of a group that shares a scale."""
THREADS = 384
SLACK_BYTES = 2048
"""Of shared memory beside the ring: to align it, and barriers."""


@dataclass(frozen=True)
class Tile:
    """``outputs``: rows of the weight that a block multiplies at once, 128 or 256, with half as many outputs if gated.
    ``cluster`` blocks, 1 or 2, share them."""

    outputs: int
    cluster: int = 1

    @property
    def stages(self) -> int:
        """Of the ring in shared memory."""
        return (MOST_BYTES - SLACK_BYTES) // ((ROWS + self.outputs) * DEPTH)


class _Call(ctypes.Structure):
    """``Call`` of the source."""

    _fields_ = (
        ("x_scales", c_void_p), ("scales", c_void_p), ("bias", c_void_p), ("ends", c_void_p), ("out", c_void_p),
        ("out_scales", c_void_p), ("rows", c_int), ("outputs", c_int), ("inputs", c_int), ("groups", c_int),
        ("limit", c_float), ("alpha", c_float), ("up_offset", c_float),
    )


@cache_compiled
def find_kernel(
    tile: Tile, gate: str, num_experts: int, device: torch.device, *, has_groups: bool, is_fp8: bool
) -> CudaKernel:
    """The kernel, compiled (about a second) unless cached. Raises `CudaSourceError` and `OSError`."""
    return load_kernel(
        "fp8_product", device, MOST_BYTES, BLOCK_N=tile.outputs, STAGES=tile.stages, CLUSTER=tile.cluster,
        GATE=GATES[gate], GROUPS=int(has_groups), EXPERTS=num_experts, CODES=int(is_fp8),
    )


def multiply(
    rows: Fp8Rows, weight: DeviceCodes, bias: torch.Tensor | None, tile: Tile, *, gated: Gated = NOT_GATED,
    ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """``rows @ weight.T + bias`` [M, N] bfloat16, followed by the activation ``gated`` if it has a kind. With ``ends``
    [X] of `GROUP_PAIRS` the weight has X experts, stacked: row m is multiplied by its expert's, and rows from the last
    end on are not written. Scales are of groups of 128 inputs for both, or of rows for both; with groups and a gate N
    is a multiple of 128."""
    outputs = _count_outputs(weight, gated, ends)
    out = torch.empty((rows.num_rows, outputs), dtype=torch.bfloat16, device=rows.codes.device)
    _launch(rows, weight, bias, tile, gated, ends, out, None)
    return out


def multiply_to_rows(
    rows: Fp8Rows, weight: DeviceCodes, bias: torch.Tensor | None, *, gated: Gated, ends: torch.Tensor | None = None,
    cluster: int = 1,
) -> Fp8Rows:
    """As `multiply`, gated, in FP8 with a scale for each 128 outputs of a row; N is a multiple of 128."""
    num_rows, outputs, device = rows.num_rows, _count_outputs(weight, gated, ends), rows.codes.device
    out = torch.empty((num_rows, outputs), dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty((outputs // ROWS, num_rows), dtype=torch.float32, device=device)
    _launch(rows, weight, bias, Tile(256, cluster), gated, ends, out, scales)
    return Fp8Rows(out, scales)


def _count_outputs(weight: DeviceCodes, gated: Gated, ends: torch.Tensor | None) -> int:
    return weight.out_features // (1 if ends is None else len(ends)) // (2 if gated.kind else 1)


def _launch(
    rows: Fp8Rows, weight: DeviceCodes, bias: torch.Tensor | None, tile: Tile, gated: Gated,
    ends: torch.Tensor | None, out: torch.Tensor, scales: torch.Tensor | None
) -> None:
    (num_rows, outputs), num_experts, device = out.shape, 0 if ends is None else len(ends), out.device
    if not num_rows:
        return
    call = _Call(
        x_scales=rows.scales.data_ptr(), scales=weight.scales.data_ptr(), bias=address_of(bias), ends=address_of(ends),
        out=out.data_ptr(), out_scales=address_of(scales), rows=num_rows, outputs=outputs, inputs=rows.codes.shape[1],
        groups=weight.scales.shape[1], limit=gated.limit, alpha=gated.alpha, up_offset=gated.up_offset,
    )
    # one for a tile, or the most that any sorting needs: one partly filled tile an expert
    tiles = ceil_div(num_rows, ROWS * tile.cluster) + num_experts
    tiles *= ceil_div(outputs, tile.outputs // 2 if gated.kind else tile.outputs)
    kernel = find_kernel(
        tile, gated.kind, num_experts, device, has_groups=weight.num_groups > 1, is_fp8=scales is not None
    )
    kernel.launch(
        tile.cluster * min(tiles, count_sms(device) // tile.cluster), THREADS,
        describe_boxes(rows.codes, (ROWS, DEPTH)),
        describe_weight(weight.codes, tile.outputs // tile.cluster, DEPTH, outputs if gated.kind else 0), call,
        is_dependent=True,
    )


def describe_weight(
    codes: torch.Tensor, rows: int, width: int, gated_outputs: int
) -> ctypes.Array[ctypes.c_char]:
    """A tensor map of tiles of ``rows`` rows of a weight, ``width`` bytes of each. Where gated, they alternate eight
    rows of gate with the same eight of up, ``gated_outputs`` further on; that is a multiple of 8."""
    if not gated_outputs:
        return describe_boxes(codes, (rows, width))
    total, stride = codes.shape
    gates = codes.as_strided(
        ((total - gated_outputs) // 8, 2, 8, stride), (8 * stride, gated_outputs * stride, stride, 1)
    )
    return describe_boxes(gates, (rows // 16, 2, 8, width))
