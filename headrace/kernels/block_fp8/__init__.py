"""8-bit floats (e4m3) of which each square block shares a scale, as DeepSeek's checkpoints store weights.
DeepSeek-V3, arXiv:2412.19437, section 3.3.2."""

from headrace.kernels.operation import Operation

BLOCK = 128
"""Rows and columns that share a scale; blocks at the end may be smaller."""

DEQUANTISE_BLOCKS = Operation("block fp8 dequantisation kernel")
"""``dequantise_blocks(values [O, I] float8_e4m3fn, scales [ceil(O / 128), ceil(I / 128)], dtype) -> [O, I]`` in
``dtype``.

Scales are floats or powers of two (e8m0); each multiplies its block. Computed in float32.
"""

DEQUANTISE_BLOCKS.add("reference", "headrace.kernels.block_fp8.reference:dequantise_blocks", doc="plain torch")

GROUP = 128
"""Neighbouring activations that share a scale."""

QUANTISE_GROUPS = Operation("group fp8 quantisation kernel")
"""``quantise_groups(x [..., I], group=GROUP) -> (codes [..., I] float8_e4m3fn, exponents [..., I / group] uint8)``.

An exponent byte e stands for ``2 ** (e - 127)`` (e8m0): the least power of two by which every value of its group, and
at least 1e-4, fits e4m3. Computed in float32; `power_of_two` reads exponents.
"""

QUANTISE_GROUPS.add("reference", "headrace.kernels.block_fp8.reference:quantise_groups", doc="plain torch")
