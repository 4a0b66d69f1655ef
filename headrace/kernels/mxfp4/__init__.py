"""MXFP4: 4-bit floats (e2m1) in blocks of 32 that share a power of two (e8m0). OCP Microscaling Formats 1.0, 2023."""

from headrace.kernels.operation import Operation

BLOCK = 32
"""Values that share a scale."""

DEQUANTISE_MXFP4 = Operation("mxfp4 dequantisation kernel")
"""``dequantise_mxfp4(codes [..., I / 2] uint8, scales [..., I / 32] uint8, dtype) -> [..., I]`` in ``dtype``.

A byte holds two neighbouring values, the first in its low half: bit 3 is the sign, bits 0 to 2 stand for 0, 0.5, 1,
1.5, 2, 3, 4, 6. They are multiplied by ``2 ** (scale - 127)``; scale 255 means NaN. Exact in bfloat16 and float32.
"""

QUANTISE_MXFP4 = Operation("mxfp4 quantisation kernel")
"""``quantise_mxfp4(x [..., I]) -> (codes [..., I / 2] uint8, scales [..., I / 32] uint8)``, as above. A scale is the
least power of two by which every value of its block, and at least 1e-4, fits; values become the nearest code, halfway
the one nearer to 0, and never minus zero. Computed in float32.
"""

DEQUANTISE_MXFP4.add("reference", "headrace.kernels.mxfp4.reference:dequantise_mxfp4", doc="plain torch, by table")
QUANTISE_MXFP4.add("reference", "headrace.kernels.mxfp4.reference:quantise_mxfp4", doc="plain torch")
