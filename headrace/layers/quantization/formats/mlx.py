"""Checkpoints of MLX, and of transformers' Metal quantiser, which packs alike: integers in groups with a scale and a
bias, MXFP4, MXFP8 and NVFP4, all in 32-bit words. O outputs, I inputs, G groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from headrace.base.errors import ConfigError, WeightError
from headrace.kernels.coded_linear.codes import Code, CodedMatrix, unpack_bits
from headrace.layers.quantization.contract import Named, SchemeQuery
from headrace.layers.quantization.formats.assembly import Layout, Parts, assemble
from headrace.layers.quantization.formats.scaled_floats import as_floats

SCALES, BIASES = "scales", "biases"
BITS = (2, 3, 4, 5, 6, 8)
MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")
STACK = ".switch_mlp."
"""Of the names of stacked experts, [X, O, I]."""


class Mlx:
    """See `Scheme`. A module may have a group size and a mode of its own, under its name in the configuration. Raises
    `ConfigError` naming a mode that is not read."""

    def __init__(self, query: SchemeQuery):
        self._query, self._find = query, cache(self._find_layout)
        for own in (query.config, *query.config.values()):
            if isinstance(own, Mapping):
                _read_form(own)

    def read(self, tensors: Iterable[Named]) -> Iterator[Named]:
        """See `Scheme`."""
        return assemble(_split_stacks(tensors), self._find, self._query)

    def finish(self, model: nn.Module) -> None:
        """Layers got their weights while these were read."""

    def _find_layout(self, module: str) -> Layout:
        own = self._query.config.get(module)
        mode, group = _read_form({**self._query.config, **own} if isinstance(own, Mapping) else self._query.config)
        tables = {SCALES, BIASES} if mode == "affine" else {SCALES}
        return Layout(
            f"MLX {mode}", frozenset({"weight", *tables}), lambda module, parts: _decode(module, parts, mode, group),
            types=(torch.uint32,), aliases={"qbiases": BIASES}
        )


def _read_form(config: Mapping[str, Any]) -> tuple[str, int]:
    """Mode and inputs of a group."""
    mode, group = str(config.get("mode") or "affine"), config.get("group_size") or 64
    if mode not in MODES or type(group) is not int or group < 1:
        raise ConfigError(
            f"config.json: quantization (MLX): mode {mode!r} with group_size {group!r} is not read; known are "
            f"{', '.join(MODES)} with whole numbers above 0. Take the original checkpoint, or convert it with one of "
            "these", param="quantization_config",
        )
    return mode, group


def _split_stacks(tensors: Iterable[Named]) -> Iterator[Named]:
    """Stacked experts as one module each, under the names that other checkpoints have for them."""
    for name, tensor in tensors:
        before, is_stack, after = name.partition(STACK)
        if is_stack:
            yield from ((f"{before}.experts.{index}.{after}", part) for index, part in enumerate(tensor))
        else:
            yield name, tensor


def _decode(module: str, parts: Parts, mode: str, group: int) -> CodedMatrix:
    """``weight`` uint32 [O, I * b / 32], the first code in the lowest bits; ``scales`` and ``biases`` [O, G]: a weight
    is code * scale + bias."""
    words, scales = parts["weight"].view(torch.int32), parts[SCALES]
    columns = scales.shape[1] * group
    bits, rest = divmod(words.shape[1] * 32, columns)
    if scales.shape[0] != words.shape[0] or rest or bits not in BITS:
        raise WeightError(
            f"{module}: MLX words {list(words.shape)} and scales {list(scales.shape)} of groups of {group} inputs do "
            f"not make codes of {', '.join(map(str, BITS))} bits"
        )
    codes = unpack_bits(words, bits, columns)
    if mode == "affine":
        scales = scales.float()
        zeros = torch.where(scales == 0, 0.0, -parts[BIASES].float() / scales)
        return CodedMatrix(Code.INT, codes, scales, group, zeros, bits=bits)
    if bits == 8:
        return CodedMatrix(Code.E4M3, codes.view(torch.float8_e4m3fn), as_floats(scales), group)
    # NVFP4's scales are e4m3, kept as bytes like the powers of two of the others
    scales = scales.view(torch.float8_e4m3fn) if mode == "nvfp4" else scales
    return CodedMatrix(Code.E2M1, codes, as_floats(scales), group, bits=4)
