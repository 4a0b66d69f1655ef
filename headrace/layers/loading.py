"""Fills a model's parameters with checkpoint tensors, by a table of names.

A table maps templates of checkpoint module names to module names of the model, ``{i}`` being the layer number:
``"model.layers.{i}.self_attn.q_proj": "layers.{i}.attention.qkv#q"``. ``#q`` selects a part of a stacked parameter;
``{x}`` is the index of an expert in a stack, or of a head whose norm has a tensor of its own. An entry may also name a
single parameter. Entries whose module the model does not have (an optional norm, say) are skipped.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from headrace.base.errors import WeightError
from headrace.kernels.coded_linear.choice import CodedChoice
from headrace.layers.norm import HeadNorm
from headrace.layers.quantization.blocks import QuantisedIntake, QuantisedTensor
from headrace.layers.quantization.storage import EncodedWeight, StorableLayer, find_storable
from headrace.parallel.cut import Cut, cut_of, ensure_memory, like_parameter

NUM_NAMED = 6
"""Most tensors that an error lists per fault."""

logger = logging.getLogger(__name__)


class Targets(dict[str, torch.Tensor]):
    """``{checkpoint tensor name: parameter, or view of a part of one, that it fills}``. ``intakes``: collectors of
    quantised blocks for weights that may be stored packed, by the parameter's identity; ``choice``: of their products
    on a GPU. ``wholes``: the parameters that targets are, or are views of. ``cuts``: which part of the tensor a target
    takes, for targets that take less than all of it. ``elsewhere``: names of tensors that only other ranks need."""

    def __init__(self) -> None:
        super().__init__()
        self.intakes: dict[int, QuantisedIntake] = {}
        self.choice = CodedChoice()
        self.wholes: dict[str, torch.Tensor] = {}
        self.cuts: dict[str, Cut] = {}
        self.elsewhere: set[str] = set()

    def put(self, name: str, target: torch.Tensor, cut: Cut, whole: torch.Tensor) -> None:
        """Add a target, which is ``whole`` or a view of it; of one without memory, of `like_parameter`."""
        self[name], self.wholes[name] = target, whole
        if cut.shape != cut.full_shape:
            self.cuts[name] = cut

    def keep(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """What the target takes of a checkpoint's tensor, which may have a leading dim of one; the tensor itself if its
        shape is not the expected one."""
        if isinstance(tensor, torch.Tensor) and tensor.shape == (1, *self[name].shape):
            tensor = tensor[0]
        cut = self.cuts.get(name)
        if cut is None or tuple(tensor.shape) != cut.full_shape:
            return tensor
        return tensor.keep(cut) if isinstance(tensor, QuantisedTensor) else cut.keep(tensor)

    def take_codes(self, name: str, tensor: torch.Tensor) -> bool:
        """Pass a `QuantisedTensor` on to its layer undequantised; False if it is a plain tensor, or the layer cannot
        keep codes."""
        target = self[name]
        intake = self.intakes.get(id(self.wholes[name]))
        if intake is None or not isinstance(tensor, QuantisedTensor):
            return False
        intake.put(target.storage_offset() // target.shape[1], tensor)  # the part's first row in the whole weight
        return True

    def fill(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor into its target."""
        target, whole = self[name], self.wholes[name].detach()
        ensure_memory(self.wholes[name])  # which knows of memory behind it
        if target.is_meta:
            target = whole.as_strided(target.shape, target.stride(), target.storage_offset())
        target.detach().copy_(tensor)


def find_targets(model: nn.Module, names: Mapping[str, str]) -> Targets:
    """The targets of a table of names, those with ``{i}`` once for each layer; asserts that together they cover every
    parameter element, so that a gap in a family's table is found at once and not as garbage in the output."""
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    targets = Targets()
    storable = find_storable(model)
    targets.intakes.update(
        (id(weight.layers[0].weight), QuantisedIntake(weight, targets.choice)) for weight in storable
    )
    targets.choice.expect(
        (weight.weight.shape[0], weight.weight.shape[1])
        for weight in storable if not (weight.is_vocabulary or weight.is_stack)
    )
    for name, path in _number_names(names, modules):
        if path in parameters:
            whole = parameters[path]
            targets.put(name, like_parameter(whole), cut_of(whole), whole)
        else:
            _add_module_targets(targets, name, path, modules)
    num_filled, num_needed = (sum(t.numel() for t in tensors) for tensors in (targets.values(), model.parameters()))
    assert num_filled == num_needed, f"the table of names fills {num_filled} of {num_needed} parameter elements"
    return targets


def _number_names(names: Mapping[str, str], modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, str]]:
    for theirs, ours in names.items():
        before, mark, _ = ours.partition(".{i}")
        if not mark:
            yield theirs, ours
        elif before in modules:
            for i, _ in modules[before].named_children():
                yield theirs.replace("{i}", i), ours.replace("{i}", i)


