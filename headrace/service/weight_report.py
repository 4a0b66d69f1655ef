"""How a model's weights would be stored and multiplied on this machine, without loading it: ``headrace check MODEL``.

Of each kind of layer the first one is read as loading would read it, and stored as its layer would keep it. Imports
torch when called.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.base.config import EngineConfig

if TYPE_CHECKING:
    import torch

    from headrace.kernels.coded_linear.codes import CodedMatrix
    from headrace.kernels.coded_linear.device_codes import DeviceCodes
    from headrace.models.source import ModelSource

EXPERTS = ".experts."
"""In names of experts' weights."""
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class WeightKind:
    """Weights that are stored alike. ``name``: that of the checkpoint, with * for numbers; ``count`` of them, of
    ``shape``. ``form``: how the checkpoint has them; ``kernel``: what multiplies with them here; ``reason``: why that
    one."""

    name: str
    count: int
    shape: tuple[int, ...]
    form: str
    kernel: str
    reason: str


def describe_weights(config: EngineConfig) -> Iterator[WeightKind]:
    """The kinds of weights of a model, in the checkpoint's order. Raises `ModelError`, `ConfigError` and
    `WeightError` as loading does."""
    import torch

    from headrace.execution.device import resolve_device, resolve_dtypes
    from headrace.execution.loading import choose_schemes, ignore_progress, keeps_blocks
    from headrace.models.source import resolve_source

    device = resolve_device(config.device.device)
    source = resolve_source(config.model)
    dtype, _ = resolve_dtypes(config.model.dtype, "auto", source.config, device, rounds_inputs=False)
    keeps = keeps_blocks(source, config.model, device, dtype, ignore_progress)
    chain = choose_schemes(source, config.model, dtype, device, keeps_blocks=keeps)
    modules, tensors = _first_of_each(source)
    with torch.no_grad():
        for name, weight in chain.read(tensors):
            if weight.dim() > 1:
                kind = NUMBER.sub("*", name)
                form, kernel, reason = _judge(weight, device, dtype, is_expert=EXPERTS in f".{name}")
                yield WeightKind(
                    kind.removesuffix(".weight"), modules.get(kind.rpartition(".")[0], 1), tuple(weight.shape), form,
                    kernel, reason
                )


def _first_of_each(source: ModelSource) -> tuple[dict[str, int], Iterator[tuple[str, torch.Tensor]]]:
    """How many modules there are of each kind, and the tensors of the first of each. Files are mapped, so that what is
    not asked for is not read."""
    from headrace.models.checkpoint import open_weights

    first: dict[str, str] = {}
    members: dict[str, set[str]] = {}
    for name, _ in open_weights(source, keeps_blocks=True):
        module = name.rpartition(".")[0].partition(".weight.")[0]
        kind = NUMBER.sub("*", module)
        first.setdefault(kind, module)
        members.setdefault(kind, set()).add(module)
    chosen = set(first.values())
    wanted = open_weights(
        source, keeps_blocks=True,
        wants=lambda name: name.rpartition(".")[0].partition(".weight.")[0].removesuffix(".weight") in chosen
    )
    return {kind: len(modules) for kind, modules in members.items()}, iter(wanted)


def _judge(
    weight: torch.Tensor, device: torch.device, dtype: torch.dtype, *, is_expert: bool
) -> tuple[str, str, str]:
    """Form, kernel and reason of a weight as `SchemeChain` gives it."""
    from headrace.layers.quantization.blocks import BlockTensor, CodedTensor

    plain = str(dtype).removeprefix("torch.")
    if isinstance(weight, BlockTensor):
        if device.type == "cpu":
            return weight.blocks.kind, "own kernels, packed", "blocks are kept in 4 or 8 bits"
        if is_expert:
            from headrace.kernels.coded_linear.device_codes import read_codes

            return weight.blocks.kind, *_judge_expert(read_codes(weight.blocks, device), device, dtype)
        from headrace.kernels.coded_linear.choice import pack_parts

        codes = pack_parts([weight.blocks], device, dtype, torch.cuda.get_device_capability(device))
        return weight.blocks.kind, *_judge_codes(codes, dtype)
    if not isinstance(weight, CodedTensor):
        stored = str(weight.dtype).removeprefix("torch.")
        return stored, f"those of {plain}", "not quantised, or dequantised as --quantization or its format asks"
    form = describe_form(weight.matrix)
    if device.type == "cpu":
        from headrace.kernels.coded_linear.panels import store_in_panels

        stored_weight, reason = store_in_panels(weight.matrix, is_stack=is_expert)
        return form, f"those of {plain}, dequantised" if stored_weight is None else "own kernels, packed", reason
    return form, *(_judge_expert if is_expert else _judge_on_gpu)(weight.matrix, device, dtype)


def _judge_expert(matrix: CodedMatrix, device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """Judge the matrix of one expert; those of all experts are multiplied by one kernel."""
    import torch

    from headrace.kernels.coded_linear.device_codes import pack_for_device
    from headrace.kernels.moe import CODED_EXPERTS
    from headrace.kernels.operation import KernelQuery

    codes = pack_for_device(matrix.to(device))
    fault = "its groups differ in size" if codes is None else codes.fault_of_stack(codes.out_features)
    if fault is not None:
        return "dequantised", fault
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    query = KernelQuery(device.type, str(dtype).removeprefix("torch."), capability)
    name = next(name for name in CODED_EXPERTS.names() if CODED_EXPERTS.reason_against(name, query) is None)
    return (
        f"coded experts kernel {name}",
        "kept in codes if steps of 1 to 256 tokens are measured to be faster so when the model is loaded"
    )


def _judge_on_gpu(matrix: CodedMatrix, device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    import torch

    from headrace.kernels.coded_linear.choice import pack_weight

    return _judge_codes(pack_weight(matrix.to(device), dtype, torch.cuda.get_device_capability(device)), dtype)


def _judge_codes(codes: DeviceCodes | None, dtype: torch.dtype) -> tuple[str, str]:
    import torch

    from headrace.kernels.coded_linear.choice import CodedChoice, describe_plan

    if codes is None:
        return "dequantised", "its groups differ in size"
    choice, capability = CodedChoice(), torch.cuda.get_device_capability(codes.codes.device)
    plan = choice.judge(codes, dtype, capability)
    choice.save()
    kernel = "own or library kernels by rows" if plan.keeps_codes else "dequantised"
    return kernel, describe_plan(codes, plan).partition(": ")[2].removeprefix("dequantised, ")


def describe_form(matrix: CodedMatrix) -> str:
    """Bits, code and what shares a scale."""
    outputs, inputs = matrix.shape
    shared = f"{min(matrix.rows, outputs)} x {min(matrix.group, inputs)}" if matrix.rows > 1 else (
        f"{matrix.group} inputs" if matrix.scales.shape[1] > 1 else "each output"
    )
    return (
        f"{matrix.code.value} of {matrix.bits} bits, a scale{'' if matrix.zeros is None else ' and a zero point'} for "
        f"{shared}" + (", in activation order" if matrix.group_ids is not None else "")
    )
