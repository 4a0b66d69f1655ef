"""Quantise plain weights to packed 8 bits (symmetric, a scale per output or per 32 inputs) or 4 bits (scale and min per
32 inputs). The native library gives the same result bit for bit, so change both or none."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headrace.kernels.packed_linear.layout import (
    GROUP,
    Format,
    PackedMatrix,
    allocate,
    chunks,
    pack_natively,
    put_codes,
    put_groups,
)

MOST_INT8 = 127
MOST_INT4 = 15
SHRINKS = (1.0, 0.92, 0.84)
"""Fractions of a group's range that are tried: clipping outliers often costs less than coarser steps."""


def quantise_int8(weight: torch.Tensor) -> PackedMatrix:
    """Codes are round(value / scale), scale = the output's largest magnitude / 127."""
    packed = pack_natively(Format.INT8, weight)
    if packed is not None:
        return packed
    packed = allocate(Format.INT8, *weight.shape)
    kept = packed.scales
    assert kept is not None
    for at, rows in chunks(weight):
        values = rows.float()
        scales = values.abs().amax(dim=1) / MOST_INT8
        put_codes(packed, at, (values * _inverse(scales)[:, None]).round_().to(torch.int8))
        kept[at : at + len(scales)] = scales
    return packed


def quantise_int8_groups(weight: torch.Tensor) -> PackedMatrix:
    """As `quantise_int8`, but with one scale, rounded to float16, per 32 inputs of an output."""
    packed = pack_natively(Format.INT8_GROUP, weight)
    if packed is not None:
        return packed
    packed = allocate(Format.INT8_GROUP, *weight.shape, has_mins=False)
    for at, rows in chunks(weight):
        codes, scales = round_groups(rows.float())
        put_codes(packed, at, codes)
        put_groups(packed, at, scales, None)
    return packed


def round_groups(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``values`` [n, I] to symmetric codes int8 [n, I] and scales [n, ceil(I / 32)] rounded to float16."""
    groups = F.pad(values, (0, -values.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    # rounding the scale down may push codes beyond 127, hence the clamp
    scales = (groups.abs().amax(dim=2) / MOST_INT8).half().float()
    codes = (groups * _inverse(scales).unsqueeze(2)).round_().clamp_(-MOST_INT8, MOST_INT8)
    return codes.flatten(1)[:, : values.shape[1]].to(torch.int8), scales


def quantise_int4(weight: torch.Tensor) -> PackedMatrix:
    """Codes are round((value - min) / scale); each group takes the range in `SHRINKS` of least squared error."""
    packed = pack_natively(Format.INT4_GROUP, weight)
    if packed is not None:
        return packed
    packed = allocate(Format.INT4_GROUP, *weight.shape)
    for at, rows in chunks(weight):
        codes, scales, mins = choose_codes(rows.float())
        put_codes(packed, at, codes)
        put_groups(packed, at, scales, mins)
    return packed


def choose_codes(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``values`` [n, I] to codes uint8 0 to 15 [n, I], scales and mins [n, ceil(I / 32)] float32 rounded to float16;
    value is about code * scale + min."""
    groups = F.pad(values, (0, -values.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    low, high = groups.aminmax(dim=2, keepdim=True)
    best: tuple[torch.Tensor, ...] = ()
    for shrink in SHRINKS:
        cut = (high - low) * ((1.0 - shrink) / 2)  # taken off each end of the range
        # rounded to float16 before the codes are chosen, as the kernels will read them
        scale, least = ((high - low) * (shrink / MOST_INT4)).half().float(), (low + cut).half().float()
        codes = ((groups - least) * _inverse(scale)).round_().clamp_(0, MOST_INT4)
        loss = _add_halves((codes * scale).add_(least).sub_(groups).square_())
        if not best:
            best = loss, codes, scale, least
        else:
            is_better = loss < best[0]
            best = tuple(
                torch.where(is_better, new, old) for new, old in zip((loss, codes, scale, least), best, strict=True)
            )
    _, codes, scale, least = best
    return codes.to(torch.uint8).flatten(1)[:, : values.shape[1]], scale.squeeze(2), least.squeeze(2)


def _add_halves(values: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension (a power of two), by adding its halves until one value is left. The order is
    fixed, which ``torch.sum`` does not promise, so that the native library can repeat it exactly."""
    while values.shape[-1] > 1:
        values = torch.add(*values.chunk(2, dim=-1))
    return values


def _inverse(scales: torch.Tensor) -> torch.Tensor:
    """1 / scale; 0 where the scale is 0, so that such a group gets codes 0."""
    return torch.where(scales > 0, 1.0 / scales, 0.0)
