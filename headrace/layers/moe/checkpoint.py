"""Splits stacked expert tensors of checkpoints into one tensor per expert and matrix, named as in the tables of names:
``<prefix>.experts.<number>.gate_proj.weight`` and so on. Tensors may come in any order; results are views if possible.

X experts, F expert intermediate size, D hidden size, O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch

from headrace.base.errors import WeightError
from headrace.kernels.block_scaled import MXFP4_BLOCK, dequantise_mxfp4
from headrace.kernels.coded_linear.codes import NOT_FINITE
from headrace.kernels.packed_linear.blocks import WeightBlocks
from headrace.layers.quantization.blocks import BlockTensor, CodedTensor
from headrace.parallel.cut import Cut
from headrace.parallel.share import Share

MXFP4_NAN = 255
"""The scale that is no number."""
Named = tuple[str, torch.Tensor]
Split = Callable[[torch.Tensor], dict[str, torch.Tensor]]
"""A stacked tensor [X, ...] to the stacked tensors [X, ...] of single matrices, by their names."""


def _split_halves(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    gate, up = tensor.tensor_split(2, dim=1)
    return {"gate_proj.weight": gate, "up_proj.weight": up}


def separate_halves(tensor: torch.Tensor, *, dim: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Even and odd indices of a dim, for formats with alternating gate and up rows: views. Raises `ValueError` for an
    odd size."""
    if tensor.shape[dim] % 2:
        raise ValueError(f"a dim of {tensor.shape[dim]} has no halves")
    even, odd = tensor.unflatten(dim, (-1, 2)).unbind(dim + 1)
    return even, odd


def _split_turns(tensor: torch.Tensor, kind: str) -> dict[str, torch.Tensor]:
    gate, up = separate_halves(tensor)
    return {f"gate_proj.{kind}": gate, f"up_proj.{kind}": up}


def _keep(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: tensor}


_MATRICES: dict[str, Split] = {
    own: partial(_keep, own)
    for own in (f"{matrix}_proj.{kind}" for matrix in ("gate", "up", "down") for kind in ("weight", "bias"))
}
"""``gate_proj.weight`` [X, F, D] and so on, as in GGUF files."""

_GATE_FIRST: dict[str, Split] = {
    **_MATRICES, "gate_up_proj": _split_halves, "down_proj": lambda tensor: {"down_proj.weight": tensor},
}
STACKED_EXPERTS: dict[str, dict[str, Split]] = {
    # gate_up_proj [X, 2F, D], the gate's rows first; down_proj [X, D, F]
    "gate_first": _GATE_FIRST,
    # the same after `_turn`
    "transposed": _GATE_FIRST,
    # gate_up_proj [X, D, 2F], columns of gate and up alternating; down_proj [X, F, D]; biases likewise
    "alternating": {
        **_MATRICES,
        "gate_up_proj": lambda tensor: _split_turns(tensor.transpose(1, 2), "weight"),
        "gate_up_proj_bias": lambda tensor: _split_turns(tensor, "bias"),
        "down_proj": lambda tensor: {"down_proj.weight": tensor.transpose(1, 2)},
        "down_proj_bias": lambda tensor: {"down_proj.bias": tensor},
    },
}
"""By `CheckpointNames.stacked_experts`: the suffix after ``.experts.`` in a stacked tensor's name, and how to split it.
A split does not depend on the number of experts."""


def _turn(tensor: torch.Tensor, last: str, hidden_size: int) -> torch.Tensor:
    """Stacked matrices with outputs before inputs. Published files have inputs first, [X, D, 2F] and [X, F, D], those
    that transformers has saved [X, 2F, D] and [X, D, F]; where both have one shape, it is the former."""
    has_inputs_first = tensor.shape[1 if last == "gate_up_proj" else 2] == hidden_size
    return tensor.transpose(1, 2) if has_inputs_first else tensor


def unstack_experts(
    tensors: Iterable[Named], stacked_experts: str, hidden_size: int, *, keeps_blocks: bool = False
) -> Iterator[Named]:
    """Split stacked expert tensors, see `STACKED_EXPERTS`; others pass.

    A stacked tensor [X, I, O] may come in MXFP4 as ``<name>_blocks`` [X, O, I / 32, 16] and ``<name>_scales`` [X, O,
    I / 32]. They are dequantised to bfloat16 without loss, an expert at a time; with ``keeps_blocks`` they are yielded
    as `BlockTensor`. Single experts may come so too, as ``<prefix>.experts.<number>.<last>_blocks`` without X, and
    of stacks that a scheme took apart, as ``<prefix>.experts.<number>.<last>``.
    """
    splits, waiting = STACKED_EXPERTS[stacked_experts], dict[str, dict[str, torch.Tensor]]()
    for name, tensor in tensors:
        prefix, _, last = name.rpartition(".experts.")
        if last in splits:
            yield from _number(prefix, _split(name, tensor, last, stacked_experts, hidden_size), first=0)
            continue
        number, _, matrix = last.partition(".")
        if matrix in ("gate_up_proj", "down_proj") and number.isdecimal():
            if isinstance(tensor, CodedTensor) and stacked_experts == "gate_first":
                yield from ((f"{prefix}.experts.{number}.{own}", part) for own, part in _split_codes(matrix, tensor))
                continue
            own = _split(name, tensor[None], matrix, stacked_experts, hidden_size)
            yield from _number(prefix, own, first=int(number))
            continue
        codes, stem = find_codes(name, stacked_experts), name.rpartition("_")[0]
        if codes is None:
            yield name, tensor
            continue
        prefix, last, kind = codes
        number = stem.removeprefix(f"{prefix}.experts.").removesuffix(last)
        tensor = tensor[None] if number else tensor
        halves = waiting.setdefault(stem, {})
        if not halves:
            halves[kind] = tensor.clone()  # a tensor is valid only until the next one is requested
            continue
        halves = {kind: tensor, **waiting.pop(stem)}  # blocks and scales, in whichever order they came
        _check_codes(stem, halves["blocks"], halves["scales"])
        first = int(number.rstrip(".") or 0)
        for expert, (blocks, scales) in enumerate(zip(halves["blocks"], halves["scales"], strict=True), first):
            kept = _keep_blocks(splits[last], blocks, scales) if keeps_blocks else None
            parts = splits[last](_dequantise(blocks, scales)) if kept is None else kept
            yield from _number(prefix, parts, first=expert)
    # unpaired halves go on under their own names, for the loader to report as unexpected
    yield from ((f"{stem}_{kind}", tensor) for stem, halves in waiting.items() for kind, tensor in halves.items())


