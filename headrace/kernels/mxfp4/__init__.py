"""MXFP4: 4-bit floats (e2m1) in blocks of 32 that share a power of two (e8m0). OCP Microscaling Formats 1.0, 2023."""

from headrace.kernels.operation import Operation

BLOCK = 32
"""Values that share a scale."""

DEQUANTISE_MXFP4 = Operation("mxfp4 dequantisation kernel")
"""``dequantise_mxfp4(codes [..., I / 2] uint8, scales [..., I / 32] uint8, dtype) -> [..., I]`` in ``dtype``.

A byte holds two neighbouring values, the first in its low half: bit 3 is the sign, bits 0 to 2 stand for 0, 0.5, 1, 1.5, 2,
3, 4, 6. They are multiplied by ``2 ** (scale - 127)``; scale 255 means NaN. Exact in bfloat16 and float32.
"""

DEQUANTISE_MXFP4.add("reference", "headrace.kernels.mxfp4.reference:dequantise_mxfp4", doc="plain torch, by table")
