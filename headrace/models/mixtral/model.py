"""Mixtral's checkpoint names: the first checkpoints have their own words for the experts, later files stack them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch

from headrace.layers.decoder.decoder import Decoder
from headrace.layers.decoder.names import EXPERT_NAMES, ROUTER, SPLIT_NAMES
from headrace.layers.moe.checkpoint import GATE_FIRST, MATRICES_APART, unstack_experts

FIRST_NAMES = {".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}


class MixtralModel(Decoder):
    """The decoder with a mixture of experts, which the spec asks for."""

    names: ClassVar[dict[str, str]] = {**SPLIT_NAMES, **EXPERT_NAMES, "model.layers.{i}.mlp.gate": ROUTER}

    def translate(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
        """Stacked experts apart, and the first names to the later ones."""
        renamed = ((rename(name), tensor) for name, tensor in tensors)
        return unstack_experts(renamed, {**GATE_FIRST, **MATRICES_APART})


def rename(name: str) -> str:
    """A tensor's name in the words of later files."""
    if ".block_sparse_moe." not in name:
        return name
    for theirs, ours in FIRST_NAMES.items():
        name = name.replace(theirs, ours)
    return name
