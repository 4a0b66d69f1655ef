"""GGUF's K types in the layout of `Supers`: nothing but the file's codes, scales and factors, rearranged.

O outputs, I inputs, S super-blocks of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from headrace.kernels.coded_linear.codes import Code
from headrace.kernels.coded_linear.device_codes import BLOCK, HALF, DeviceCodes, Supers
from headrace.kernels.packed_linear.blocks import BLOCK_TYPES, SUPER_PARTS, WeightBlocks

SUPERS = {"Q3_K": Supers(4, False), "Q4_K": Supers(4, True), "Q5_K": Supers(6, True), "Q6_K": Supers(6, False)}
"""Forms by ggml's names of types; codes of 3 and 5 bits take 4 and 6."""
MOST_FORMS = 2
"""Of a weight whose parts are of several types."""


def pack_supers(parts: Sequence[WeightBlocks], device: torch.device) -> DeviceCodes | None:
    """Weights of equal inputs above one another, row by row; None where a type has no `Supers`, or the parts have more
    than `MOST_FORMS` one after the other."""
    if any(part.kind not in SUPERS for part in parts):
        return None
    runs = [(supers, list(run)) for supers, run in groupby(parts, key=lambda part: SUPERS[part.kind])]
    if len(runs) > MOST_FORMS:
        return None
    packed = None
    for supers, run in reversed(runs):
        pieces = [_pack_blocks(part, supers, device) for part in run]
        codes, scales = (torch.cat(tables) for tables in zip(*pieces, strict=True))
        packed = DeviceCodes(
            Code.INT, run[0].in_features, codes, scales, supers.group, has_whole_zeros=not supers.has_mins,
            supers=supers, tail=packed
        )
    return packed


def _pack_blocks(blocks: WeightBlocks, supers: Supers, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """``codes`` and ``scales`` of `DeviceCodes`."""
    rows = blocks.out_features
    parts = SUPER_PARTS[blocks.kind](blocks.raw.to(device).reshape(-1, BLOCK_TYPES[blocks.kind].num_bytes))
    codes = parts.codes.view(torch.uint8) & ((1 << supers.bits) - 1)
    codes = codes.view(-1, 2, HALF)  # planes of 128 inputs
    codes = codes[:, 0] | codes[:, 1] << 4 if supers.bits == 4 else _pack_sixes(codes)
    factors = parts.factors.view(torch.uint8)
    if parts.mins is None or parts.min_factors is None:
        # [blocks, halves, planes, pieces]
        scales = parts.scales.view(torch.uint8).view(-1, 2, 2, 4).transpose(2, 3).flatten(1)
        tables = torch.cat((scales, factors), dim=1)
    else:
        # [blocks, halves, planes, halves of these], the planes of which lie together
        six = torch.stack([own.view(-1, 2, 2, 2) for own in (parts.scales.view(torch.uint8), parts.mins)], dim=2)
        six = six.permute(0, 1, 4, 2, 3).flatten(3).flatten(1, 2).int()  # [blocks, 4, 4]
        bits = (six << torch.arange(0, 24, 6, device=device, dtype=torch.int32)).sum(2, dtype=torch.int32)
        tables = torch.cat(
            (factors, parts.min_factors.view(torch.uint8), bits.unsqueeze(2).view(torch.uint8)[..., :3].flatten(1)),
            dim=1
        )
    return codes.reshape(rows, -1), tables.reshape(rows, -1)


def _pack_sixes(codes: torch.Tensor) -> torch.Tensor:
    """Codes below 64 of units [n, 2, 64] as `Supers` says: [n, 96]."""
    words = codes.view(-1, 2, 4, 4, 4)  # [n, planes, pieces, words, bytes]
    shifts = torch.tensor([4, 2, 0], dtype=torch.uint8, device=codes.device)[:, None]
    three = words[..., :3, :] << 2 | (words[..., 3:, :] >> shifts & 3)
    first = torch.cat((three[:, 0], three[:, 1, :, :1]), dim=2)  # [n, pieces, 4, bytes]
    return torch.cat((first.flatten(1), three[:, 1, :, 1:].flatten(1)), dim=1)


def _unpack_sixes(packed: torch.Tensor) -> torch.Tensor:
    """The opposite: [n, 96] to [n, 2, 64]."""
    first, rest = packed[:, :HALF].view(-1, 4, 4, 4), packed[:, HALF:].view(-1, 4, 2, 4)
    three = torch.stack((first[:, :, :3], torch.cat((first[:, :, 3:], rest), dim=2)), dim=1)
    shifts = torch.tensor([4, 2, 0], dtype=torch.uint8, device=packed.device)[:, None]
    last = ((three & 3) << shifts).sum(3, keepdim=True, dtype=torch.uint8)
    return torch.cat((three >> 2, last), dim=3).view(-1, 2, HALF)


def unpack_codes(weight: DeviceCodes) -> torch.Tensor:
    """Codes [O, I] of one form, row by row; uint8, without mins int8."""
    supers = weight.supers
    assert supers is not None
    if supers.bits == 6:
        codes = _unpack_sixes(weight.codes.view(-1, BLOCK * 6 // 8))
    else:
        packed = weight.codes.view(-1, HALF)
        codes = torch.stack((packed & 15, packed >> 4), dim=1)
    if not supers.has_mins:
        high = 1 << supers.bits - 1
        codes = (codes ^ high).view(torch.int8) - high
    return codes.view(len(weight.codes), weight.in_features)


def unpack_scales(weight: DeviceCodes) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales [O, I / group] and mins, or None, of one form, row by row; float32, multiplied by their factors."""
    supers, rows = weight.supers, len(weight.codes)
    assert supers is not None
    tables = weight.scales.view(-1, supers.row_bytes)
    if not supers.has_mins:
        factors = tables[:, 16:].contiguous().view(torch.float16).float()
        scales = tables[:, :16].view(-1, 2, 4, 2).transpose(2, 3).flatten(1).view(torch.int8)
        return (scales.float() * factors).view(rows, -1), None
    factors = tables[:, :4].contiguous().view(torch.float16).float()
    three = tables[:, 4:].reshape(-1, 4, 3).int()
    bits = three[..., 0] | three[..., 1] << 8 | three[..., 2] << 16
    six = bits[:, :, None] >> torch.arange(0, 24, 6, device=tables.device, dtype=torch.int32) & 63
    # [blocks, halves, halves of planes, kinds, planes] to [kinds, blocks, halves, planes, halves of these]
    six = six.view(-1, 2, 2, 2, 2).permute(3, 0, 1, 4, 2).flatten(2).float()
    return (six[0] * factors[:, :1]).view(rows, -1), (six[1] * factors[:, 1:]).view(rows, -1)


def dequantise(weight: DeviceCodes) -> torch.Tensor:
    """A weight of one form, row by row, [O, I] float32: the numbers that the file's writer says."""
    scales, mins = unpack_scales(weight)
    values = unpack_codes(weight).float() * scales.repeat_interleave(weight.group, 1)
    return values if mins is None else values - mins.repeat_interleave(weight.group, 1)
