"""Checkpoints of NVIDIA's ModelOpt: FP8, NVFP4, MXFP4, mixed as they like; modules are recognised by their tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from headrace.base.errors import ConfigError
from headrace.kernels.coded_linear.codes import CodedMatrix
from headrace.layers.quantization.contract import Named, SchemeQuery
from headrace.layers.quantization.formats.assembly import Layout, Parts, assemble
from headrace.layers.quantization.formats.scaled_floats import (
    SCALE,
    UNUSED,
    ScaledFp8,
    decode_mxfp4,
    decode_nvfp4,
)

ALGORITHMS = (
    "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION", "MXFP4", "MXFP8"
)
FACTOR = "weight_scale_2"


class ModelOpt:
    """See `Scheme`. Raises `ConfigError` for algorithms that scale activations channel by channel (AWQ) or that are
    others than `ALGORITHMS`."""

    def __init__(self, query: SchemeQuery):
        section = query.config.get("quantization") or query.config
        algorithms = {section.get("quant_algo")} | {
            layer.get("quant_algo") for layer in (section.get("quantized_layers") or {}).values()
        }
        stated = sorted(str(algorithm).upper() for algorithm in algorithms - {None})
        for algorithm in stated:
            if algorithm not in ALGORITHMS:
                raise ConfigError(
                    f"quantization_config: ModelOpt's quant_algo {algorithm} is not read; known are "
                    f"{', '.join(ALGORITHMS)}. Export the model with one of these, or take the original checkpoint",
                    param="quantization_config",
                )
        self._query, self._fp8 = query, ScaledFp8(query)
        factor = set() if stated == ["MXFP4"] else {FACTOR}
        self._four_bits = Layout(
            "NVFP4 or MXFP4", frozenset({"weight", SCALE, *factor}), _decode, unused=UNUSED, types=(torch.uint8,)
        )

    def read(self, tensors: Iterable[Named]) -> Iterable[Named]:
        """See `Scheme`."""
        return assemble(self._fp8.read(tensors), lambda module: self._four_bits, self._query)

    def finish(self, model: nn.Module) -> None:
        """Layers got their weights while these were read."""


def _decode(module: str, parts: Parts) -> CodedMatrix:
    if parts[SCALE].dtype == torch.uint8:
        return decode_mxfp4(module, parts)
    return decode_nvfp4(parts["weight"], parts[SCALE], parts[FACTOR])
