"""`GatedMlp` and `Mlp`: two products with an activation between them. T tokens, D hidden size, F intermediate size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import torch
import torch.nn.functional as F

from headrace.kernels.coded_linear import GATE_ROWS
from headrace.kernels.coded_linear.device_codes import Fp8Rows
from headrace.kernels.rowwise import CLAMPED_SWIGLU, GELU_TANH_MUL, SILU_MUL, Gate
from headrace.layers.build import Build
from headrace.layers.linear import Linear, sum_shares
from headrace.layers.residual import Branch, Norm, Residual
from headrace.layers.spec import MlpSpec

GATED_ACTIVATIONS = {"silu": SILU_MUL, "gelu_tanh": GELU_TANH_MUL}
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "relu": F.relu, "silu": F.silu,
    "relu2": lambda x: F.relu(x).square_(), "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}
"""Of MLPs without a gate."""


def choose_activation(spec: MlpSpec, build: Build, width: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The gated activation ``[T, 2 * F] -> [T, F]``, gate first; ``width`` is F, which may be a rank's share."""
    query = build.query(width=width)
    if spec.clamp is not None:
        return partial(CLAMPED_SWIGLU.choose(query), **asdict(spec.clamp))
    if spec.activation not in GATED_ACTIVATIONS:
        return partial(multiply_gate, ACTIVATIONS[spec.activation])
    return GATED_ACTIVATIONS[spec.activation].choose(query)


def describe_gate(spec: MlpSpec) -> Gate:
    """The gated activation, as kernels take it."""
    clamp = spec.clamp
    return Gate(spec.activation) if clamp is None else Gate("clamped", clamp.limit, clamp.alpha, clamp.up_offset)


def multiply_gate(activation: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """``[T, 2 * F] -> [T, F]``, gate first, for activations without a kernel of their own."""
    gate, up = x.chunk(2, dim=-1)
    return activation(gate).mul_(up)


class GatedMlp(Branch):
    """``down(activation(gate(x)) * up(x))``. ``activation`` is the name by which product kernels with a norm fuse it;
    empty for a clamped activation and others that none of them computes."""

    takes_slices = True

    def __init__(self, spec: MlpSpec, hidden_size: int, build: Build):
        super().__init__()
        size = build.tensor.share(spec.intermediate_size, "intermediate dims")
        self.gate_up = Linear(build, hidden_size, {"gate": size, "up": size}, bias=spec.bias)
        self.down = Linear(build, size, hidden_size, bias=spec.bias)
        self._activate = choose_activation(spec, build, width=size.length)
        self.activation = spec.activation if spec.clamp is None and spec.activation in GATED_ACTIVATIONS else ""
        self._round_gated = GATE_ROWS.choose(build.query(width=size.length))
        # what products without a norm fuse
        self._fused = describe_gate(spec) if self.activation or spec.clamp is not None else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum_shares(self.compute_share(x), self.down.group)

    def compute_share(self, x: torch.Tensor, rows: Fp8Rows | None = None) -> torch.Tensor:
        """``forward`` without the sum over ranks; ``rows`` may be x in FP8, as ``gate_up`` takes it."""
        gated = self._fuse_gate(x)
        if gated is not None:
            return self.down.compute_share(gated)
        product = self.gate_up.multiply_rows(x if rows is None else rows, x.dtype)
        rows = self._gate_rows(product)
        if rows is not None:
            return self.down.multiply_rows(rows, product.dtype)
        return self.down.compute_share(self._activate(product))

    def read(self, norm: Norm, residual: Residual) -> torch.Tensor:
        x, is_gated = self._read_gate_up(norm, residual)
        return self.down(x if is_gated else self._activate(x))

    def add(self, norm: Norm, residual: Residual) -> None:
        for rows in residual.slices:
            self._add(norm, rows)

    def _add(self, norm: Norm, residual: Residual) -> None:
        x, is_gated = self._read_gate_up(norm, residual)
        rows = None if is_gated else self._gate_rows(x)
        if rows is None:
            self.down.add_to(residual, x if is_gated else self._activate(x))
        else:
            self.down.add_to(residual, rows)

    def _read_gate_up(self, norm: Norm, residual: Residual) -> tuple[torch.Tensor, bool]:
        """The first product of the normalised stream, and whether the activation has been applied to it."""
        # fused with the norm before it, and for few rows with the activation; None leaves the residual as it was
        if self.activation:
            if (gated := self.gate_up.read(norm, residual, self.activation)) is not None:
                return gated, True
            if (product := self.gate_up.read(norm, residual)) is not None:
                return product, False
        x = norm.add(residual)
        gated = self._fuse_gate(x)
        return (self.gate_up(x), False) if gated is None else (gated, True)

    def _gate_rows(self, product: torch.Tensor) -> Fp8Rows | None:
        """The next product's rows in FP8, if it takes them so."""
        group = None if self._fused is None else self.down.find_row_group(len(product))
        return None if group is None else self._round_gated(product, self._fused, group)

    def _fuse_gate(self, x: torch.Tensor) -> torch.Tensor | None:
        """Product and activation in one kernel; None where two are as fast."""
        return None if self._fused is None else self.gate_up.gate(x, self._fused)


class Mlp(Branch):
    """``down(activation(up(x)))``."""

    takes_slices = True

    def __init__(self, spec: MlpSpec, hidden_size: int, build: Build):
        super().__init__()
        size = build.tensor.share(spec.intermediate_size, "intermediate dims")
        self.up = Linear(build, hidden_size, size, bias=spec.bias)
        self.down = Linear(build, size, hidden_size, bias=spec.bias)
        self._activate = ACTIVATIONS[spec.activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self._activate(self.up(x)))

    def add(self, norm: Norm, residual: Residual) -> None:
        for rows in residual.slices:
            self.down.add_to(rows, self._activate(self.up(norm.add(rows))))
