"""`CodedWeight`: a quantised weight as a layer on a GPU keeps it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from headrace.kernels.coded_linear import (
    CODED_FLOAT,
    CODED_GATED,
    CODED_LINEAR,
    CODED_NORM_LINEAR,
    CODED_SUMS,
    EXPAND_CODES,
    FP8_GATED,
    FP8_LINEAR,
    FP8_SUMS,
    GROUPED_CODED,
)
from headrace.kernels.coded_linear.choice import Plan
from headrace.kernels.coded_linear.codes import Code
from headrace.kernels.coded_linear.device_codes import DeviceCodes, Fp8Rows
from headrace.kernels.coded_linear.reference import dequantise, multiply_groups
from headrace.kernels.linear import Norm
from headrace.kernels.operation import KernelQuery, Operation
from headrace.kernels.rowwise import Gate

MOST_GROUPED_ROWS, GROUPED_INPUTS = 64, 128
"""More rows, and scales of other groups of inputs, multiply the expanded weight of groups."""

STACK_PLAN = Plan(((1 << 62, "triton_expand"),), 1.0)
"""Of experts, which are multiplied by kernels of their own."""


class CodedWeight:
    """See `StoredWeight`; multiplies by the solutions of a `Plan`, which are loaded when it is made."""

    def __init__(self, weight: DeviceCodes, plan: Plan):
        self.weight, self.plan = weight, plan
        self.shape, self.num_bytes = (weight.out_features, weight.in_features), weight.num_bytes
        self._steps = [(most, CODED_LINEAR.load(name)) for most, name in plan.steps]
        self._sums, self._gated, self._normalised, self._floats = (
            _load_same(operation, plan) for operation in (CODED_SUMS, CODED_GATED, CODED_NORM_LINEAR, CODED_FLOAT)
        )
        # of rows in FP8
        self._rows, self._row_sums, self._gated_rows = (
            _load_same(operation, plan) for operation in (FP8_LINEAR, FP8_SUMS, FP8_GATED)
        )

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        num_rows = x.shape[0]
        in_float = _find(self._floats, num_rows) if out_dtype is torch.float32 and bias is None else None
        if in_float is not None and num_rows:
            return in_float(x, self.weight)
        multiply = next(multiply for most, multiply in self._steps if num_rows <= most)
        out = multiply(x, self.weight, bias)
        return out if out_dtype is None else out.to(out_dtype)

    def multiply_sums(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """As `multiply`, or split-K partial sums [S, T, O] float32, which are for the reader to add up."""
        sums = _find(self._sums, x.shape[0])
        return self.multiply(x, bias) if sums is None or bias is not None else sums(x, self.weight)

    def find_row_group(self, num_rows: int) -> int | None:
        """The ``group`` of rows in FP8 (see `QUANTISE_ROWS`) that so many are multiplied in; None if in their dtype."""
        if _find(self._rows, num_rows) is None:
            return None
        return self.weight.group if self.weight.num_groups > 1 else 0

    def multiply_rows(self, rows: Fp8Rows, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """As `multiply`, of rows as `find_row_group` says."""
        multiply = _find(self._rows, rows.num_rows)
        assert multiply is not None
        return multiply(rows, self.weight, bias, dtype)

    def multiply_row_sums(self, rows: Fp8Rows, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """As `multiply_sums`, of rows as `find_row_group` says."""
        sums = _find(self._row_sums, rows.num_rows)
        if sums is None or bias is not None:
            return self.multiply_rows(rows, bias, dtype)
        return sums(rows, self.weight, dtype)

    def can_gate_rows(self, num_rows: int) -> bool:
        """Whether `gate_rows` takes so many."""
        return _find(self._gated_rows, num_rows) is not None and self.weight.out_features % 16 == 0

    def gate_rows(self, rows: Fp8Rows, bias: torch.Tensor | None, dtype: torch.dtype, activation: str) -> torch.Tensor:
        """The product of rows as `find_row_group` says, followed by the gated activation: one kernel."""
        gated = _find(self._gated_rows, rows.num_rows)
        assert gated is not None
        return gated(rows, self.weight, bias, dtype, activation)

    def gate(self, x: torch.Tensor, bias: torch.Tensor | None, gate: Gate) -> torch.Tensor | None:
        gated = _find(self._gated, x.shape[0])
        return None if gated is None else gated(x, self.weight, bias, gate)

    def normalise(
        self, x: torch.Tensor, residual: torch.Tensor, norm: Norm, bias: torch.Tensor | None, activation: str
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See `CODED_NORM_LINEAR`; None where separate kernels are as fast."""
        normalised = _find(self._normalised, x.shape[0])
        if (
            normalised is None or self.weight.order is not None or norm.weight.dtype != x.dtype
            or (activation and self.weight.tail is not None)
            or not (_is_aligned(x) and _is_aligned(residual))
        ):
            return None
        return normalised(x, residual, norm, self.weight, bias, activation)

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        whole = self.weight.untile()
        out = torch.empty(len(ids), whole.in_features, dtype=dtype, device=ids.device)
        first = 0
        for own in whole.parts:
            places = ids - first
            is_own = (places >= 0) & (places < own.out_features)
            places = places.clamp(0, own.out_features - 1)
            tables = places // own.rows
            zeros = None if own.zeros is None else own.zeros[tables]
            taken = replace(own, codes=own.codes[places], scales=own.scales[tables], zeros=zeros, rows=1)
            out = torch.where(is_own[:, None], dequantise(taken, dtype), out)
            first += own.out_features
        return out

    def unpack(self, dtype: torch.dtype) -> torch.Tensor:
        return _choose_expansion(self.weight.codes.device, dtype, self.weight.code is Code.E4M3)(self.weight, dtype)

    def move(self, device: torch.device) -> None:
        """Move the codes to another device."""
        self.weight = self.weight.transform(lambda tensor: tensor.to(device))


Steps = list[tuple[int, Callable[..., Any] | None]]
"""Kernels by the most rows that they are used for."""


def _load_same(operation: Operation, plan: Plan) -> Steps:
    """Of the solutions of a plan, those that ``operation`` has by the same names."""
    names = operation.names()
    return [(most, operation.load(name) if name in names else None) for most, name in plan.steps]


def _find(steps: Steps, num_rows: int) -> Callable[..., Any] | None:
    return next(found for most, found in steps if num_rows <= most)


def _is_aligned(x: torch.Tensor) -> bool:
    return x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0


def multiply_in_groups(x: torch.Tensor, stored: CodedWeight) -> torch.Tensor:
    """``x`` [T, G, I] times the matrices of G groups, which a weight stacks: [T, G * O]."""
    own = stored.weight
    has_form = own.code is Code.E4M3 and own.order is None and (own.num_groups == 1 or own.group == GROUPED_INPUTS)
    if has_form and len(x) <= MOST_GROUPED_ROWS:
        return _choose_groups(x.device, x.dtype, own.in_features, own.out_features // x.shape[1])(x, own)
    return multiply_groups(x, stored.unpack(x.dtype))


@cache
def _choose_groups(device: torch.device, dtype: torch.dtype, inputs: int, outputs: int) -> Callable[..., torch.Tensor]:
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return GROUPED_CODED.choose(KernelQuery(
        device.type, str(dtype).removeprefix("torch."), capability, {"in_features": inputs, "out_features": outputs}
    ))


@cache
def _choose_expansion(device: torch.device, dtype: torch.dtype, is_float: bool) -> Callable[..., torch.Tensor]:
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    query = KernelQuery(device.type, str(dtype).removeprefix("torch."), capability, {"is_float": int(is_float)})
    return EXPAND_CODES.choose(query)
