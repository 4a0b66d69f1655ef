"""LoRA of stacked experts (``target_parameters`` of PEFT), split into a part for each expert and matrix.

X experts, F intermediate size, D hidden size, r rank, O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from headrace.base.errors import AdapterError
from headrace.layers.lora.contract import AdaptedPart, AdapterSites
from headrace.layers.moe.checkpoint import separate_halves
from headrace.models.adapters.config import PeftConfig
from headrace.models.adapters.naming import SiteNames
from headrace.models.adapters.tensors import AdapterTensors

STACKED = ("gate_up_proj", "down_proj")
"""Parameters of a module of experts, in the order in which they are declared: PEFT wraps the first one innermost."""


def read_experts(
    module: str, group: Mapping[tuple[str, int], str], config: PeftConfig, tensors: AdapterTensors, names: SiteNames,
    sites: AdapterSites,
) -> list[AdaptedPart]:
    """The parts of a module of stacked experts; raises `AdapterError`. ``group``: its tensors by kind and depth."""
    targeted = [parameter for parameter in STACKED if config.targets_parameter(f"{module}.{parameter}")]
    wanted = {(kind, depth) for kind in ("a", "b") for depth in range(len(targeted))}
    if group.keys() != wanted:
        raise AdapterError(
            f"{module} has {len(group)} tensors, which are not A and B of each parameter that target_parameters of "
            f"adapter_config.json names there ({', '.join(targeted) or 'none'})"
        )
    prefix, count = names.normalise(module), names.number_experts(module)
    parts: list[AdaptedPart] = []
    for depth, parameter in enumerate(reversed(targeted)):  # the outermost first
        outputs = ["gate_proj", "up_proj"] if parameter == "gate_up_proj" else ["down_proj"]
        first = [sites.sites[f"{prefix}.0.{output}"] for output in outputs]
        size = sum(site.out_features for site in first), first[0].in_features
        stacked = _StackedPair(tensors, (group["a", depth], group["b", depth]), size, count)
        rank, scale = config.rank_of(f"{module}.{parameter}"), config.scale_of(f"{module}.{parameter}")
        for expert, (a, b) in enumerate(stacked.read(rank)):
            for output, rows in zip(outputs, _split(b, len(outputs), sites.stacked_experts), strict=True):
                site = sites.sites[f"{prefix}.{expert}.{output}"]
                parts.append(AdaptedPart(site.module, site.part, site.expert, a=a, b=rows, scale=scale))
    return parts


def _split(b: torch.Tensor, count: int, stacked_experts: str) -> list[torch.Tensor]:
    """The factor B of the matrices stacked in one: [O, r] each."""
    if count == 1:
        return [b]
    alternates = stacked_experts == "alternating"
    halves = separate_halves(b, dim=0) if alternates else b.tensor_split(2)
    return [half.contiguous() for half in halves]


class _StackedPair:
    """A [r * X, I] and B [O, r * X] of a stacked parameter whose matrices are ``size`` [O, I]. Older versions of PEFT
    took [X, O, I] for [X, I, O]: their A is [r * X, O] and their B [I, r * X], for the transposed matrices."""

    def __init__(self, tensors: AdapterTensors, names: tuple[str, str], size: tuple[int, int], count: int):
        self._tensors, self._names, self._size, self._count = tensors, names, size, count

    def read(self, rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """A [r, I] and B [O, r] of each expert; raises `AdapterError`."""
        outputs, inputs = self._size
        is_transposed = outputs != inputs and self._tensors.shape(self._names[0])[1:] == (outputs,)
        rows, columns = (inputs, outputs) if is_transposed else (outputs, inputs)
        whole_a = self._tensors.place(self._names[0], (rank * self._count, columns), is_examined=False)
        whole_b = self._tensors.place(self._names[1], (rows, rank * self._count), is_examined=False)
        self._tensors.fill()
        a, b = whole_a.unflatten(0, (self._count, rank)), whole_b.unflatten(1, (rank, self._count))
        for expert in range(self._count):
            own_a, own_b = a[expert].clone(), b[:, :, expert].contiguous()
            yield (own_b.T.contiguous(), own_a.T.contiguous()) if is_transposed else (own_a, own_b)
