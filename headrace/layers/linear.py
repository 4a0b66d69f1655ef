"""`Linear`: a matrix product whose weight may be several checkpoint matrices stacked, e.g. q, k and v."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, Self

import torch

from headrace.kernels.coded_linear.device_codes import Fp8Rows
from headrace.kernels.coded_linear.forms import CodedWeight
from headrace.kernels.linear import GATED_LINEAR, LINEAR, LINEAR_FLOAT, LINEAR_SUMS, NORM_LINEAR, fits
from headrace.kernels.linear import Norm as NormWeights
from headrace.kernels.operation import choose_fused
from headrace.kernels.rowwise import Gate
from headrace.layers.build import Build
from headrace.layers.lora.bank import Adaptation, CodedLinearBank, LinearBank
from headrace.layers.lora.extended import ExtendedWeight, count_spare
from headrace.layers.norm import RmsNorm
from headrace.layers.quantization.storage import StorableLayer, plain_weight
from headrace.layers.residual import Addition, Norm, Residual, join_rows
from headrace.parallel.cut import Cut, cut_of
from headrace.parallel.group import Group
from headrace.parallel.share import Share, as_share


def stack_rows(parts: dict[str, int]) -> dict[str, slice]:
    """The rows of each part of a stacked weight, by name; ``parts`` are names and sizes in order."""
    ends = accumulate(parts.values())
    return {name: slice(end - size, end) for (name, size), end in zip(parts.items(), ends, strict=True)}


def sum_shares(share: torch.Tensor, group: Group | None) -> torch.Tensor:
    """The sum over ranks of what each has of a product; ``group``: None where a rank has all of it."""
    return share if group is None else group.all_reduce(share)


class Linear(StorableLayer):
    """``x [T, I] -> [T, O]``. ``parts`` names the stacked outputs and their sizes in order; O is their sum.
    ``is_storable``: see `StorableLayer`. ``is_wide``: who reads the output takes rows that are apart in memory.

    Of sizes given as a `Share`, this rank has a part. With shared outputs it computes its own; with shared inputs,
    which the layer before it computed here, the product is a partial sum, which all ranks of ``build.tensor`` add up.
    """

    def __init__(
        self, build: Build, inputs: int | Share, parts: dict[str, int | Share] | int | Share, *, bias: bool = False,
        is_storable: bool = True, is_wide: bool = False
    ):
        super().__init__()
        self.is_storable, self._is_wide = is_storable, is_wide
        # parts are consecutive rows of one weight [O, I], so that inputs are read once for all of them
        sizes = parts if isinstance(parts, dict) else {"": parts}
        self.shares = {name: as_share(size) for name, size in sizes.items()}
        self.rows = stack_rows({name: share.length for name, share in self.shares.items()})
        outputs, columns = tuple(self.shares.values()), as_share(inputs)
        self.group = None if columns.is_whole else build.tensor
        in_features, out_features = columns.length, sum(share.length for share in outputs)
        query = build.query(in_features=in_features, out_features=out_features)
        num_spare = 0
        if build.adapters is not None and self.group is None:
            num_spare = count_spare(build.adapters, len(outputs), query)
        self.weight = build.matrix(outputs, columns, num_spare=num_spare)
        self.bias = build.parameter(outputs) if bias else None
        self.lora: LinearBank | None = None
        if build.adapters is not None:
            bank = CodedLinearBank if build.adapters.is_coded and is_storable else LinearBank
            self.lora = bank(
                self, self.shares, columns, query, sizes=build.adapters, find_rows=build.find_adapter_rows,
                group=self.group, bias=self.bias,
            )
            if num_spare:
                ExtendedWeight(self, query, num_spare).place(self.lora)
        self._linear = LINEAR.choose(query)
        self._linear_sums = LINEAR_SUMS.choose(query)
        self._norm_linear = choose_fused(NORM_LINEAR, query)
        self._gated_linear = choose_fused(GATED_LINEAR, query)

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # a move to another device
        if self.lora is not None and self.lora.extended is not None:
            self.lora.extended.place(self.lora)
        return self

    def drop_weight(self) -> None:
        """See `StorableLayer`."""
        super().drop_weight()
        if self.lora is not None and self.lora.extended is not None:
            self.lora.extended.release(self.lora)

    def has_part(self, name: str) -> bool:
        """See `StorableLayer.has_part`."""
        return name in self.rows

    def part(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """See `StorableLayer.part`; of ``weight`` or ``bias``."""
        return parameter[self.rows[name]]

    def part_cut(self, parameter: torch.Tensor, name: str) -> Cut:
        """See `StorableLayer.part_cut`."""
        return cut_of(parameter).with_rows(self.shares[name])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum_shares(self.compute_share(x), self.group)

    def compute_share(self, x: torch.Tensor) -> torch.Tensor:
        """The product of what this rank has of inputs and weight: with shared inputs a partial sum."""
        if self.lora is None:
            return self._multiply(x)
        if (whole := self._multiply_adapted(x)) is not None:
            return whole
        begun, out = self._begin(x, self.lora, is_wide=self._is_wide)
        return self.lora.finish(begun, out)

    def find_row_group(self, num_rows: int) -> int | None:
        """The group of inputs by which so many rows may be rounded to FP8 (see `QUANTISE_ROWS`) for `multiply_rows`;
        None where this product takes no such rows."""
        coded = self._coded
        return None if coded is None or self._has_adapters else coded.find_row_group(num_rows)

    def multiply_rows(self, rows: torch.Tensor | Fp8Rows, dtype: torch.dtype) -> torch.Tensor:
        """As `compute_share`, of rows that may be in FP8 as `find_row_group` says."""
        if not isinstance(rows, Fp8Rows):
            return self.compute_share(rows)
        assert isinstance(self.stored, CodedWeight)
        return self.stored.multiply_rows(rows, self._own_bias, dtype)

    def _multiply_adapted(self, x: torch.Tensor, activation: str = "") -> torch.Tensor | None:
        """The product and what adapters add, then the gated ``activation`` if one is named, in one kernel; None where
        more are as fast."""
        weight = plain_weight(self)
        if weight is None or self.lora is None:
            return None
        found = self.lora.multiply_whole(x, weight, self._own_bias, activation)
        return None if found is None else found[0]

    def _begin(self, x: torch.Tensor, lora: LinearBank, *, is_wide: bool) -> tuple[Adaptation | None, torch.Tensor]:
        """What adapters begin, and the product."""
        weight = plain_weight(self)
        fused = None if weight is None else lora.multiply(x, weight, self._own_bias, is_wide=is_wide)
        if fused is not None:
            return fused
        begun = lora.begin(x)
        return begun, self._multiply(x)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        # Look for the parameter before `stored`, in this order: see `quantization.storage`.
        weight = plain_weight(self)
        if weight is not None:
            return self._linear(x, weight, self._own_bias)
        assert self.stored is not None
        return self.stored.multiply(x, self._own_bias)

    @property
    def _has_adapters(self) -> bool:
        """Whether rows of this step have adapters: then nothing is fused with the product, which they change."""
        return self.lora is not None and self.lora.is_active

    def add_to(self, residual: Residual, x: torch.Tensor | Fp8Rows) -> None:
        """Leave the product of ``x`` [T, I] pending in ``residual``: as it is, as split-K partial sums, or already
        accumulated into the stream, whichever is faster. Nothing else may be pending. In FP8 x is as `find_row_group`
        says."""
        if isinstance(x, Fp8Rows):
            assert isinstance(self.stored, CodedWeight)
            residual.pending = self.stored.multiply_row_sums(x, self._own_bias, residual.stream.dtype)
        elif self.lora is not None and self.lora.is_active:
            self._add_adapted(residual, x, self.lora)
        else:
            residual.pending = self._multiply_sums(x, residual.stream)
        residual.group = self.group
        # adapters add to the product before it is added up
        if self.group is not None and residual.addition is None and residual.pending is not None:
            residual.group = self.group.begin_sum(residual.pending)

    def _multiply_sums(self, x: torch.Tensor, stream: torch.Tensor) -> torch.Tensor | None:
        """As `LINEAR_SUMS`, whatever the weight."""
        weight, coded = plain_weight(self), self._coded
        if coded is not None:
            return coded.multiply_sums(x, self._own_bias)
        if weight is None:
            return self._multiply(x)
        # what other ranks must be added to cannot go into the stream, which all of them have
        sums: torch.Tensor | None = self._linear_sums(x, weight, self._own_bias, stream if self.group is None else None)
        return sums

    def _add_adapted(self, residual: Residual, x: torch.Tensor, lora: LinearBank) -> None:
        if (whole := self._multiply_adapted(x)) is not None:
            residual.pending = whole
            return
        weight = plain_weight(self)
        begun: Adaptation | None
        sums: torch.Tensor | None
        if weight is not None and (
            fused := lora.multiply(x, weight, self._own_bias, is_wide=True, is_pending=True)
        ) is not None:
            begun, sums = fused
        else:
            begun = lora.begin(x, before_norm=True)
            sums = self._multiply_sums(x, residual.stream) if lora.is_low_rank else self._multiply(x)
        assert begun is not None, "some row has an adapter"
        residual.pending = sums
        if sums is None:
            lora.finish(begun, residual.stream)
        elif not lora.is_low_rank:
            lora.finish(begun, sums)
        else:
            residual.addition = Addition(lora, begun)
            if begun.reduced is not None and not lora.fuses_norm(begun):
                residual.finish()

    @property
    def _own_bias(self) -> torch.Tensor | None:
        """The bias that this rank adds: of partial sums, one rank adds it."""
        return self.bias if self.group is None or self.group.rank == 0 else None

    def gate(self, x: torch.Tensor, gate: Gate) -> torch.Tensor | None:
        """The product followed by the gated activation, in one kernel; None where two kernels are as fast. With
        adapters it is their addition that is fused with the activation."""
        if self._has_adapters:
            return self._gate_adapted(x, gate)
        weight = plain_weight(self)
        if weight is None:
            assert self.stored is not None
            return self.stored.gate(x, self.bias, gate)
        if self._gated_linear is None or gate.is_clamped:
            return None
        return self._gated_linear(x, weight, self.bias, gate.kind)

    def _gate_adapted(self, x: torch.Tensor, gate: Gate) -> torch.Tensor | None:
        if self.lora is None or not self.lora.fuses_gates or gate.is_clamped:
            return None
        if (whole := self._multiply_adapted(x, gate.kind)) is not None:
            return whole
        begun, out = self._begin(x, self.lora, is_wide=True)
        assert begun is not None, "some row has an adapter"
        return self.lora.finish_gated(begun, out, gate.kind)

    @property
    def _coded(self) -> CodedWeight | None:
        return self.stored if plain_weight(self) is None and isinstance(self.stored, CodedWeight) else None

    def read(self, norm: Norm, residual: Residual, activation: str = "") -> torch.Tensor | None:
        """``product(norm(residual))``, then the gated ``activation`` if one is named, with fewer kernels than one after
        the other. None, with the residual unchanged, where that is not faster. Plain weights: one kernel, for few rows,
        an RMS norm, and a pending output [T, D] that is not partial sums. Weights in codes: with the norm's output in
        FP8, where products take such rows."""
        if residual.group is not None or not isinstance(norm, RmsNorm):
            return None
        if self._has_adapters or residual.addition is not None:
            return self._read_adapted(norm, residual, activation)
        x, weight, coded = residual.pending, plain_weight(self), self._coded
        if coded is not None and (group := coded.find_row_group(len(residual.stream))) is not None:
            return self._read_rows(coded, norm, residual, activation, group)
        if x is None or x.dim() != 2:
            return None
        weights, fused = NormWeights(norm.weight, norm.eps, norm.offset), None
        if coded is not None:
            fused = coded.normalise(x, residual.stream, weights, self.bias, activation)
        elif weight is None:
            return None
        elif self._norm_linear is not None and fits(x.shape[0]):
            fused = self._norm_linear(x, residual.stream, weights, weight, self.bias, activation)
        if fused is None:
            return None
        out, residual.stream = fused
        residual.pending = None
        return out

    def read_all(
        self, norm: Norm, residual: Residual, *, adds_later: bool = False
    ) -> tuple[torch.Tensor, Addition | None]:
        """``product(norm(residual))`` of all slices. With ``adds_later``, which is for one slice, what adapters add may
        be left to the caller."""
        slices, weight, lora = residual.slices, plain_weight(self), self.lora
        if adds_later and lora is not None and lora.is_active and lora.is_low_rank:
            product = self.read(norm, residual)
            if product is not None:
                return product, None
            begun, out = self._begin(norm.add(residual), lora, is_wide=self._is_wide)
            return out, None if begun is None else Addition(lora, begun)
        if len(slices) == 1 or weight is None or self._has_adapters:
            return join_rows([self._read_or_multiply(norm, rows) for rows in slices]), None
        # slices have thousands of rows, which torch multiplies best: each straight into its place
        out = slices[0].stream.new_empty(sum(len(rows.stream) for rows in slices), len(weight))
        for rows, part in zip(slices, residual.rows_of(out), strict=True):
            x, bias = norm.add(rows), self._own_bias
            torch.mm(x, weight.t(), out=part) if bias is None else torch.addmm(bias, x, weight.t(), out=part)
        return out, None

    def _read_or_multiply(self, norm: Norm, residual: Residual) -> torch.Tensor:
        product = self.read(norm, residual)  # norm and product in one kernel, if that is faster
        return self(norm.add(residual)) if product is None else product

    def _read_adapted(self, norm: RmsNorm, residual: Residual, activation: str) -> torch.Tensor | None:
        addition, x, lora, weight = residual.addition, residual.pending, self.lora, plain_weight(self)
        if x is None or lora is None or (activation and not lora.fuses_gates):
            return None
        weights = NormWeights(norm.weight, norm.eps, norm.offset)
        if addition is None:
            if weight is None or x.dim() != 2:
                return None
            before = residual.stream, weights
            fused = lora.multiply_whole(x, weight, self._own_bias, activation, before)
            if fused is None:
                return None
            out, total = fused
            assert total is not None
            residual.stream, residual.pending = total, None
            return out
        found = addition.bank.finish_norm(addition.begun, x, residual.stream, weights, lora)
        if found is None:
            return None
        x, residual.stream, begun = found
        assert begun is not None, "a bank follows"
        residual.pending = residual.addition = None
        out = self._multiply(x)
        return lora.finish_gated(begun, out, activation) if activation else lora.finish(begun, out)

    def _read_rows(
        self, coded: CodedWeight, norm: RmsNorm, residual: Residual, activation: str, group: int
    ) -> torch.Tensor | None:
        if activation and not coded.can_gate_rows(len(residual.stream)):
            return None
        rows, dtype = norm.add_rows(residual, group), residual.stream.dtype
        if activation:
            return coded.gate_rows(rows, self.bias, dtype, activation)
        return coded.multiply_rows(rows, self.bias, dtype)


class FloatLinear(Linear):
    """``x [T, I] -> [T, O]`` float32, unrounded, for weights that checkpoints store in 16 bits: products of 16-bit
    numbers summed in float32 are as exact as those of float32 numbers, where the device can return the sums. Elsewhere
    the weight is float32."""

    def __init__(self, build: Build, inputs: int, parts: dict[str, int | Share] | int, *, bias: bool = False):
        multiply = LINEAR_FLOAT.choose(build.query())
        self.is_narrow = multiply is not LINEAR_FLOAT.load("reference")
        super().__init__(
            build if self.is_narrow else build.in_float32(), inputs, parts, bias=bias, is_storable=False
        )
        self._multiply_float = multiply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_narrow:
            return super().forward(x.float())
        begun = None if self.lora is None else self.lora.begin(x)
        out: torch.Tensor = self._multiply_float(x, self.weight)
        out = out if self.bias is None else out.add_(self.bias)
        return out if self.lora is None else self.lora.finish(begun, out)
