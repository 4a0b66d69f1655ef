"""Codes to numbers in registers, for Triton kernels: the steps that products with coded weights share.

Fast paths are PTX for bfloat16, from compute capability 8.0 on: of its arithmetic that has only fma, where adding -0
and multiplying by 1 change nothing. They give the same numbers as the plain path, which runs everywhere. R rows of a
weight, W codes of each.
"""

import triton
import triton.language as tl

INTEGERS, FLOATS, LOOKED_UP, E2M1 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
TILED = tl.constexpr(4)
"""What a code is: an integer, e4m3, an entry of a table of 16 numbers, or e2m1; or an integer of a weight in tiles."""
TILE_ROWS, UNIT = tl.constexpr(8), tl.constexpr(64)
"""Rows of a tile, and bytes of each that lie next to one another."""
LIFT_E2M1 = tl.constexpr(2.0**126)
"""Exponent and mantissa of an e2m1 code, put into the lowest bits of the exponent and the highest of the mantissa of
bfloat16 or float32 (subnormal numbers too), are its number divided by this. For e4m3 it is 2**120."""
TWO_EXPONENTS = tl.constexpr(0x00800080)
"""An exponent times this is two bfloat16 powers of two in a register."""
INTEGER_BASE = tl.constexpr(128.0)
"""Ones of bfloat16 from 128 on are its lowest bits: 0x4300 | n is 128 + n."""

# Two bytes of two e2m1 codes each, and bfloat16 powers of two, twice in a register, of low and of high codes (each byte
# has its own, but neighbours share them), to low and high numbers times these. A code is 4 bits, sign first. Two codes
# are spread to the 16-bit halves of a register, multiplied by 2**12 + 2**6 (high codes: 2**8 + 2**2), which puts the
# sign at bit 15 and the rest at bits 8 to 6, and cleared of other bits.
_SPREAD_E2M1 = tl.constexpr("""{
.reg .b32 a, b, nothing;
mov.b32 nothing, 0x80008000;
cvt.u32.u16 a, $2;
prmt.b32 a, a, 0, 0x4140;
and.b32 b, a, 0x000F000F;
mul.lo.u32 b, b, 0x1040;
and.b32 b, b, 0x81C081C0;
fma.rn.bf16x2 $0, b, $3, nothing;
and.b32 b, a, 0x00F000F0;
mul.lo.u32 b, b, 0x0104;
and.b32 b, b, 0x81C081C0;
fma.rn.bf16x2 $1, b, $5, nothing;
}""")
# Two bytes of two integers each, and bfloat16 zero points of low and high ones taken from -128, to their differences.
_SPREAD_INT4 = tl.constexpr("""{
.reg .b32 a, b, one;
mov.b32 one, 0x3F803F80;
cvt.u32.u16 a, $2;
prmt.b32 a, a, 0, 0x4140;
lop3.b32 b, a, 0x000F000F, 0x43004300, 0xEA;
fma.rn.bf16x2 $0, b, one, $3;
shr.b32 a, a, 4;
lop3.b32 b, a, 0x000F000F, 0x43004300, 0xEA;
fma.rn.bf16x2 $1, b, one, $4;
}""")
# Two e4m3 bytes to bfloat16: the byte to bits 15 to 8, all but its sign 4 places down, times 2**120.
_SPREAD_E4M3 = tl.constexpr("""{
.reg .b32 a, b, lift, nothing;
mov.b32 lift, 0x7B807B80;
mov.b32 nothing, 0x80008000;
cvt.u32.u16 a, $1;
prmt.b32 a, a, 0, 0x1404;
shr.b32 b, a, 4;
and.b32 b, b, 0x07F007F0;
lop3.b32 b, a, 0x80008000, b, 0xEA;
fma.rn.bf16x2 $0, b, lift, nothing;
}""")


@triton.jit
def find_codes(row, first, byte, STRIDE, KIND: tl.constexpr):
    """Where byte ``first`` + ``byte`` of a row lies, from the weight's first byte; all of shapes that broadcast, and
    both bytes of one unit."""
    if KIND == TILED:
        unit = first // UNIT
        tile = row // TILE_ROWS * (TILE_ROWS * STRIDE) + unit * (TILE_ROWS * UNIT)
        return tile + row % TILE_ROWS * UNIT + (first - unit * UNIT + byte)
    else:
        return row * STRIDE + (first + byte)


@triton.jit
def decode_nibble(code, values_ptr, KIND: tl.constexpr):
    """Codes of 4 bits, in int32, to float32 numbers; ``values_ptr``: the table of `LOOKED_UP`."""
    if KIND == E2M1:
        bits = ((code & 8) << 28) | ((code & 7) << 22)
        return bits.to(tl.float32, bitcast=True) * LIFT_E2M1
    elif KIND == LOOKED_UP:
        return tl.load(values_ptr + code)
    else:
        return code.to(tl.float32)


@triton.jit
def decode_pairs(packed, values_ptr, KIND: tl.constexpr):
    """Bytes [R, W] of two codes to two tiles of float32 numbers, of low and of high codes."""
    code = packed.to(tl.int32)
    return decode_nibble(code & 15, values_ptr, KIND), decode_nibble(code >> 4, values_ptr, KIND)


@triton.jit
def power_of(lifted):
    """Powers of two, kept in bytes as `device_codes.LIFT` says (here int32), as float32."""
    return ((lifted - 126) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_pairs(packed, low_power, high_power, DTYPE: tl.constexpr, FAST: tl.constexpr):
    """Bytes of two e2m1 codes, times powers of two of low and high ones (int32, see `power_of`; of a shape that
    broadcasts to that of ``packed``, two neighbours of which share one), to two tiles in DTYPE."""
    if FAST:
        return tl.inline_asm_elementwise(
            _SPREAD_E2M1, "=r,=r,h,r,r,r,r",
            [
                packed, tl.broadcast_to(low_power * TWO_EXPONENTS, packed.shape),
                tl.broadcast_to(high_power * TWO_EXPONENTS, packed.shape)
            ],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        low, high = decode_pairs(packed, low_power, E2M1)
        return (low * power_of(low_power)).to(DTYPE), (high * power_of(high_power)).to(DTYPE)


@triton.jit
def subtract_pairs(
    packed, low_zero, high_zero, values_ptr, KIND: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr
):
    """Bytes of two codes, less zero points of low and high ones (float32, of a shape that broadcasts to that of
    ``packed``), to two tiles in DTYPE. Where FAST, codes are integers and zero points whole numbers below 128, so that
    differences are exact."""
    if FAST:
        low_zero = tl.broadcast_to((-(low_zero + INTEGER_BASE)).to(tl.bfloat16), packed.shape)
        high_zero = tl.broadcast_to((-(high_zero + INTEGER_BASE)).to(tl.bfloat16), packed.shape)
        return tl.inline_asm_elementwise(
            _SPREAD_INT4, "=r,=r,h,r,r", [packed, low_zero, high_zero],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        low, high = decode_pairs(packed, values_ptr, KIND)
        return (low - low_zero).to(DTYPE), (high - high_zero).to(DTYPE)


@triton.jit
def widen(codes, DTYPE: tl.constexpr, FAST: tl.constexpr):
    """Codes of e4m3 (FAST: bytes) or integers to the same numbers in DTYPE, all of which it holds."""
    if FAST:
        return tl.inline_asm_elementwise(
            _SPREAD_E4M3, "=r,h", [codes], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return codes.to(tl.float32).to(DTYPE)
