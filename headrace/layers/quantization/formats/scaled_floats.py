"""Checkpoint formats with a ``weight`` of floats below 16 bits and a tensor of scales beside it: FP8 in blocks
(DeepSeek, Qwen), per output (FBGEMM, compressed-tensors) or with one scale, MXFP4, NVFP4.

Formats are recognised by dtypes and shapes. O outputs, I inputs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from headrace.base.errors import ConfigError, WeightError
from headrace.kernels.block_scaled import FP8_BLOCK, MXFP4_BLOCK
from headrace.kernels.coded_linear.codes import Code, CodedMatrix
from headrace.layers.quantization.contract import Named, SchemeQuery
from headrace.layers.quantization.formats.assembly import Layout, Parts, assemble

SCALE = "weight_scale"
SCALES = {"weight_scale_inv": SCALE, "scale_inv": SCALE, "scale": SCALE}
"""Other names of the scales; all of them multiply."""
UNUSED = frozenset({"input_scale", "input_scale_inv", "input_scale_ub", "activation_scale", "output_scale"})
"""Scales of activations, which products with plain activations do not need."""
STACK = re.compile(r"(?P<prefix>.*\.experts)\.(?P<matrix>gate_up_proj|down_proj)(_(?P<kind>\w*scale(_inv)?))?")
"""Tensors of all experts of a layer, as transformers saves those that it stacks."""
BYTES = (torch.int8, torch.uint8)
NVFP4_GROUP = 16
FP8_TYPES = (torch.float8_e4m3fn,)


class ScaledFp8:
    """8-bit floats (e4m3) with scales of blocks, of outputs or of the whole weight; see `Scheme`."""

    def __init__(self, query: SchemeQuery):
        stated = query.config.get("weight_block_size")
        self._query, self._block = query, read_block(stated, "weight_block_size")

    def read(self, tensors: Iterable[Named]) -> Iterator[Named]:
        """See `Scheme`."""
        block = self._block
        layout = Layout(
            "FP8", frozenset({"weight", SCALE}), lambda module, parts: decode_fp8(module, parts, block), unused=UNUSED,
            types=FP8_TYPES, aliases=SCALES
        )
        experts: set[str] = set()
        for name, tensor in assemble(_split_stacks(tensors, experts), lambda module: layout, self._query):
            module = name.removesuffix(".weight")
            yield module if module in experts else name, tensor

    def finish(self, model: nn.Module) -> None:
        """Layers got their weights while these were read."""


def _split_stacks(tensors: Iterable[Named], experts: set[str]) -> Iterator[Named]:
    """Stacked matrices [X, ...] and their scales as one module each, ``<prefix>.experts.<number>.gate_up_proj`` say,
    whose names are added to ``experts``. Plain stacks stay."""
    for name, tensor in tensors:
        stack = STACK.fullmatch(name)
        if stack is None or not tensor.dim() or (stack["kind"] is None and tensor.dtype not in FP8_TYPES):
            yield name, tensor
            continue
        for number, part in enumerate(tensor):
            module = f"{stack['prefix']}.{number}.{stack['matrix']}"
            experts.add(module)
            yield f"{module}.{stack['kind'] or 'weight'}", part


class Mxfp4:
    """4-bit floats, two to a byte, with a power of two per 32 inputs; see `Scheme`."""

    def __init__(self, query: SchemeQuery):
        self._query = query

    def read(self, tensors: Iterable[Named]) -> Iterator[Named]:
        """See `Scheme`."""
        layout = Layout("MXFP4", frozenset({"weight", SCALE}), decode_mxfp4, types=BYTES, aliases=SCALES)
        return assemble(tensors, lambda module: layout, self._query)

    def finish(self, model: nn.Module) -> None:
        """Layers got their weights while these were read."""


def read_block(stated: object, field: str) -> tuple[int, int]:
    """Outputs and inputs of a block, as ``field`` states them."""
    if stated is None:
        return FP8_BLOCK, FP8_BLOCK
    if not isinstance(stated, (list, tuple)) or len(stated) != 2 or any(type(n) is not int or n < 1 for n in stated):
        raise ConfigError(
            f"config.json: quantization_config: {field} must be two whole numbers above 0, got {stated!r}",
            param="quantization_config",
        )
    return stated[0], stated[1]


def decode_fp8(module: str, parts: Parts, block: tuple[int, int], group: int = MXFP4_BLOCK) -> CodedMatrix:
    """Scales may be [], [1], [O], [O, 1], [ceil(O / rows), ceil(I / group)] of ``block``, or [O, ceil(I / group)], by
    default those of MXFP8; blocks may be kept as [R, 1, C, 1]. Floats, or powers of two (e8m0, also as uint8)."""
    values, scales = parts["weight"], as_floats(parts[SCALE])
    rows, columns = values.shape
    if scales.dim() == 4:  # ModelOpt keeps the blocks' inner dims
        scales = scales[:, 0, :, 0]
    blocked = -(-rows // block[0]), -(-columns // block[1])
    if scales.dim() == 2 and tuple(scales.shape) == blocked:
        return CodedMatrix(Code.E4M3, values, scales, block[1], rows=block[0])
    if scales.numel() == 1:
        return CodedMatrix(Code.E4M3, values, scales.reshape(1, 1), columns, rows=rows)
    if tuple(scales.shape) in ((rows,), (rows, 1)):
        return CodedMatrix(Code.E4M3, values, scales.reshape(rows, 1), columns)
    if tuple(scales.shape) == (rows, -(-columns // group)):
        return CodedMatrix(Code.E4M3, values, scales, group)
    raise WeightError(
        f"{module}: FP8 {list(values.shape)} needs one scale, {rows} or {list(blocked)} (blocks of {block[0]} x "
        f"{block[1]}), the checkpoint has {list(scales.shape)}"
    )


def decode_mxfp4(module: str, parts: Parts) -> CodedMatrix:
    """Codes [O, I / 2], two to a byte, the first in its low half, and e8m0 scales [O, I / 32]."""
    codes, scales = parts["weight"], parts[SCALE]
    expected = codes.shape[0], 2 * codes.shape[1] // MXFP4_BLOCK
    if tuple(scales.shape) != expected:
        raise WeightError(
            f"{module}: MXFP4 {list(codes.shape)} needs scales {list(expected)}, the checkpoint has "
            f"{list(scales.shape)}"
        )
    return CodedMatrix(Code.E2M1, unpack_pairs(codes), as_floats(scales), MXFP4_BLOCK, bits=4)


def as_floats(scales: torch.Tensor) -> torch.Tensor:
    """Scales as float32 or 16-bit floats: e8m0 bytes, also those kept as uint8, are powers of two."""
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    return scales.float() if scales.dtype.itemsize == 1 else scales


def unpack_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Bytes [O, I / 2] of two codes, the first in the low half, to codes uint8 [O, I]."""
    codes = codes.view(torch.uint8)
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)


def decode_nvfp4(codes: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor) -> CodedMatrix:
    """Codes [O, I / 2] as MXFP4's, e4m3 ``scales`` [O, I / 16], and one float32 ``factor`` of all scales."""
    scales = scales.float() * factor.float().reshape(1, 1)
    return CodedMatrix(Code.E2M1, unpack_pairs(codes), scales, NVFP4_GROUP, bits=4)
