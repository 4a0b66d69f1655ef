"""Checkpoints of optimum-quanto in safetensors: int8 and FP8 with a scale per output. Its integers of 4 and 2 bits do
not state their shape, and are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from headrace.base.errors import ConfigError, WeightError
from headrace.kernels.coded_linear.codes import Code, CodedMatrix
from headrace.layers.quantization.contract import Named, SchemeQuery
from headrace.layers.quantization.formats.assembly import Layout, Parts, assemble
from headrace.layers.quantization.formats.bitsandbytes import decode_int8
from headrace.layers.quantization.formats.scaled_floats import UNUSED

DATA, SCALE = "_data", "_scale"
TYPES = ("qint8", "qfloat8", "qfloat8_e4m3fn", "none")


class Quanto:
    """See `Scheme`. The configuration maps modules to their types. Raises `ConfigError` naming one that is not read."""

    def __init__(self, query: SchemeQuery):
        self._query = query
        for module, own in query.config.items():
            kind = own.get("weights") if isinstance(own, Mapping) else None
            if kind is not None and kind not in TYPES:
                raise ConfigError(
                    f"quantization (quanto): weights of type {kind} ({module}) are not read; known are "
                    f"{', '.join(TYPES)}. Take the original checkpoint, or quantise it to one of these",
                    param="quantization_config",
                )
        self._layout = Layout("quanto's tensors", frozenset({DATA, SCALE}), _decode, unused=UNUSED)

    def read(self, tensors: Iterable[Named]) -> Iterator[Named]:
        """See `Scheme`."""
        named = ((name.replace(".weight._", "._"), tensor) for name, tensor in tensors)
        return assemble(named, lambda module: self._layout, self._query)

    def finish(self, model: nn.Module) -> None:
        """Layers got their weights while these were read."""


def _decode(module: str, parts: Parts) -> CodedMatrix:
    """``_data`` [O, I], int8 or e4m3; ``_scale`` [O, 1] or one."""
    data, scales = parts[DATA], parts[SCALE].float().reshape(-1, 1)
    if data.dtype == torch.float8_e4m3fn:
        return CodedMatrix(Code.E4M3, data, scales.expand(data.shape[0], 1), data.shape[1])
    if data.dtype != torch.int8:
        raise WeightError(f"{module}: quanto's values of type {data.dtype} are not read")
    return decode_int8(module, {"weight": data, "SCB": scales.expand(data.shape[0], 1) * 127})
