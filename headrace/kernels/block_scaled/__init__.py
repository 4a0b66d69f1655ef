"""Block-scaled floats: MXFP4, and FP8 as DeepSeek's checkpoints store weights.

MXFP4: e2m1 in blocks of 32 that share a power of two (e8m0). OCP Microscaling Formats 1.0, 2023.
FP8: e4m3 in square blocks that share a scale. DeepSeek-V3, arXiv:2412.19437, section 3.3.2.
"""

from headrace.kernels.operation import Operation

MXFP4_BLOCK = 32
"""Values that share a scale."""

DEQUANTISE_MXFP4 = Operation("mxfp4 dequantisation kernel")
"""``dequantise_mxfp4(codes [..., I / 2] uint8, scales [..., I / 32] uint8, dtype) -> [..., I]`` in ``dtype``.

A byte holds two neighbouring values, the first in its low half: bit 3 is the sign, bits 0 to 2 stand for 0, 0.5, 1,
1.5, 2, 3, 4, 6. They are multiplied by ``2 ** (scale - 127)``; scale 255 means NaN. Exact in bfloat16 and float32.
"""

QUANTISE_MXFP4 = Operation("mxfp4 quantisation kernel")
"""``quantise_mxfp4(x [..., I]) -> (codes [..., I / 2] uint8, scales [..., I / 32] uint8)``, as above. A scale is the
least power of two by which every value of its block, and at least 1e-4, fits; values become the nearest code, a tie
the one nearer to 0, and never minus zero. Computed in float32.
"""

DEQUANTISE_MXFP4.add("reference", "headrace.kernels.block_scaled.reference:dequantise_mxfp4", doc="plain torch")
QUANTISE_MXFP4.add("reference", "headrace.kernels.block_scaled.reference:quantise_mxfp4", doc="plain torch")

FP8_BLOCK = 128
"""Rows and columns that share a scale; blocks at the end may be smaller."""

DEQUANTISE_BLOCKS = Operation("block fp8 dequantisation kernel")
"""``dequantise_blocks(values [O, I] float8_e4m3fn, scales [ceil(O / 128), ceil(I / 128)], dtype) -> [O, I]`` in
``dtype``.

Scales are floats or powers of two (e8m0); each multiplies its block. Computed in float32.
"""

DEQUANTISE_BLOCKS.add("reference", "headrace.kernels.block_scaled.reference:dequantise_blocks", doc="plain torch")

FP8_GROUP = 128
"""Neighbouring activations that share a scale."""

QUANTISE_GROUPS = Operation("group fp8 quantisation kernel")
"""``quantise_groups(x [..., I], group=FP8_GROUP) -> (codes [..., I] float8_e4m3fn, exponents [..., I / group]
uint8)``.

An exponent byte e stands for ``2 ** (e - 127)`` (e8m0): the least power of two by which every value of its group, and
at least 1e-4, fits e4m3. Computed in float32; `power_of_two` reads exponents.
"""

QUANTISE_GROUPS.add("reference", "headrace.kernels.block_scaled.reference:quantise_groups", doc="plain torch")
