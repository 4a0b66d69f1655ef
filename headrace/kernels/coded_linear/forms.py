"""`CodedWeight`: a quantised weight as a layer on a GPU keeps it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch

from headrace.kernels.coded_linear import CODED_LINEAR, CODED_SUMS, EXPAND_CODES
from headrace.kernels.coded_linear.choice import Plan
from headrace.kernels.coded_linear.codes import Code
from headrace.kernels.coded_linear.device_codes import DeviceCodes
from headrace.kernels.coded_linear.reference import dequantise
from headrace.kernels.operation import KernelQuery

STACK_PLAN = Plan(((1 << 62, "triton_expand"),), 1.0)
"""Of experts, which are multiplied by kernels of their own."""


class CodedWeight:
    """See `StoredWeight`; multiplies by the solutions of a `Plan`, which are loaded when it is made."""

    def __init__(self, weight: DeviceCodes, plan: Plan):
        self.weight, self.plan = weight, plan
        self.shape, self.num_bytes = (weight.out_features, weight.in_features), weight.num_bytes
        self._steps = [(most, CODED_LINEAR.load(name)) for most, name in plan.steps]
        with_sums = CODED_SUMS.names()
        self._sums = [(most, CODED_SUMS.load(name) if name in with_sums else None) for most, name in plan.steps]

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        num_rows = x.shape[0]
        multiply = next(multiply for most, multiply in self._steps if num_rows <= most)
        out = multiply(x, self.weight, bias)
        return out if out_dtype is None else out.to(out_dtype)

    def multiply_sums(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """As `multiply`, or split-K partial sums [S, T, O] float32, which are for the reader to add up."""
        num_rows = x.shape[0]
        sums = next(sums for most, sums in self._sums if num_rows <= most)
        return self.multiply(x, bias) if sums is None or bias is not None else sums(x, self.weight)

    def gate(self, x: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor | None:
        return None

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        own = self.weight
        tables = ids // own.rows
        zeros = None if own.zeros is None else own.zeros[tables]
        return dequantise(replace(own, codes=own.codes[ids], scales=own.scales[tables], zeros=zeros, rows=1), dtype)

    def unpack(self, dtype: torch.dtype) -> torch.Tensor:
        return _choose_expansion(self.weight.codes.device, dtype, self.weight.code is Code.E4M3)(self.weight, dtype)

    def move(self, device: torch.device) -> None:
        """Move the codes to another device."""
        own = self.weight
        zeros, order, values = (
            None if tensor is None else tensor.to(device) for tensor in (own.zeros, own.order, own.values)
        )
        self.weight = replace(
            own, codes=own.codes.to(device), scales=own.scales.to(device), zeros=zeros, order=order, values=values
        )


@cache
def _choose_expansion(device: torch.device, dtype: torch.dtype, is_float: bool) -> Callable[..., torch.Tensor]:
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    query = KernelQuery(device.type, str(dtype).removeprefix("torch."), capability, {"is_float": int(is_float)})
    return EXPAND_CODES.choose(query)
