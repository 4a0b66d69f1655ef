"""Values of the option ``quantization``: refused here if none of ours and no installed package can add one, since the
registry of schemes needs torch.
"""

from __future__ import annotations

from headrace.base.errors import ConfigError
from headrace.base.option import suggest
from headrace.base.registry import PLUGIN_GROUP, installed_points

AS_PLAIN, AS_STORED = "none", "stored"
"""Values that name no scheme: ``none`` dequantises everything; ``stored``, the default, keeps a file's quantised
blocks."""
GROUPED = ("int8", "int4")
"""Values that round weights and inputs by groups; others by rows, or not on a CPU."""
GROUPED_METHODS = ("gptq", "awq", "auto-round", "hqq", "mlx", "metal")
"""Methods of checkpoints whose weights a CPU keeps in groups of 4 or 8 bits."""
SCHEME_GROUP = "headrace.schemes"
"""Entry points that name a scheme of another package."""
MADE_AT_LOAD = ("fp8", "int4", "int8", "w8a8")
"""Schemes that quantise any checkpoint while it is loaded."""
CHECKPOINT_METHODS = (
    "auto-round", "auto_round", "awq", "bitsandbytes", "compressed-tensors", "compressed_tensors", "fbgemm_fp8", "gptq",
    "gptq_v2", "hqq", "intel/auto-round", "metal", "mlx", "modelopt", "modelopt_fp4", "modelopt_mixed", "mxfp4",
    "mxfp8", "quanto", "scaled_fp8", "torchao"
)
"""``quant_method`` of checkpoints: may be named for one that states it, which changes nothing."""


def check_quantization(name: str | None) -> None:
    """Raise `ConfigError` for a name that no scheme can have."""
    known = (*MADE_AT_LOAD, AS_PLAIN, AS_STORED)
    if name is None or name in known or name in CHECKPOINT_METHODS:
        return
    if installed_points(SCHEME_GROUP) or installed_points(PLUGIN_GROUP):  # which the engine alone loads
        return
    raise ConfigError(
        f"quantization must be one of {', '.join(known)}, or the form of a quantised checkpoint that states it; got "
        f"{name!r}{suggest(name, (*known, *CHECKPOINT_METHODS))}", param="quantization"
    )
