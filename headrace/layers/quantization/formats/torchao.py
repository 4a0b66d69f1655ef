"""Checkpoints of torchao in safetensors, as transformers writes them: FP8, integers of 8 bits, and of 1 to 8 bits kept
in bytes, and int4 in pairs. O outputs, I inputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from headrace.base.errors import ConfigError, WeightError
from headrace.kernels.block_scaled import FP8_BLOCK
from headrace.kernels.coded_linear.codes import Code, CodedMatrix
from headrace.layers.quantization.contract import Named, SchemeQuery
from headrace.layers.quantization.formats.assembly import Layout, Parts, assemble
from headrace.layers.quantization.formats.scaled_floats import decode_fp8, unpack_pairs

DATA, SCALE, ZEROS = "_weight_qdata", "_weight_scale", "_weight_zero_point"
FLOATS = ("Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig")
INT8_ROUNDED = "Int8DynamicActivationInt8WeightConfig"
INTEGERS = (
    "Int8WeightOnlyConfig", INT8_ROUNDED, "IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig",
    "Int4WeightOnlyConfig", "Float8DynamicActivationInt4WeightConfig",
)
PACKINGS = ("UNPACKED_TO_INT8", "PLAIN", "plain", "unpacked_to_int8")
"""Formats of packed integers that are read; others are in the order of one kernel."""


class TorchAo:
    """See `Scheme`. Raises `ConfigError` naming a configuration or a packing that is not read."""

    def __init__(self, query: SchemeQuery):
        self._query = query
        known = FLOATS + INTEGERS
        configs = list(_find_configs(query.config.get("quant_type")))
        kinds = [str(config["_type"]) for config in configs]
        for config, kind in zip(configs, kinds, strict=True):
            packing = _read_packing(config.get("_data"))
            if kind not in known or packing not in PACKINGS:
                what = kind if kind not in known else f"{kind} in the packing {packing}"
                raise ConfigError(
                    f"config.json: quantization_config (torchao): {what} is not read; known are {', '.join(known)}, "
                    "integers in plain packing. Take the original checkpoint, or one in one of these",
                    param="quantization_config",
                )
        rounds_inputs = bool(kinds) and set(kinds) == {INT8_ROUNDED}
        floats = {kind in FLOATS for kind in kinds}
        self._layout = Layout(
            "torchao's tensors", frozenset({DATA, SCALE} if True in floats else {DATA, SCALE, ZEROS}),
            lambda module, parts: _decode(module, parts, rounds_inputs=rounds_inputs),
            optional=frozenset({ZEROS} if len(floats) > 1 else ())
        )

    def read(self, tensors: Iterable[Named]) -> Iterator[Named]:
        """See `Scheme`."""
        return assemble(tensors, lambda module: self._layout, self._query)

    def finish(self, model: nn.Module) -> None:
        """Layers got their weights while these were read."""


def _find_configs(stated: Any) -> Iterator[dict[str, Any]]:
    """The configurations of weights in ``quant_type``: one, or one by module."""
    if isinstance(stated, dict):
        if str(stated.get("_type", "")).endswith("Config") and not str(stated["_type"]).startswith("Fqn"):
            yield stated
        else:
            for value in stated.values():
                yield from _find_configs(value)


def _read_packing(data: Any) -> str:
    stated = data if isinstance(data, dict) else {}
    packing = stated.get("int4_packing_format") or stated.get("intx_packing_format") or PACKINGS[0]
    return str(packing.get("_data") if isinstance(packing, dict) else packing)


def _decode(module: str, parts: Parts, *, rounds_inputs: bool) -> CodedMatrix:
    """``qdata`` [O, I] e4m3 or int8, with scales and zero points [O, G]; or int8 [O, I / 2] in pairs of int4, the first
    in the low half, with both tables [G, O] and zero points that are weights."""
    data, scales, zeros = parts[DATA], parts[SCALE], parts.get(ZEROS)
    if data.dtype == torch.float8_e4m3fn:
        return decode_fp8(module, {"weight": data, "weight_scale": scales}, (FP8_BLOCK, FP8_BLOCK))
    if data.dtype not in (torch.int8, torch.uint8) or zeros is None:
        raise WeightError(f"{module}: torchao's values of type {data.dtype} are not read")
    if zeros.is_floating_point():
        scales, zeros = scales.t().float(), zeros.t().float()
        columns = 2 * data.shape[1]
        # two's complement plus 8
        return CodedMatrix(
            Code.INT, unpack_pairs(data) ^ 8, scales, columns // scales.shape[1], 8 - zeros / scales, bits=4
        )
    group = -(-data.shape[1] // scales.shape[1])
    if rounds_inputs and not zeros.any():
        return CodedMatrix(Code.INT, data, scales, group)
    # as unsigned codes: inputs are not to be rounded to 8 bits row by row
    bits = 4 if bool((data >= -8).all()) and bool((data < 8).all()) else 8
    middle = 1 << (bits - 1)
    return CodedMatrix(
        Code.INT, (data.to(torch.int16) + middle).to(torch.uint8), scales, group, zeros.float() + middle, bits=bits
    )
