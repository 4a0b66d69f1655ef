"""`ForwardBatch`: the device tensors of one step, built by ``execution/inputs`` and read by every layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.layers.attention.contract import AttentionBackend, AttentionInputs


@dataclass(slots=True)
class GroupStep:
    """A cache group in this step: its inputs and its backend, already prepared with them."""

    inputs: AttentionInputs
    backend: AttentionBackend


@dataclass(slots=True)
class ForwardBatch:
    """T tokens of R requests. ``token_ids`` [T] int64, ``positions`` [T] int64, both on the device.
    ``groups[g]`` is cache group g, as numbered by the layout."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    groups: list[GroupStep]
