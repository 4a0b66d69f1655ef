"""Products of plain rows sorted by expert and experts in MXFP4 on Hopper, by own CUDA C++
(``csrc/cuda/mxfp4_product.cu``), alone or with the gated activation.

M rows sorted by expert, N outputs (a gate and its up count once), K inputs, X experts. Of each 16 inputs of a row the
even ones come first, then the odd ones, as a thread finds codes.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_void_p
from dataclasses import dataclass

import torch

from headrace.kernels.coded_linear.device_codes import BLOCK, HALF, DeviceCodes
from headrace.kernels.coded_linear.hopper import GATES, NOT_GATED, Gated
from headrace.kernels.coded_linear.wide import SLACK_BYTES, describe_weight
from headrace.kernels.cuda_source import (
    MOST_BYTES,
    CudaKernel,
    cache_compiled,
    count_sms,
    describe_boxes,
    load_kernel,
)
from headrace.kernels.launch import ceil_div, count_tiles

MOST_STAGES = 12


@dataclass(frozen=True)
class Tile:
    """A block multiplies ``rows`` rows by 64 * ``groups`` rows of the weight, with as many warpgroups: 2, or 4 for at
    most 128 rows. ``rows`` is 16, 32, 48, 64, 96, 128 or 256."""

    rows: int
    groups: int

    @property
    def stages(self) -> int:
        """Of the ring in shared memory, with 128 inputs each."""
        stage = self.rows * 2 * BLOCK + 64 * self.groups * HALF
        return min(MOST_STAGES, (MOST_BYTES - SLACK_BYTES) // stage)


class _Call(ctypes.Structure):
    """``Call`` of the source."""

    _fields_ = (
        ("scales", c_void_p), ("bias", c_void_p), ("ends", c_void_p), ("out", c_void_p), ("outputs", c_int),
        ("inputs", c_int), ("words", c_int), ("limit", c_float), ("alpha", c_float), ("up_offset", c_float),
    )


@cache_compiled
def find_kernel(tile: Tile, gate: str, num_experts: int, device: torch.device) -> CudaKernel:
    """The kernel, compiled (about a second) unless cached. Raises `CudaSourceError` and `OSError`."""
    return load_kernel(
        "mxfp4_product", device, MOST_BYTES, ROWS=tile.rows, GROUPS=tile.groups, STAGES=tile.stages, GATE=GATES[gate],
        EXPERTS=num_experts,
    )


def multiply(
    x: torch.Tensor, weight: DeviceCodes, bias: torch.Tensor | None, ends: torch.Tensor, tile: Tile,
    gated: Gated = NOT_GATED,
) -> torch.Tensor:
    """Rows x [M, K] bfloat16 times those experts of the stacked weight [X * N, K] whose they are (``ends`` [X] of
    `GROUP_PAIRS`), plus their bias, followed by the activation ``gated`` if it has a kind: [M, N] bfloat16. Columns of
    x, and of the result of an activation, are in the order above. Rows from the last end on are not written. K is a
    multiple of 16, N of 8, with an activation of 16."""
    num_rows, outputs = len(x), weight.out_features // len(ends) // (2 if gated.kind else 1)
    out = torch.empty((num_rows, outputs), dtype=torch.bfloat16, device=x.device)
    if not num_rows:
        return out
    call = _Call(
        scales=weight.scales.data_ptr(), bias=None if bias is None else bias.data_ptr(), ends=ends.data_ptr(),
        out=out.data_ptr(), outputs=outputs, inputs=x.shape[1], words=weight.scales.shape[1] // 4,
        limit=gated.limit, alpha=gated.alpha, up_offset=gated.up_offset,
    )
    width = 64 * tile.groups
    tiles = count_tiles(num_rows, tile.rows, len(ends)) * ceil_div(outputs, width // 2 if gated.kind else width)
    find_kernel(tile, gated.kind, len(ends), x.device).launch(
        min(tiles, count_sms(x.device)), 128 * (tile.groups + 1), describe_boxes(x, (tile.rows, BLOCK // 2)),
        describe_weight(weight.codes, width, HALF, outputs if gated.kind else 0), call, is_dependent=True,
    )
    return out
