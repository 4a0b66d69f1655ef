"""Quantise plain weights to `CodedMatrix` by rounding to nearest: no calibration. O outputs, I inputs, G groups."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headrace.kernels.block_scaled import LARGEST, MXFP4_BLOCK, power_of_two, quantise_mxfp4
from headrace.kernels.coded_linear.codes import CHUNK_WEIGHTS, Code, CodedMatrix


def quantise_float(weight: torch.Tensor, rows: int = 1, group: int = 0) -> CodedMatrix:
    """``weight`` [O, I] to e4m3 with a float32 scale per block of ``rows`` outputs and ``group`` inputs (0: all): the
    block's largest magnitude over 448."""
    outputs, inputs = weight.shape
    group = group or inputs
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    tables = []
    step = -(-max(1, CHUNK_WEIGHTS // inputs) // rows) * rows  # whole blocks
    for at in range(0, outputs, step):
        part = weight[at : at + step].float()
        blocks = _pad(part, rows, group).unflatten(1, (-1, group)).unflatten(0, (-1, rows))  # [R, rows, G, group]
        scales = blocks.abs().amax((1, 3)) / LARGEST
        scales = torch.where(scales > 0, scales, 1.0)
        values = (blocks / scales[:, None, :, None]).clamp_(-LARGEST, LARGEST)
        codes[at : at + len(part)] = values.flatten(0, 1).flatten(1)[: len(part), :inputs].to(torch.float8_e4m3fn)
        tables.append(scales)
    return CodedMatrix(Code.E4M3, codes, torch.cat(tables), group, rows=rows)


def quantise_integer(weight: torch.Tensor, bits: int, group: int) -> CodedMatrix:
    """``weight`` [O, I] to symmetric codes of ``bits``, stored plus 2 ** (bits - 1), with a scale per output and
    ``group`` inputs."""
    middle = 1 << (bits - 1)
    groups = _pad(weight.float(), 1, group).unflatten(1, (-1, group))
    scales = (groups.abs().amax(2) / (middle - 1)).half().float()
    steps = torch.where(scales > 0, scales, 1.0).unsqueeze(2)
    codes = (groups / steps).round_().clamp_(1 - middle, middle - 1).add_(middle)
    return CodedMatrix(
        Code.INT, codes.flatten(1)[:, : weight.shape[1]].to(torch.uint8), scales, group,
        torch.full_like(scales, middle), bits=bits
    )


def quantise_fp4(weight: torch.Tensor) -> CodedMatrix:
    """``weight`` [O, I], I a multiple of 32, to MXFP4: e2m1 with a power of two per 32 inputs."""
    outputs, step = weight.shape[0], max(1, CHUNK_WEIGHTS // weight.shape[1])
    codes, exponents = zip(*(quantise_mxfp4(weight[at : at + step]) for at in range(0, outputs, step)), strict=True)
    packed = torch.cat(codes)
    return CodedMatrix(
        Code.E2M1, torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1), power_of_two(torch.cat(exponents)),
        MXFP4_BLOCK, bits=4
    )


def _pad(weight: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return F.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
