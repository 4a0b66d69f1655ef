"""`ExtendedWeight`: a weight and, in the memory behind it, ``a`` of its bank, so that one product multiplies with both.

T rows, I inputs, O outputs, S slots, P parts of a stacked output, R ranks of a part in a slot.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from headrace.kernels.linear import LINEAR, LINEAR_SUMS
from headrace.kernels.lora import EXPAND, Reduced
from headrace.kernels.operation import KernelQuery
from headrace.layers.lora.parts import BankSizes
from headrace.layers.quantization.storage import StorableLayer, plain_weight
from headrace.parallel.cut import has_memory, with_spare


def count_spare(sizes: BankSizes, num_parts: int, query: KernelQuery) -> int:
    """S * P * R, the rows of memory behind a weight that its bank has ``a`` in; 0 where no kernel reads them so."""
    has_kernels = query.device == "cuda" and EXPAND.choose(query) is not EXPAND.load("reference")
    is_alike = sizes.dtype is None or str(sizes.dtype).removeprefix("torch.") == query.dtype
    return sizes.num_slots * num_parts * sizes.padded_rank if has_kernels and is_alike else 0


class ExtendingBank(Protocol):
    """A bank whose ``a`` may be behind a weight; it is then ``extended``."""

    a: nn.Buffer
    extended: ExtendedWeight | None


class ExtendedWeight:
    """Of a layer's weight [O, I] and ``num_spare`` rows, see `count_spare`; none once the weight is dropped."""

    def __init__(self, layer: StorableLayer, query: KernelQuery, num_spare: int):
        self._layer, self._num_spare, self._device = layer, num_spare, layer.weight.device
        self._linear, self._linear_sums = LINEAR.choose(query), LINEAR_SUMS.choose(query)

    def place(self, bank: ExtendingBank) -> None:
        """Move the bank's ``a`` [S, P, R, I] behind the weight if it is not there. The weight gets such memory where it
        has none, as after a move to the host and back."""
        weight, a = plain_weight(self._layer), bank.a
        bank.extended = self
        if weight is None or weight.device != self._device or not has_memory(weight) or self.find(a) is not None:
            return
        end, extended = len(weight), with_spare(weight, self._num_spare)
        if extended is None:
            shape = (end + self._num_spare, weight.shape[1])
            extended = torch.empty(shape, dtype=weight.dtype, device=weight.device)
            extended[:end].copy_(weight)
            weight.data = extended[:end]
        extended[end:].copy_(a.flatten(0, 2))
        bank.a = nn.Buffer(extended[end:].view(a.shape), persistent=False)

    def release(self, bank: ExtendingBank) -> None:
        """Give the bank's ``a`` memory of its own: the weight has been dropped."""
        bank.extended, bank.a = None, nn.Buffer(bank.a.clone(), persistent=False)

    def find(self, a: torch.Tensor) -> torch.Tensor | None:
        """Weight and ``a`` [O + S * P * R, I]; None where they are apart."""
        weight = plain_weight(self._layer)
        extended = None if weight is None else with_spare(weight, self._num_spare)
        is_behind = extended is not None and extended[extended.shape[0] - self._num_spare :].data_ptr() == a.data_ptr()
        return extended if is_behind else None

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, extended: torch.Tensor, num_more: int, *, is_pending: bool
    ) -> tuple[torch.Tensor, Reduced]:
        """The product of ``x`` [T, I], and sums with the first ``num_more`` rows behind the weight, as `Reduced` has
        them. ``is_pending``: partial sums will do."""
        end = len(extended) - self._num_spare
        weight, padded = extended[: end + num_more], None if bias is None else F.pad(bias, (0, num_more))
        out = self._linear_sums(x, weight, padded, None) if is_pending else self._linear(x, weight, padded)
        sums = out if out.dim() == 3 else out[None]
        return out[..., :end], Reduced(sums[..., end:], is_dense=True)
