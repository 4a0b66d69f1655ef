"""Latents in Triton: norm, rotation, packing and write of a vector that stays in registers. E dims of a vector, R
rotated, P pages, S slots of a page."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from headrace.kernels.latents import GROUP, KEY_SCALE_BYTES, MOST_APART
from headrace.kernels.latents.slots import Slots

PLAIN, VECTORS, KEYS, NARROW_KEYS = 0, 1, 2, 3
"""How slots hold a vector: as it is; packed with a scale per `GROUP`; packed with one scale, turned by a Hadamard
matrix; turned, too, and packed in MXFP4."""

NARROW_BLOCK = tl.constexpr(32)
APART = tl.constexpr(MOST_APART)

LEAST_AMAX = tl.constexpr(1e-4)
LARGEST = tl.constexpr(448.0)


def slot_arguments(slots: Slots) -> dict[str, Any]:
    """Of a kernel that reads or writes slots: the same bytes as ``codes`` (e4m3, pairs of e2m1, or the vectors
    themselves), ``wide`` (bfloat16) and ``scales``, and the distance of pages and of slots, counted in elements of
    ``codes``."""
    values, scales = slots.values, slots.scales
    if scales is None:
        views, how = (values, values, values), PLAIN
    elif slots.is_mxfp4:
        views, how = (values, values, scales.view(torch.uint8)), NARROW_KEYS
    elif slots.holds_keys:
        # float32 scales as they are; keys have no part in bfloat16
        views, how = (values.view(torch.float8_e4m3fn), values, scales.view(torch.float32)), KEYS
    else:
        views, how = (values.view(torch.float8_e4m3fn), values.view(torch.bfloat16), scales), VECTORS
    names = ("codes_ptr", "wide_ptr", "scales_ptr")
    return {
        **dict(zip(names, views, strict=True)), "S": slots.per_page, "PAGE": values.stride(0), "SLOT": values.stride(1),
        "HOW": how,
    }


@triton.jit
def finish_latent(
    x, weight_ptr, cos_sin_ptr, position, eps, E: tl.constexpr, R: tl.constexpr, DTYPE: tl.constexpr
):
    """``x`` [E] float32 to the latent [E] float32: normalised, rounded to DTYPE, rotated."""
    pair = tl.arange(0, E // 2)
    even, odd = tl.split(tl.reshape(x, [E // 2, 2]))
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / E + eps)
    even = even * rstd * tl.load(weight_ptr + 2 * pair).to(tl.float32)
    odd = odd * rstd * tl.load(weight_ptr + 2 * pair + 1).to(tl.float32)
    even, odd = even.to(DTYPE).to(tl.float32), odd.to(DTYPE).to(tl.float32)
    # pairs before the rotated ones turn by no angle
    turn = pair - (E - R) // 2
    table = cos_sin_ptr + position * R + turn
    cos = tl.load(table, mask=turn >= 0, other=1.0)
    sin = tl.load(table + R // 2, mask=turn >= 0, other=0.0)
    return tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), [E])


@triton.jit
def hadamard_signs(E: tl.constexpr):
    """[E, E] float32 of 1 and -1: the Hadamard matrix times sqrt(E); the sign is the parity of the bits that row and
    column share."""
    row, column = tl.arange(0, E), tl.arange(0, E)
    shared = row[:, None] & column[None, :]
    shared ^= shared >> 8
    shared ^= shared >> 4
    shared ^= shared >> 2
    shared ^= shared >> 1
    return 1.0 - 2.0 * (shared & 1).to(tl.float32)


@triton.jit
def pack_narrow(x, E: tl.constexpr):
    """``x`` [E] float32 to MXFP4: bytes [E / 2] of two codes each, scale bytes [E / 32]; as
    `slots.pack_narrow_keys`."""
    x = tl.reshape(x, [E // NARROW_BLOCK, NARROW_BLOCK])
    amax = tl.maximum(tl.max(tl.abs(x), axis=1), LEAST_AMAX)
    bits = tl.div_rn(amax, amax * 0.0 + 6.0).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)  # the least power of two by which all fit
    exponent = tl.maximum(exponent, tl.max(exponent, axis=0) - APART)
    scaled = x * ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    size = tl.abs(scaled)
    # behind the midpoints of 0, 0.5, 1, 1.5, 2, 3, 4, 6
    code = (size > 0.25).to(tl.int32) + (size > 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size > 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size > 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    code |= ((scaled < 0) & (code > 0)).to(tl.int32) << 3
    low, high = tl.split(tl.reshape(code, [E // 2, 2]))
    return (low | (high << 4)).to(tl.uint8), exponent.to(tl.uint8)


@triton.jit
def _widen_codes(code, exponent):
    """e2m1 codes to bits of e4m3, of which ``exponent`` is the field of 0.5."""
    size = code & 7
    bits = ((exponent + (size >> 1)) << 3) | tl.where(size > 1, (size & 1) << 2, 0)
    return tl.where(size > 0, bits, 0) | ((code & 8) << 4)


@triton.jit
def widen_narrow(codes, scales, E: tl.constexpr):
    """MXFP4 keys, bytes [n, E / 32, 16] and [n, E / 32], to e4m3 [n, E] and a scale for each key, float32 [n]: exactly,
    see `headrace.kernels.latents.MOST_APART`."""
    scales = scales.to(tl.int32)
    largest = tl.max(scales, axis=1)
    exponent = (scales - largest[:, None] + 12)[:, :, None]  # 0.5 * 2 ** 6 is 2 ** (12 - 7)
    codes = codes.to(tl.int32)
    bits = tl.join(_widen_codes(codes & 15, exponent), _widen_codes(codes >> 4, exponent))
    keys = tl.reshape(bits, [codes.shape[0], E]).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return keys, ((largest - 6) << 23).to(tl.float32, bitcast=True)


@triton.jit
def write_slot(
    x, number, codes_ptr, wide_ptr, scales_ptr, E: tl.constexpr, S: tl.constexpr, PAGE: tl.constexpr,
    SLOT: tl.constexpr, HOW: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr,
):
    """Write the latent ``x`` [E] float32 to slot ``number``. SCALES: the distance of slots' scales, in elements of
    ``scales``."""
    page, at = number // S, number % S
    dim = tl.arange(0, E)
    start = page * PAGE + at * SLOT
    if HOW == 0:
        tl.store(codes_ptr + start + dim, x.to(codes_ptr.dtype.element_ty))
    elif HOW == 1:
        PARTS: tl.constexpr = E // GROUP  # the last is the rotated one
        part, inner = tl.arange(0, PARTS), tl.arange(0, GROUP)
        x = tl.reshape(x, [PARTS, GROUP])
        amax = tl.maximum(tl.max(tl.abs(x), axis=1), LEAST_AMAX)
        bits = tl.div_rn(amax, LARGEST).to(tl.int32, bitcast=True)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)  # the least power of two by which all fit
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        offset = part[:, None] * GROUP + inner[None, :]
        is_plain = (part < PARTS - 1)[:, None]
        codes = (x * inverse[:, None]).to(tl.float8e4nv)
        tl.store(codes_ptr + start + offset, codes, mask=is_plain & (inner >= 0)[None, :])
        # the rotated dims lie behind E - GROUP bytes of codes, two bytes each
        behind = wide_ptr + start // 2 + (E - GROUP) // 2 + inner[None, :] + part[:, None] * 0
        tl.store(behind, x.to(tl.bfloat16), mask=(part == PARTS - 1)[:, None] & (inner >= 0)[None, :])
        scale = tl.arange(0, SCALES)
        padded = tl.sum(tl.where(scale[:, None] == part[None, :], exponent[None, :], 0), axis=1)
        padded = tl.where(scale < PARTS - 1, padded, 0)
        tl.store(scales_ptr + page * PAGE + at * SCALES + scale, padded.to(tl.uint8))
    elif HOW == 3:
        turned = tl.sum(x[:, None] * hadamard_signs(E), axis=0) * (1.0 / tl.sqrt_rn(E * 1.0))
        pairs, exponents = pack_narrow(turned, E)
        tl.store(codes_ptr + start + tl.arange(0, E // 2), pairs)
        tl.store(scales_ptr + page * PAGE + at * SCALES + tl.arange(0, E // NARROW_BLOCK), exponents)
    else:
        turned = tl.sum(x[:, None] * hadamard_signs(E), axis=0) * (1.0 / tl.sqrt_rn(E * 1.0))
        scale = tl.div_rn(tl.maximum(tl.max(tl.abs(turned), axis=0), LEAST_AMAX), LARGEST)
        tl.store(codes_ptr + start + dim, tl.div_rn(turned, scale).to(tl.float8e4nv))
        tl.store(scales_ptr + page * (PAGE // 4) + at, scale)


@triton.jit
def write_latent(
    token, x_ptr, weight_ptr, cos_sin_ptr, positions_ptr, numbers_ptr, x_stride, eps, codes_ptr, wide_ptr, scales_ptr,
    E: tl.constexpr, R: tl.constexpr, S: tl.constexpr, PAGE: tl.constexpr, SLOT: tl.constexpr, HOW: tl.constexpr,
    GROUP: tl.constexpr, SCALES: tl.constexpr,
):
    """Row ``token`` of `LatentRows`."""
    x = tl.load(x_ptr + token * x_stride + tl.arange(0, E)).to(tl.float32)
    position = tl.load(positions_ptr + token)
    x = finish_latent(x, weight_ptr, cos_sin_ptr, position, eps, E, R, x_ptr.dtype.element_ty)
    x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    write_slot(x, tl.load(numbers_ptr + token), codes_ptr, wide_ptr, scales_ptr, E, S, PAGE, SLOT, HOW, GROUP, SCALES)


def scale_step(how: int, head_dim: int) -> int:
    """Elements of ``scales`` from one slot to the next, at least as many as a vector has groups."""
    return {
        PLAIN: 1, VECTORS: max(8, head_dim // GROUP), KEYS: KEY_SCALE_BYTES // 4,
        NARROW_KEYS: head_dim // NARROW_BLOCK.value,
    }[how]
