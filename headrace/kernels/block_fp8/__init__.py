"""8-bit floats (e4m3) of which each square block shares a scale, as DeepSeek's checkpoints store weights.
DeepSeek-V3, arXiv:2412.19437, section 3.3.2."""

from headrace.kernels.operation import Operation

BLOCK = 128
"""Rows and columns that share a scale; blocks at the end may be smaller."""

DEQUANTISE_BLOCKS = Operation("block fp8 dequantisation kernel")
"""``dequantise_blocks(values [O, I] float8_e4m3fn, scales [ceil(O / 128), ceil(I / 128)], dtype) -> [O, I]`` in ``dtype``.

Scales are floats or powers of two (e8m0); each multiplies its block. Computed in float32.
"""

DEQUANTISE_BLOCKS.add("reference", "headrace.kernels.block_fp8.reference:dequantise_blocks", doc="plain torch")
