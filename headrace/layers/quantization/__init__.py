"""How layers keep their weights: quantization schemes, packed storage, blocks of GGUF files. Schemes are registered
here with the queries they support; other packages add theirs by entry points of group ``headrace.schemes``. Imports
kernels only, no layers.
"""

from headrace.layers.quantization.chain import (
    SchemeChain,
    StoredAs,
    add_installed_schemes,
    chain_schemes,
    default_chain,
    made_for_cpu,
    made_on_any,
    names_form,
)
from headrace.layers.quantization.contract import SCHEMES, Scheme, SchemeQuery

FORMATS = "headrace.layers.quantization.formats"

SCHEMES.add(
    "scaled_fp8", f"{FORMATS}.scaled_floats:ScaledFp8", supports=StoredAs(("fp8", "fbgemm_fp8", "mxfp8")), priority=10,
    doc="8-bit floats with a scale per square block, per output or per weight",
)
SCHEMES.add(
    "mxfp4", f"{FORMATS}.scaled_floats:Mxfp4", supports=StoredAs(("mxfp4", "fp8")), priority=20,
    doc="4-bit floats with a power of two per 32",
)
SCHEMES.add(
    "compressed-tensors", f"{FORMATS}.compressed_tensors:CompressedTensors",
    supports=StoredAs(("compressed-tensors", "compressed_tensors"), is_recognised=False), priority=30,
    doc="files of llm-compressor: floats of 8 and 4 bits, integers of 2 to 8, alone or with activations of 8 bits",
)
SCHEMES.add(
    "modelopt", f"{FORMATS}.modelopt:ModelOpt",
    supports=StoredAs(("modelopt", "modelopt_fp4", "modelopt_mixed"), is_recognised=False), priority=30,
    doc="files of NVIDIA's ModelOpt: FP8 and NVFP4",
)
SCHEMES.add(
    "gptq", f"{FORMATS}.integers:Gptq", supports=StoredAs(("gptq", "gptq_v2"), is_recognised=False), priority=30,
    doc="integers of 2, 3, 4 or 8 bits in groups, with or without activation order",
)
SCHEMES.add(
    "awq", f"{FORMATS}.integers:Awq", supports=StoredAs(("awq",), is_recognised=False), priority=30,
    doc="integers of 4 bits in groups, packed for gemm or gemv",
)
SCHEMES.add(
    "auto-round", f"{FORMATS}.integers:AutoRound",
    supports=StoredAs(("auto-round", "auto_round", "intel/auto-round"), is_recognised=False), priority=30,
    doc="AutoRound's files in GPTQ's or AWQ's packing",
)
SCHEMES.add(
    "bitsandbytes", f"{FORMATS}.bitsandbytes:BitsAndBytes",
    supports=StoredAs(("bitsandbytes",), is_recognised=False), priority=30,
    doc="nf4 and fp4 in blocks of a flattened weight, int8 with a scale per output",
)
SCHEMES.add(
    "mlx", f"{FORMATS}.mlx:Mlx", supports=StoredAs(("mlx", "metal"), is_recognised=False), priority=30,
    doc="MLX's integers of 2 to 8 bits in groups, MXFP4, MXFP8 and NVFP4",
)
SCHEMES.add(
    "torchao", f"{FORMATS}.torchao:TorchAo", supports=StoredAs(("torchao",), is_recognised=False), priority=30,
    doc="torchao's FP8 and integers of 1 to 8 bits, in safetensors",
)
SCHEMES.add(
    "hqq", f"{FORMATS}.hqq:Hqq", supports=StoredAs(("hqq",), is_recognised=False), priority=30,
    doc="HQQ's integers of 1 to 8 bits, in safetensors",
)
SCHEMES.add(
    "quanto", f"{FORMATS}.quanto:Quanto", supports=StoredAs(("quanto",), is_recognised=False), priority=30,
    doc="quanto's int8 and FP8 with a scale per output",
)
SCHEMES.add(
    "fp8", "headrace.layers.quantization.coded:Fp8", supports=made_on_any("fp8"), priority=90,
    doc="8-bit floats with a scale per output, quantised while any checkpoint is loaded; for GPUs",
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

__all__ = [
    "SCHEMES", "Scheme", "SchemeChain", "SchemeQuery", "StoredAs", "add_installed_schemes", "chain_schemes",
    "default_chain", "names_form",
]
