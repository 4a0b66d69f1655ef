"""How layers keep their weights: quantization schemes, packed storage, blocks of GGUF files. Schemes are registered
here with the queries they support; other packages add theirs by entry points of group ``headrace.schemes``. Imports
kernels only, no layers.
"""

from headrace.layers.quantization.chain import (
    SchemeChain,
    add_installed_schemes,
    chain_schemes,
    default_chain,
    made_for_cpu,
    stored_as,
)
from headrace.layers.quantization.contract import SCHEMES, Scheme, SchemeQuery

SCHEMES.add(
    "block_fp8", "headrace.layers.quantization.scaled:BlockFp8", supports=stored_as("block_fp8", "fp8"), priority=10,
    doc="8-bit floats with a scale per square block, dequantised while they are loaded",
)
SCHEMES.add(
    "mxfp4", "headrace.layers.quantization.scaled:Mxfp4", supports=stored_as("mxfp4", "fp8", "mxfp4"), priority=20,
    doc="4-bit floats with a power of two per 32, dequantised while they are loaded",
)
SCHEMES.add(
    "int8", "headrace.layers.quantization.integer:Int8", supports=made_for_cpu("int8"), priority=90,
    doc="8-bit weights in groups of 32, quantised on a CPU while any checkpoint is loaded",
)
SCHEMES.add(
    "int4", "headrace.layers.quantization.integer:Int4", supports=made_for_cpu("int4"), priority=90,
    doc="4-bit weights in groups of 32, quantised on a CPU while any checkpoint is loaded",
)
SCHEMES.add(
    "w8a8", "headrace.layers.quantization.integer:W8A8", supports=made_for_cpu("w8a8"), priority=90,
    doc="8-bit weights with a scale per output, activations with one per token; faster than int8 and less accurate",
)

__all__ = ["SCHEMES", "Scheme", "SchemeChain", "SchemeQuery", "add_installed_schemes", "chain_schemes", "default_chain"]
