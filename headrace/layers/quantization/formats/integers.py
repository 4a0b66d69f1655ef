"""Checkpoint formats of integers in 32-bit words: GPTQ, AWQ and AutoRound, which writes these and others. Bits, groups
and zero points are told by the tensors' shapes, so that layers may differ in them. O outputs, I inputs, G groups, b
bits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from headrace.base.errors import ConfigError, WeightError
from headrace.kernels.coded_linear.codes import Code, CodedMatrix, unpack_bits
from headrace.layers.quantization.contract import Named, Scheme, SchemeQuery
from headrace.layers.quantization.formats.assembly import Layout, Parts, assemble
from headrace.layers.quantization.formats.compressed_tensors import CompressedTensors
from headrace.layers.quantization.formats.scaled_floats import ScaledFp8

CODES, ZEROS, SCALES, ORDER = "qweight", "qzeros", "scales", "g_idx"
BITS = (2, 3, 4, 8)
AWQ_BITS = 4
OWN_PACKINGS = ("auto_round", "auto_round:exllamav2", "auto_round:tritonv2", "auto_round:gptqmodel")
"""AutoRound's ``packing_format`` that store zero points as they are; others that name GPTQ store them less 1."""
AUTO_ROUND_FORMS = {
    ("mx_fp", 4): "mxfp4-pack-quantized", ("mx_fp", 8): "mxfp8-quantized", ("nv_fp", 4): "nvfp4-pack-quantized",
    ("fp", 8): "float-quantized",
}
"""Formats of compressed-tensors that AutoRound writes, by its ``data_type`` and bits."""
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which nibble of a word holds each of its eight outputs: they are packed in the order 0, 2, 4, 6, 1, 3, 5, 7."""


class Gptq:
    """See `Scheme`. ``checkpoint_format`` gptq stores zero points less 1, gptq_v2 as they are."""

    def __init__(self, query: SchemeQuery):
        form = str(query.config.get("checkpoint_format") or query.config.get("format") or query.stored).lower()
        if form not in ("gptq", "gptq_v2"):
            raise _refuse("gptq", f"checkpoint_format {form!r}", "gptq, gptq_v2")
        words = str(query.config.get("pack_dtype") or "int32").removeprefix("torch.")
        if words != "int32":
            raise _refuse("gptq", f"pack_dtype {words!r}", "int32")
        self._query, self._offset, self._bits = query, 0 if form == "gptq_v2" else 1, query.config.get("bits")
        self._groups = _list_groups(query.config)

    def read(self, tensors: Iterable[Named]) -> Iterator[Named]:
        """See `Scheme`."""
        decode = partial(decode_gptq, offset=self._offset, stated_bits=self._bits, stated_groups=self._groups)
        layout = Layout("GPTQ", frozenset({CODES, ZEROS, SCALES}), decode, optional=frozenset({ORDER}))
        return assemble(tensors, lambda module: layout, self._query)

    def finish(self, model: nn.Module) -> None:
        """Layers got their weights while these were read."""


class Awq:
    """See `Scheme`; ``version`` gemm or gemv."""

    def __init__(self, query: SchemeQuery):
        version = str(query.config.get("version") or query.config.get("format") or "gemm").lower()
        bits = query.config.get("bits") or query.config.get("w_bit") or AWQ_BITS
        if version not in ("gemm", "gemv"):
            raise _refuse("awq", f"version {version!r}", "gemm, gemv")
        if bits != AWQ_BITS:
            raise _refuse("awq", f"bits {bits!r}", str(AWQ_BITS))
        group = query.config.get("group_size") or query.config.get("q_group_size") or 128
        if type(group) is not int:
            raise _refuse("awq", f"group_size {group!r}", "whole numbers")
        self._query, self._group, self._is_gemv = query, group, version == "gemv"

    def read(self, tensors: Iterable[Named]) -> Iterator[Named]:
        """See `Scheme`."""
        group = self._group
        layout = Layout(
            "AWQ", frozenset({CODES, ZEROS, SCALES}),
            (lambda module, parts: decode_awq_gemv(module, parts, group)) if self._is_gemv else decode_awq
        )
        return assemble(tensors, lambda module: layout, self._query)

    def finish(self, model: nn.Module) -> None:
        """Layers got their weights while these were read."""


class AutoRound:
    """See `Scheme`. ``packing_format`` (``backend`` in older files) names whose packing it is."""

    def __init__(self, query: SchemeQuery):
        form = str(query.config.get("packing_format") or query.config.get("backend") or "auto_round:auto_gptq").lower()
        self._inner: Scheme
        if "awq" in form:
            self._inner = Awq(_as_method(query, "awq"))
        elif form in OWN_PACKINGS:
            self._inner = Gptq(_as_method(query, "gptq_v2"))
        elif "gptq" in form or form == "auto":
            self._inner = Gptq(_as_method(query, "gptq"))
        elif form.endswith((":fp8", ":fp8_static")):
            self._inner = ScaledFp8(query)
        elif form.endswith(":llm_compressor"):
            self._inner = CompressedTensors(replace(query, config=_as_groups(query.config)))
        else:
            known = (
                f"auto_round:auto_gptq, :auto_awq, :fp8, :fp8_static, :llm_compressor and {', '.join(OWN_PACKINGS)}"
            )
            raise _refuse("auto-round", f"packing_format {form!r}", known)

    def read(self, tensors: Iterable[Named]) -> Iterable[Named]:
        """See `Scheme`."""
        return self._inner.read(tensors)

    def finish(self, model: nn.Module) -> None:
        """Layers got their weights while these were read."""


def _as_groups(config: Mapping[str, Any]) -> dict[str, Any]:
    """AutoRound's configuration as that of compressed-tensors: a group for each entry of ``extra_config``, whose keys
    are names or patterns, and one for all other modules. Modules of 16 bits are told by their dtype."""
    whole = {key: config.get(key) for key in ("bits", "data_type")}
    groups = [
        _as_group({**whole, **own}, name if re.fullmatch(r"[\w.]+", name) else f"re:{name}")
        for name, own in (config.get("extra_config") or {}).items()
    ]
    groups = [*groups, _as_group(whole, "Linear")]
    return {"config_groups": {str(number): group for number, group in enumerate(groups) if group is not None}}


def _as_group(own: Mapping[str, Any], target: str) -> dict[str, Any] | None:
    kind, bits = str(own["data_type"]), own["bits"]
    if bits == 16:
        return None
    form = AUTO_ROUND_FORMS.get((kind, bits))
    if form is None:
        known = ", ".join(f"{kind} of {bits} bits" for kind, bits in AUTO_ROUND_FORMS)
        raise _refuse("auto-round", f"data_type {kind} of {bits} bits in the packing of llm_compressor", known)
    return {"targets": [target], "format": form, "weights": {"num_bits": bits, "type": "float"}}


def _as_method(query: SchemeQuery, method: str) -> SchemeQuery:
    names = ("bits", "group_size", "extra_config")
    config = {"checkpoint_format": method} if method.startswith("gptq") else {}
    return replace(query, stored=method, config={**config, **{name: query.config.get(name) for name in names}})


def _refuse(method: str, what: str, known: str) -> ConfigError:
    return ConfigError(
        f"config.json: quantization_config ({method}): {what} is not read; known are {known}. Take a checkpoint in one "
        "of these, or the original one", param="quantization_config",
    )


def _list_groups(config: Mapping[str, Any]) -> list[int]:
    """The sizes of groups that configurations of GPTQ and AutoRound state, first of all layers, then of single ones."""
    own = [rule for name in ("dynamic", "extra_config") for rule in (config.get(name) or {}).values()]
    sizes = [stated.get("group_size") for stated in (config, *own) if isinstance(stated, dict)]
    return [size for size in sizes if type(size) is int and size > 0]


def decode_gptq(
    module: str, parts: Parts, *, offset: int, stated_bits: object = None, stated_groups: Sequence[int] = ()
) -> CodedMatrix:
    """``qweight`` int32 [I * b / 32, O], codes of an output one above the other; ``qzeros`` int32 [G, O * b / 32], less
    ``offset``; ``scales`` [G, O]; ``g_idx`` int32 [I]: each input's group. ``stated_bits`` and the first of
    ``stated_groups`` that fits count where the shapes allow several: few outputs may fill as many words with 3 bits as
    with 4, and the last group may be smaller."""
    words, scales = parts[CODES], parts[SCALES]
    num_groups, rows = scales.shape
    possible = [bits for bits in BITS if -(-rows * bits // 32) == parts[ZEROS].shape[1]]
    bits = stated_bits if isinstance(stated_bits, int) and stated_bits in possible else max(possible, default=0)
    if not bits or words.shape[1] != rows or parts[ZEROS].shape[0] != num_groups:
        raise WeightError(
            f"{module}: GPTQ with scales {list(scales.shape)} needs {rows} outputs in 2, 3, 4 or 8 bits; qweight is "
            f"{list(words.shape)}, qzeros {list(parts[ZEROS].shape)}"
        )
    columns = words.shape[0] * 32 // bits
    zeros = unpack_bits(parts[ZEROS], bits, rows) + offset & (1 << bits) - 1
    even = -(-columns // num_groups)
    group = next((size for size in stated_groups if -(-columns // size) == num_groups), even)
    ids = parts.get(ORDER)
    if ids is not None:
        if ids.shape != (columns,) or (ids < 0).any() or (ids >= num_groups).any():
            raise WeightError(
                f"{module}: GPTQ's g_idx does not give each of {columns} inputs one of {num_groups} groups"
            )
        ids = ids.long()
        group = int((ids == ids[0]).sum())
        ids = None if torch.equal(ids, torch.arange(columns, device=ids.device) // group) else ids
    return CodedMatrix(
        Code.INT, unpack_bits(words.t(), bits, columns), scales.t(), group, zeros.t(), group_ids=ids, bits=bits
    )


def decode_awq(module: str, parts: Parts) -> CodedMatrix:
    """``qweight`` int32 [I, O / 8] and ``qzeros`` int32 [G, O / 8], eight outputs a word (`AWQ_PLACES`); ``scales``
    [G, O]."""
    words, scales = parts[CODES], parts[SCALES]
    num_groups, rows = scales.shape
    columns = words.shape[0]
    if words.shape[1] * 8 != rows or tuple(parts[ZEROS].shape) != (num_groups, rows // 8) or columns % num_groups:
        raise WeightError(
            f"{module}: AWQ's gemm packing with scales {list(scales.shape)} needs qweight [inputs, {rows // 8}]; it is "
            f"{list(words.shape)}, qzeros {list(parts[ZEROS].shape)}"
        )
    codes, zeros = (_awq_outputs(table) for table in (words, parts[ZEROS]))
    return CodedMatrix(Code.INT, codes.t(), scales.t(), columns // num_groups, zeros.t(), bits=AWQ_BITS)


def _awq_outputs(words: torch.Tensor) -> torch.Tensor:
    """Words int32 [n, O / 8] to codes uint8 [n, O]."""
    codes = unpack_bits(words, AWQ_BITS, 8 * words.shape[1])
    return codes.unflatten(1, (-1, 8))[:, :, list(AWQ_PLACES)].flatten(1)


def decode_awq_gemv(module: str, parts: Parts, group: int) -> CodedMatrix:
    """``qweight`` int32 [O, I / 8] and ``qzeros`` int32 [O, W], the first code in the lowest bits; ``scales`` [O, 8 *
    W]. Both tables are padded beyond the I / ``group`` groups."""
    words, scales = parts[CODES], parts[SCALES]
    rows, columns = words.shape[0], words.shape[1] * 8
    num_groups = -(-columns // group) if group > 0 else 1
    if scales.shape[0] != rows or scales.shape[1] < num_groups or parts[ZEROS].shape[1] * 8 < num_groups:
        raise WeightError(
            f"{module}: AWQ's gemv packing of {[rows, columns]} in groups of {group} needs scales [{rows}, "
            f"{num_groups} or more], the checkpoint has {list(scales.shape)}"
        )
    zeros = unpack_bits(parts[ZEROS], AWQ_BITS, num_groups)
    return CodedMatrix(
        Code.INT, unpack_bits(words, AWQ_BITS, columns), scales[:, :num_groups], group if group > 0 else columns, zeros,
        bits=AWQ_BITS
    )
