"""Checkpoints of bitsandbytes: nf4 and fp4 in blocks of the flattened weight, int8 with a scale per output."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from headrace.base.errors import WeightError
from headrace.kernels.coded_linear.codes import Code, CodedMatrix
from headrace.layers.quantization.contract import Named, SchemeQuery
from headrace.layers.quantization.formats.assembly import Layout, Parts, assemble

STATE, MAXIMA, MAP, INNER_MAXIMA, INNER_MAP = "state", "absmax", "quant_map", "nested_absmax", "nested_quant_map"
TABLE_TYPES = {"nf4": Code.NF4, "fp4": Code.FP4}


class BitsAndBytes:
    """See `Scheme`. Absolute maxima of blocks may be quantised themselves (double quantisation).

    The tensors of a module say whether it has 4 or 8 bits: configs written by hand leave ``load_in_4bit`` out.
    """

    def __init__(self, query: SchemeQuery):
        self._query = query
        inner = {INNER_MAXIMA, INNER_MAP} if query.config.get("bnb_4bit_use_double_quant") else set()
        self._four = Layout(
            "bitsandbytes 4 bits", frozenset({"weight", MAXIMA, MAP, STATE}) | inner, decode_4bit, types=(torch.uint8,)
        )
        self._eight = Layout(
            "bitsandbytes int8", frozenset({"weight", "SCB"}), decode_int8, unused=frozenset({"weight_format"}),
            types=(torch.int8,)
        )

    def read(self, tensors: Iterable[Named]) -> Iterator[Named]:
        """See `Scheme`."""
        storage = str(self._query.config.get("bnb_4bit_quant_storage") or "uint8").removeprefix("torch.")
        eights = set[str]()
        layouts = self._four, self._eight
        return assemble(_name_parts(tensors, storage, eights), lambda module: layouts[module in eights], self._query)

    def finish(self, model: nn.Module) -> None:
        """Layers got their weights while these were read."""


def _name_parts(tensors: Iterable[Named], storage: str, eights: set[str]) -> Iterator[Named]:
    """``<module>.weight.absmax`` as ``<module>.absmax``. Codes may be kept in the bytes of another dtype, ``storage``:
    in one column, which no plain weight has. Modules of 8 bits are added to ``eights`` before their first tensor."""
    for name, tensor in tensors:
        module, is_part, part = name.partition(".weight.")
        part = STATE if part.startswith("quant_state.") else part
        if str(tensor.dtype) == f"torch.{storage}" and name.endswith(".weight") and tensor.shape[1:] == (1,):
            tensor = tensor.view(torch.uint8)
        owner, _, kind = name.rpartition(".")
        if kind in ("SCB", "weight_format") or (kind == "weight" and tensor.dtype == torch.int8):
            eights.add(owner)
        yield (f"{module}.{part}" if is_part else name), tensor


def decode_4bit(module: str, parts: Parts) -> CodedMatrix | torch.Tensor:
    """``weight`` uint8 [O * I / 2, 1], the first of two codes in the high half; ``absmax`` of each block."""
    try:
        state = json.loads(bytes(int(char) for char in parts[STATE].to("cpu")))
        (rows, columns), block, code = state["shape"], state["blocksize"], TABLE_TYPES[state["quant_type"]]
    except (KeyError, TypeError, ValueError) as error:
        raise WeightError(
            f"{module}: bitsandbytes' quant_state does not give shape, blocksize and quant_type"
        ) from error
    packed, maxima = parts["weight"].flatten(), parts[MAXIMA]
    if INNER_MAXIMA in parts:
        inner = parts[INNER_MAXIMA].float().repeat_interleave(state["nested_blocksize"])[: maxima.numel()]
        maxima = parts[INNER_MAP].float()[maxima.int()] * inner + state["nested_offset"]
    elif not maxima.is_floating_point():
        raise WeightError(
            f"{module}: bitsandbytes' absmax is quantised itself; set bnb_4bit_use_double_quant to true in config.json"
        )
    codes = torch.stack((packed >> 4, packed & 15), dim=1).flatten()[: rows * columns]
    if columns % block == 0:
        return CodedMatrix(code, codes.view(rows, columns), maxima.view(rows, -1), block, bits=4)
    # blocks go on from one row into the next
    flat = CodedMatrix(code, codes.view(1, -1), maxima.view(1, -1), block, bits=4)
    return flat.dequantise(torch.float32).view(rows, columns)


def decode_int8(module: str, parts: Parts) -> CodedMatrix:
    """``weight`` int8 [O, I], ``SCB`` [O]: the largest magnitude of each output, which code 127 stands for."""
    # as unsigned codes: inputs are not to be rounded to 8 bits row by row
    codes, scales = parts["weight"].view(torch.uint8) ^ 128, parts["SCB"].float().view(-1, 1) / 127
    return CodedMatrix(Code.INT, codes, scales, codes.shape[1], torch.full_like(scales, 128))
