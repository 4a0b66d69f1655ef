"""Products of rows sorted by expert and experts in MXFP4 on Hopper, by own CUDA C++ (``csrc/cuda/mxfp4_product.cu``;
``mxfp4_rounded.cu`` for rows in FP8), alone or with the gated activation.

M rows sorted by expert, N outputs (a gate and its up count once), K inputs, X experts. Of each 16 inputs of a row in
bfloat16 the even ones come first, then the odd ones, as a thread finds codes; rows in FP8 have them in order.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_void_p
from dataclasses import dataclass

import torch

from headrace.kernels.coded_linear.device_codes import BLOCK, HALF, DeviceCodes, Fp8Rows
from headrace.kernels.coded_linear.hopper import GATES, NOT_GATED, Gated
from headrace.kernels.coded_linear.wide import SLACK_BYTES, describe_weight
from headrace.kernels.cuda_source import (
    MOST_BYTES,
    CudaKernel,
    address_of,
    cache_compiled,
    count_sms,
    describe_boxes,
    load_kernel,
)
from headrace.kernels.launch import ceil_div, count_tiles

MOST_STAGES = 12


@dataclass(frozen=True)
class Tile:
    """A block multiplies ``rows`` rows, a multiple of 16 up to 64 and of 32 up to 256, by 64 * ``groups`` rows of the
    weight, with as many warpgroups: 2, or 4 for at most 128 rows. ``is_fp8``: rows are in FP8."""

    rows: int
    groups: int
    is_fp8: bool = False

    @property
    def stages(self) -> int:
        """Of the ring in shared memory, with 128 inputs each."""
        stage = self.rows * (1 if self.is_fp8 else 2) * BLOCK + 64 * self.groups * HALF
        return min(MOST_STAGES, (MOST_BYTES - SLACK_BYTES) // stage)

    @property
    def cluster(self) -> int:
        """Blocks that share rows."""
        return 2 if self.groups == 2 else 1

    @property
    def box(self) -> int:
        """Rows that are copied at a time."""
        return self.rows if self.rows <= 96 else 64 if self.rows <= 128 else 32


class _Call(ctypes.Structure):
    """``Call`` of the source for bfloat16."""

    _fields_ = (
        *((name, c_void_p) for name in ("scales", "bias", "ends", "out")),
        *((name, c_int) for name in ("outputs", "inputs", "words", "experts")),
        *((name, c_float) for name in ("limit", "alpha", "up_offset")),
    )


class _RoundedCall(_Call):
    """The same of the source for FP8."""

    _fields_ = (("x_scales", c_void_p),)


@cache_compiled
def find_kernel(tile: Tile, gate: str, device: torch.device) -> CudaKernel:
    """The kernel, compiled (one to some seconds) unless cached. Raises `CudaSourceError` and `OSError`."""
    source, macros = ("mxfp4_rounded", {"FP8": 1}) if tile.is_fp8 else ("mxfp4_product", {})
    return load_kernel(
        source, device, MOST_BYTES, ROWS=tile.rows, GROUPS=tile.groups, STAGES=tile.stages, BOX=tile.box,
        GATE=GATES[gate], **macros,
    )


def multiply(
    x: torch.Tensor | Fp8Rows, weight: DeviceCodes, bias: torch.Tensor | None, ends: torch.Tensor, tile: Tile,
    gated: Gated = NOT_GATED,
) -> torch.Tensor:
    """Rows x [M, K] bfloat16, or in FP8 with a scale each if ``tile`` is for those, times those experts of the stacked
    weight [X * N, K] whose they are (``ends`` [X] of `GROUP_PAIRS`), plus their bias, followed by the activation
    ``gated`` if it has a kind: [M, N] bfloat16. Columns of bfloat16 rows, and of the result of an activation of them,
    are in the order above. Rows from the last end on are not written. K is a multiple of 16, N of 8, with an activation
    of 16."""
    rows, x_scales = x if isinstance(x, Fp8Rows) else (x, None)
    assert tile.is_fp8 == (x_scales is not None), "rows of another kind"
    num_rows, outputs = len(rows), weight.out_features // len(ends) // (2 if gated.kind else 1)
    out = torch.empty((num_rows, outputs), dtype=torch.bfloat16, device=rows.device)
    if not num_rows:
        return out
    about = {
        "scales": weight.scales.data_ptr(), "bias": address_of(bias), "ends": ends.data_ptr(), "out": out.data_ptr(),
        "outputs": outputs, "inputs": rows.shape[1], "words": weight.scales.shape[1] // 4, "experts": len(ends),
        "limit": gated.limit, "alpha": gated.alpha, "up_offset": gated.up_offset,
    }
    call = _Call(**about) if x_scales is None else _RoundedCall(**about, x_scales=x_scales.data_ptr())
    width = 64 * tile.groups
    tiles = count_tiles(num_rows, tile.rows, len(ends)) * ceil_div(outputs, width // 2 if gated.kind else width)
    clusters = min(ceil_div(tiles, tile.cluster), count_sms(rows.device) // tile.cluster)
    find_kernel(tile, gated.kind, rows.device).launch(
        clusters * tile.cluster, 128 * (tile.groups + 1),
        describe_boxes(rows, (tile.box, BLOCK if tile.is_fp8 else BLOCK // 2)),
        describe_weight(weight.codes, width, HALF, outputs if gated.kind else 0), call, is_dependent=True,
    )
    return out
