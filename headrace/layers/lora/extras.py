"""What adapters do to a product besides low-rank additions: magnitudes (DoRA, arXiv:2402.09353), biases, whole weights
and rows of tokens. O outputs, I inputs.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from headrace.layers.lora.parts import LoadBytes, PreparedPart
from headrace.layers.quantization.storage import StorableLayer, plain_weight
from headrace.parallel.group import Group

MEASURED, MEASURED_COPIES = 2**24, 3
"""Bytes of a weight's rows in float32 whose norms are computed at a time, and how many such tensors there are."""


@dataclass(slots=True)
class Extras:
    """What an adapter does to a product besides its low-rank addition, applied before that: replace the ``weight``
    [O', I] of outputs from ``start`` on, multiply outputs by ``gain`` [O] and add ``shift`` [O]; and replace outputs
    ``token_ids`` [n] by products with ``token_rows`` [n, I]."""

    gain: torch.Tensor | None = None
    shift: torch.Tensor | None = None
    weights: Sequence[tuple[int, torch.Tensor]] = ()
    token_ids: torch.Tensor | None = None
    token_rows: torch.Tensor | None = None

    def apply(self, x: torch.Tensor, out: torch.Tensor, own: torch.Tensor) -> None:
        """Change the rows ``own`` [n] of ``out``, the product of ``x`` [n, I]."""
        base = out.index_select(0, own)
        for start, weight in self.weights:
            base[:, start : start + len(weight)] = F.linear(x.to(weight.dtype), weight)
        if self.gain is not None:
            base.mul_(self.gain)
        if self.shift is not None:
            base.add_(self.shift)
        if self.token_ids is not None and self.token_rows is not None:
            base[:, self.token_ids] = F.linear(x.to(self.token_rows.dtype), self.token_rows).to(base.dtype)
        out.index_copy_(0, own, base)


class ExtrasMaker:
    """Makes `Extras` for a layer with this ``bias``; of its inputs each rank of ``group`` has some. ``shape``: outputs
    and inputs here."""

    def __init__(self, layer: StorableLayer, bias: nn.Parameter | None, group: Group | None, shape: tuple[int, int]):
        self._find_layer = weakref.ref(layer)  # which holds the bank that holds this
        self._bias, self._group, self._shape = bias, group, shape

    @property
    def _layer(self) -> StorableLayer:
        layer = self._find_layer()
        assert layer is not None
        return layer

    def count_bytes(self, parts: Sequence[PreparedPart]) -> LoadBytes:
        """What `make` takes of the device."""
        kept = sum(tensor.nbytes for part in parts for tensor in (part.weight, part.token_rows) if tensor is not None)
        if all(part.magnitude is None for part in parts):
            return LoadBytes(kept)
        outputs, inputs = self._shape
        whole = 0 if plain_weight(self._layer) is not None else 4 * outputs * inputs
        return LoadBytes(kept + 4 * outputs, whole + MEASURED * MEASURED_COPIES)

    def make(self, parts: Sequence[PreparedPart], device: torch.device) -> Extras:
        """What parts of an adapter ask for, on the device."""
        extras = Extras()
        for part in parts:
            if part.weight is not None:
                extras.weights = [*extras.weights, (part.start, part.weight.to(device))]
            if part.token_ids is not None and part.token_rows is not None:
                extras.token_ids, extras.token_rows = part.token_ids.to(device), part.token_rows.to(device)
        scaled = [part for part in parts if part.magnitude is not None]
        if scaled:
            extras.gain = torch.ones(self._shape[0], device=device)
            weight = self._base_weight()
            for part in scaled:
                assert part.magnitude is not None
                stop = part.start + len(part.magnitude)
                norms = self._measure(part, weight[part.start : stop])
                extras.gain[part.start : stop] = part.magnitude.to(device) / norms
        extras.shift = self._make_shift(parts, extras, device)
        return extras

    def _measure(self, part: PreparedPart, weight: torch.Tensor) -> torch.Tensor:
        """Norms [O'] float32 of the rows of ``weight`` [O', I] with the part's addition; some rows at a time."""
        squares, step = [], max(1, MEASURED // (4 * weight.shape[1]))
        for first in range(0, len(weight), step):
            rows = weight[first : first + step].float()
            if part.a is not None and part.b is not None:
                b = part.b[:, first : first + step].to(weight.device)
                rows = torch.addmm(rows, b.t(), part.a.to(weight.device).float())
            squares.append(rows.square().sum(1))
        found = torch.cat(squares)
        return (found if self._group is None else self._group.all_reduce(found)).sqrt()

    def _make_shift(
        self, parts: Sequence[PreparedPart], extras: Extras, device: torch.device
    ) -> torch.Tensor | None:
        """What makes of the base's bias, which is scaled with its output, the adapter's. Products of weights that are
        replaced come without a bias."""
        bias, is_first = self._bias, self._group is None or self._group.rank == 0
        if not is_first or (bias is None and all(part.bias is None for part in parts)):
            return None
        before = torch.zeros(self._shape[0], device=device) if bias is None else bias.detach().float()
        after = before.clone()
        before = before.clone()
        for part in parts:
            if part.weight is not None:
                before[part.start : part.start + len(part.weight)] = 0.0
            if part.bias is not None:
                after[part.start : part.start + len(part.bias)] = part.bias.to(device)
        return after - (before if extras.gain is None else before * extras.gain)

    def _base_weight(self) -> torch.Tensor:
        """This rank's weight as the checkpoint has it, [O, I]: the parameter, or a copy in float32."""
        weight = plain_weight(self._layer)
        if weight is not None:
            return weight.detach()
        assert self._layer.stored is not None
        return self._layer.stored.unpack(torch.float32)
