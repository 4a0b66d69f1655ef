"""Checkpoints in the format of the compressed-tensors package, which llm-compressor writes: groups of modules, each
with a format of its own. O outputs, I inputs, G groups of inputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from headrace.base.errors import ConfigError, WeightError
from headrace.kernels.block_scaled import MXFP4_BLOCK
from headrace.kernels.coded_linear.codes import Code, CodedMatrix, unpack_bits
from headrace.layers.quantization.contract import Named, SchemeQuery
from headrace.layers.quantization.formats.assembly import Layout, Parts, assemble
from headrace.layers.quantization.formats.scaled_floats import (
    FP8_TYPES,
    SCALE,
    UNUSED,
    as_floats,
    decode_fp8,
    decode_nvfp4,
    read_block,
    unpack_pairs,
)

PACKED, ZEROS, GROUPS, SHAPE, FACTOR = (
    "weight_packed", "weight_zero_point", "weight_g_idx", "weight_shape", "weight_global_scale"
)
IGNORED = UNUSED | {"input_zero_point", "input_global_scale", "output_zero_point"}
FORMATS = (
    "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "mxfp8-quantized", "mxfp4-pack-quantized",
    "nvfp4-pack-quantized", "dense",
)
GROUP_ORDERS = ("group", "dynamic", "true")
"""Values of ``actorder`` with which inputs name their group; ``weight`` and ``static`` change the writing alone."""


@dataclass(frozen=True)
class Weights:
    """What a config group says of weights: ``bits``, ``kind`` (int or float), inputs of a ``group`` (0: see the
    scales' shape), ``block``, whether zero points (``is_symmetric`` False) or groups by input (``has_order``) are
    stored."""

    format: str
    bits: int
    kind: str
    group: int
    block: tuple[int, int]
    is_symmetric: bool
    has_order: bool


class CompressedTensors:
    """See `Scheme`. Raises `ConfigError` naming a format, a sparsity or a transform that is not read."""

    def __init__(self, query: SchemeQuery):
        config = query.config
        self._query = query
        _check_whole(config)
        groups = config.get("config_groups")
        if not isinstance(groups, dict):
            raise _refuse(f"config_groups must be an object, got {groups!r}")
        self._targets = [
            (str(target), _make_layout(read_weights(group, str(config.get("format") or ""))))
            for group in groups.values() if group.get("weights") is not None for target in group.get("targets") or ()
        ]
        for target, _ in self._targets:
            if target.startswith("re:"):
                re.compile(target[3:])  # raises here, and not at the first tensor
        self._find = cache(self._find_layout)

    def read(self, tensors: Iterable[Named]) -> Iterator[Named]:
        """See `Scheme`."""
        return assemble(tensors, self._find, self._query)

    def finish(self, model: nn.Module) -> None:
        """Layers got their weights while these were read."""

    def _find_layout(self, module: str) -> Layout | None:
        """The layout of the group that names the module, a pattern that it matches, or its class, in this order. Of an
        ignored module the weight is plain, which its dtype tells. Classes are known to the writer alone: embeddings are
        told by their names, all others are linear layers."""
        named = (layout for target, layout in self._targets if target == module)
        matching = (
            layout for target, layout in self._targets if target.startswith("re:") and re.match(target[3:], module)
        )
        is_embedding = "embed" in module.rpartition(".")[2]
        classes = (
            layout for target, layout in self._targets
            if target[:1].isupper() and (target == "Embedding") == is_embedding
        )
        return next(named, None) or next(matching, None) or next(classes, None)


def _refuse(what: str) -> ConfigError:
    return ConfigError(
        f"config.json: quantization_config (compressed-tensors): {what}. Take the original checkpoint, or compress it "
        "without that", param="quantization_config",
    )


def _check_whole(config: Mapping[str, Any]) -> None:
    sparsity = (config.get("sparsity_config") or {}).get("format") or "dense"
    if sparsity != "dense":
        raise _refuse(f"sparse weights ({sparsity}) are not read")
    transforms = (config.get("transform_config") or {}).get("config_groups")
    if transforms:
        raise _refuse(f"transforms of activations ({', '.join(map(str, transforms))}) are not computed")


def read_weights(group: Mapping[str, Any], whole_format: str) -> Weights:
    """The weights of a config group; ``whole_format`` is that of the file, which a group may override."""
    stated = group["weights"]
    bits, kind = stated.get("num_bits", 8), str(stated.get("type", "int"))
    block = stated.get("block_structure")
    if isinstance(block, str):  # "128x128" in older files
        block = [int(n) for n in block.split("x")]
    form = str(group.get("format") or whole_format)
    if form in ("", "mixed-precision"):
        integers = "int-quantized" if group.get("input_activations") else "pack-quantized"
        form = "float-quantized" if kind == "float" else integers
    if form not in FORMATS:
        raise _refuse(f"format {form!r} is not read; known are {', '.join(FORMATS)}")
    if type(bits) is not int or not 1 <= bits <= 8 or kind not in ("int", "float"):
        raise _refuse(f"weights of {bits} bits of type {kind} are not read")
    if form in ("float-quantized", "naive-quantized") and kind == "float" and bits != 8:
        raise _refuse(f"{form} floats of {bits} bits are not read")
    size = stated.get("group_size")
    return Weights(
        form, bits, kind, size if type(size) is int and size > 0 else 0,
        read_block(block, "block_structure"),
        stated.get("symmetric", True) is not False, str(stated.get("actorder")).lower() in GROUP_ORDERS
    )


def _make_layout(weights: Weights) -> Layout | None:
    make: dict[str, Callable[[Weights], Layout | None]] = {
        "pack-quantized": _pack_layout, "nvfp4-pack-quantized": _nvfp4_layout, "mxfp4-pack-quantized": _mxfp4_layout,
        "mxfp8-quantized": _float_layout, "float-quantized": _float_layout, "dense": lambda weights: None,
    }
    return make.get(weights.format, _float_layout if weights.kind == "float" else _int_layout)(weights)


def _float_layout(weights: Weights) -> Layout:
    decode = partial(decode_fp8, block=weights.block, group=weights.group or MXFP4_BLOCK)
    return Layout(
        weights.format, frozenset({"weight", SCALE}), decode, unused=IGNORED | {ZEROS}, types=FP8_TYPES
    )


def _extras(weights: Weights) -> frozenset[str]:
    """The tensors that integers have beside codes and scales."""
    return frozenset(({ZEROS} if not weights.is_symmetric else set()) | ({GROUPS} if weights.has_order else set()))


def _int_layout(weights: Weights) -> Layout:
    extras = _extras(weights)
    return Layout(
        weights.format, frozenset({"weight", SCALE}) | extras, partial(_decode_int, weights),
        unused=(IGNORED | {ZEROS, GROUPS}) - extras, types=(torch.int8,)
    )


def _pack_layout(weights: Weights) -> Layout:
    extras = _extras(weights)
    return Layout(
        weights.format, frozenset({PACKED, SCALE, SHAPE}) | extras, partial(_decode_packed, weights),
        unused=(IGNORED | {ZEROS, GROUPS}) - extras
    )


def _nvfp4_layout(weights: Weights) -> Layout:
    return Layout(
        weights.format, frozenset({PACKED, SCALE, FACTOR}),
        # the global scale divides
        lambda module, parts: decode_nvfp4(parts[PACKED], parts[SCALE], 1 / parts[FACTOR].float()), unused=IGNORED
    )


def _mxfp4_layout(weights: Weights) -> Layout:
    return Layout(weights.format, frozenset({PACKED, SCALE}), _decode_mxfp4, unused=IGNORED)


def _decode_mxfp4(module: str, parts: Parts) -> CodedMatrix:
    return CodedMatrix(Code.E2M1, unpack_pairs(parts[PACKED]), as_floats(parts[SCALE]), MXFP4_BLOCK, bits=4)


def _decode_int(weights: Weights, module: str, parts: Parts) -> CodedMatrix:
    """``weight`` int8 [O, I]; scales [1], [O, 1] or [O, G]; zero points like scales, in the codes' range."""
    return _with_tables(weights, module, parts["weight"], parts, parts.get(ZEROS))


def _decode_packed(weights: Weights, module: str, parts: Parts) -> CodedMatrix:
    """``weight_packed`` int32 [O, W]: codes plus 2 ** (bits - 1), the first in the lowest bits; zero points likewise,
    along outputs, [W', G]."""
    rows, columns = (int(n) for n in parts[SHAPE])
    codes, middle = _unpack(parts[PACKED], weights.bits, columns), 1 << (weights.bits - 1)
    if codes.shape[0] != rows:
        raise WeightError(f"{module}: weight_shape says {rows} outputs, and weight_packed has {codes.shape[0]}")
    zeros: torch.Tensor
    if ZEROS in parts:
        zeros = _unpack(parts[ZEROS].t(), weights.bits, rows).t()
    else:
        zeros = torch.full_like(parts[SCALE].reshape(-1, 1) if parts[SCALE].dim() < 2 else parts[SCALE], middle)
    return _with_tables(weights, module, codes, parts, zeros)


def _unpack(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Codes uint8 [R, count]. A word holds whole codes in older files, where 32 is no multiple of the bits."""
    whole = 32 // bits
    if words.shape[1] == -(-count * bits // 32):
        return unpack_bits(words, bits, count)
    if words.shape[1] != -(-count // whole):
        raise ValueError(f"{count} codes of {bits} bits do not take {words.shape[1]} words")
    shifts = torch.arange(whole, device=words.device) * bits
    codes = (words.unsqueeze(2) >> shifts) & ((1 << bits) - 1)
    return codes.flatten(1)[:, :count].to(torch.uint8)


def _with_tables(
    weights: Weights, module: str, codes: torch.Tensor, parts: Parts, zeros: torch.Tensor | None
) -> CodedMatrix:
    (rows, columns), scales = codes.shape, parts[SCALE]
    scales = scales.reshape(-1, 1) if scales.dim() < 2 else scales
    group = columns if scales.shape[1] == 1 else weights.group or columns // scales.shape[1]
    if scales.shape[0] not in (1, rows) or scales.shape[1] not in (1, -(-columns // group)):
        raise WeightError(
            f"{module}: {weights.format} {[rows, columns]} needs scales {[rows, -(-columns // group)]}, the checkpoint "
            f"has {list(scales.shape)}"
        )
    zeros = None if zeros is None else (zeros.reshape(scales.shape) if zeros.dim() < 2 else zeros)
    ids = parts.get(GROUPS)
    return CodedMatrix(
        Code.INT, codes, scales, group, zeros, rows if scales.shape[0] == 1 else 1,
        None if ids is None or bool((ids < 0).any()) else ids.long(), weights.bits
    )