def _add_module_targets(targets: Targets, name: str, path: str, modules: Mapping[str, nn.Module]) -> None:
    path, _, part = path.partition("#")
    module = modules.get(path)
    if module is None or isinstance(module, EncodedWeight):  # has no parameters; its model fills the codes
        return
    for kind, parameter in module.named_parameters(recurse=False):
        target = like_parameter(parameter)
        if not part:
            targets.put(f"{name}.{kind}", target, cut_of(parameter), parameter)
            continue
        if isinstance(module, HeadNorm):
            _add_row_targets(targets, f"{name}.{kind}", parameter)
            continue
        assert isinstance(module, StorableLayer), f"{path} has no parts"
        if not module.has_part(part):  # one of a layer of another kind
            continue
        if "{x}" not in name:
            targets.put(f"{name}.{kind}", module.part(target, part), module.part_cut(parameter, part), parameter)
            continue
        for x in range(module.stack.size):  # one target per expert
            own, own_part = f"{name.replace('{x}', str(x))}.{kind}", part.replace("{x}", str(x))
            if module.stack.start <= x < module.stack.stop:
                targets.put(own, module.part(target, own_part), module.part_cut(parameter, own_part), parameter)
            else:
                targets.elsewhere.add(own)


def _add_row_targets(targets: Targets, name: str, parameter: torch.Tensor) -> None:
    cut = cut_of(parameter)
    rows, rest = cut.dims[0][0], Cut(cut.dims[1:])
    for x in range(rows.size):
        own = name.replace("{x}", str(x))
        if rows.start <= x < rows.stop:
            targets.put(own, parameter[x - rows.start], rest, parameter)
        else:
            targets.elsewhere.add(own)


def fill_targets(
    targets: Targets, tensors: Iterable[tuple[str, torch.Tensor]], *, harmless: tuple[str, ...] = ()
) -> None:
    """Copy each tensor into its target, converting dtype and device; tensors may come in any order.

    Unknown tensors are an error unless their name ends with one of ``harmless``, or they are biases of zeros, which
    writers of GPTQ add to every matrix. Raises `WeightError` naming tensors that are missing, unknown, given twice, of
    the wrong shape, or integers where weights are floats, and if all weights are zero; warns of single weights that are
    all zero, as a file that was not fetched to its end has them.
    """
    filled: set[str] = set()
    blank: list[str] = []
    faults: dict[str, list[str]] = {
        "missing": [], "not expected": [], "given twice": [], "of the wrong shape": [], "stored as no floats": [],
    }
    for name, tensor in tensors:
        if name not in targets:
            if not (name in targets.elsewhere or name.endswith(harmless) or _is_no_bias(targets, name, tensor)):
                faults["not expected"].append(name)
            continue
        if name in filled:
            faults["given twice"].append(name)
            continue
        filled.add(name)
        tensor = targets.keep(name, tensor)
        if fault := _find_fault(targets, name, tensor):
            faults[fault[0]].append(f"{name} is {fault[1]}")
            continue
        if not name.endswith("bias") and _is_all_zero(tensor):
            blank.append(name)
        # copied now: the tensor may be a view of a mapped file, valid only until the next one is requested
        if not targets.take_codes(name, tensor):
            targets.fill(name, tensor)
    for intake in targets.intakes.values():
        intake.finish()
    targets.choice.save()
    faults["missing"] = [name for name in targets if name not in filled]
    if any(faults.values()):
        raise WeightError(
            "the checkpoint does not fit the model: "
            + "; ".join(_describe(fault, names) for fault, names in faults.items() if names)
        )
    _judge_blank(blank, sum(not name.endswith("bias") for name in filled))


def _is_no_bias(targets: Targets, name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor that no target takes is a bias of zeros."""
    module, _, kind = name.rpartition(".")
    has_weight = f"{module}.weight" in targets or f"{module}.weight" in targets.elsewhere
    return kind == "bias" and has_weight and not tensor.any()


def _find_fault(targets: Targets, name: str, tensor: torch.Tensor) -> tuple[str, str] | None:
    """Why a target cannot take what it keeps of a tensor, and what the tensor is; None if it can."""
    target = targets[name]
    if tensor.shape != target.shape:
        expected = targets.cuts[name].full_shape if name in targets.cuts else target.shape
        return "of the wrong shape", f"{list(tensor.shape)}, not {list(expected)}"
    if target.is_floating_point() and not tensor.is_floating_point():
        return "stored as no floats", str(tensor.dtype).removeprefix("torch.")
    return None


def _is_all_zero(tensor: torch.Tensor) -> bool:
    values = torch.atleast_1d(tensor.raw if isinstance(tensor, QuantisedTensor) else tensor)
    values = values.view(torch.uint8) if values.dtype.itemsize == 1 else values  # float8 lacks operators
    # nearly always the first row tells; the whole tensor is read only where that is zero (padding tokens)
    return values.numel() > 0 and not values[:1].any().item() and not values.any().item()


def _judge_blank(blank: list[str], num_weights: int) -> None:
    """Warn of weights that are all zero; raise `WeightError` if no others are there."""
    if not blank:
        return
    told = _describe("all zero", blank)
    if len(blank) == num_weights:
        raise WeightError(f"the checkpoint holds no weights: {told}; fetch it again")
    logger.warning("the checkpoint may be damaged: %s; if outputs make no sense, fetch it again", told)


def _describe(fault: str, names: list[str]) -> str:
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return f"tensors {fault} ({len(names)}): {', '.join(names[:NUM_NAMED])}{more}"
