"""`ForwardBatch`: the device tensors of one step, built by ``execution/inputs`` and read by every layer."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    ``groups[g]`` is cache group g, as numbered by the layout. ``lengths`` [R] are the requests' tokens in this step, on the
    host; ``text_kinds`` [T] int64 says which text of a pair each token belongs to (None: all to the first). Only models
    without cache groups read these two."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    groups: list[GroupStep]
    lengths: list[int] = field(default_factory=list)
    text_kinds: torch.Tensor | None = None
