"""Quantised weights: the contract, and the schemes, registered here by what they can serve. Packages outside this one
add theirs through the entry-point group ``headrace.schemes``."""

from headrace.layers.quantization import support
from headrace.layers.quantization.chaining import SchemeChain, add_installed_schemes, chain_schemes, default_chain
from headrace.layers.quantization.contract import SCHEMES, Scheme, SchemeQuery

SCHEMES.add(
    "block_fp8", "headrace.layers.quantization.scaled:BlockFp8", supports=support.stored_as("block_fp8", "fp8"),
    priority=10,
    doc="8-bit floats with a scale per square block, dequantised as they are read",
)
SCHEMES.add(
    "mxfp4", "headrace.layers.quantization.scaled:Mxfp4", supports=support.stored_as("mxfp4", "fp8", "mxfp4"),
    priority=20,
    doc="4-bit floats with a power of two per 32, dequantised as they are read",
)
SCHEMES.add(
    "int8", "headrace.layers.quantization.kept:Int8", supports=support.made_for_cpu("int8"), priority=90,
    doc="8-bit weights in groups of 32, made of any checkpoint as it is loaded on a CPU",
)
SCHEMES.add(
    "int4", "headrace.layers.quantization.kept:Int4", supports=support.made_for_cpu("int4"), priority=90,
    doc="4-bit weights in groups of 32, made of any checkpoint as it is loaded on a CPU",
)
SCHEMES.add(
    "w8a8", "headrace.layers.quantization.kept:W8A8", supports=support.made_for_cpu("w8a8"), priority=90,
    doc="8-bit weights with a scale per output, activations with one per token; made as int8 is, faster and less exact",
)

__all__ = ["SCHEMES", "Scheme", "SchemeChain", "SchemeQuery", "add_installed_schemes", "chain_schemes", "default_chain"]