def find_codes(name: str, stacked_experts: str) -> tuple[str, str, str] | None:
    """Of a tensor of MXFP4 codes the prefix, the stacked tensor's own name and ``blocks`` or ``scales``; None for other
    tensors. The name may have an expert's number."""
    stem, _, kind = name.rpartition("_")
    prefix, _, rest = stem.rpartition(".experts.")
    number, _, last = rest.rpartition(".")
    is_codes = kind in ("blocks", "scales") and last in STACKED_EXPERTS[stacked_experts]
    return (prefix, last, kind) if is_codes and (not number or number.isdecimal()) else None


def _split(
    name: str, tensor: torch.Tensor, last: str, stacked_experts: str, hidden_size: int
) -> dict[str, torch.Tensor]:
    """The matrices of a stack [X, ...]; raises `WeightError` for what is none."""
    try:
        turned = _turn(tensor, last, hidden_size) if stacked_experts == "transposed" else tensor
        return STACKED_EXPERTS[stacked_experts][last](turned)
    except (IndexError, RuntimeError, ValueError) as error:
        raise WeightError(f"{name} is no stack of experts' matrices: {list(tensor.shape)} ({error})") from error


def _check_codes(stem: str, blocks: torch.Tensor, scales: torch.Tensor) -> None:
    """Raise `WeightError` for blocks and scales that are no MXFP4."""
    if (
        blocks.dtype != torch.uint8 or scales.dtype != torch.uint8 or scales.dim() != 3
        or blocks.shape != (*scales.shape, MXFP4_BLOCK // 2)
    ):
        described = (f"{list(tensor.shape)} {str(tensor.dtype)[6:]}" for tensor in (blocks, scales))
        raise WeightError(
            f"{stem} is stored as MXFP4, which has bytes: blocks [experts, outputs, inputs / 32, 16] and scales "
            f"[experts, outputs, inputs / 32]; the checkpoint has {' and '.join(described)}. Fetch it again"
        )
    if scales.device.type == "cpu" and bool((scales == MXFP4_NAN).any()):  # as `is_finite`
        raise WeightError(f"{stem}, stored as MXFP4: {NOT_FINITE.format('scales')}")


def _number(prefix: str, own: dict[str, torch.Tensor], *, first: int) -> Iterator[Named]:
    for name, stacked in own.items():
        for expert, tensor in enumerate(stacked.unbind(), first):
            yield f"{prefix}.experts.{expert}.{name}", tensor


def _split_codes(matrix: str, tensor: CodedTensor) -> list[Named]:
    """One expert's stacked matrix [2F, D] or [D, F], which stays quantised."""
    if matrix == "down_proj":
        return [("down_proj.weight", tensor)]
    rows, columns = tensor.shape
    halves = (Share(rows, 0, rows // 2), Share(rows, rows // 2, rows))
    gate, up = (tensor.keep(Cut(((half,), (Share.whole(columns),)))) for half in halves)
    return [("gate_proj.weight", gate), ("up_proj.weight", up)]


def _keep_blocks(split: Split, blocks: torch.Tensor, scales: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """One expert's blocks, split into matrices like plain rows; None if some part cannot be packed."""
    # a row is scale and 16 bytes of codes per block; splits see [1, bytes, O], as they see [1, I, O]
    rows = torch.cat((scales.unsqueeze(-1), blocks), dim=-1).flatten(1)
    parts = {
        name: WeightBlocks("MXFP4_PAIRS", part[0].contiguous()) for name, part in split(rows.T.unsqueeze(0)).items()
    }
    if not all(part.can_be_packed for part in parts.values()):
        return None
    return {
        name: BlockTensor(part, torch.bfloat16, partial(_make_plain, part), num_stacked=1)
        for name, part in parts.items()
    }


def _make_plain(blocks: WeightBlocks) -> torch.Tensor:
    """Dequantised, [1, O, I]."""
    rows = blocks.raw.unflatten(1, (-1, 17))
    return _dequantise(rows[..., 1:], rows[..., 0]).transpose(1, 2)


def _dequantise(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """One expert's [O, I / 32, 16] and [O, I / 32] to [1, I, O]."""
    return dequantise_mxfp4(blocks.flatten(-2), scales, torch.bfloat16).T.unsqueeze(0)
