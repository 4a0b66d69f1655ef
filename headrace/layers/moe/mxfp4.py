"""Experts kept in MXFP4, at about a quarter of bfloat16's memory: multiplied in codes, or dequantised a few at a time.

X experts, O outputs, I inputs, F expert intermediate size, D hidden size, N pairs of token and expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from headrace.base.errors import ConfigError
from headrace.kernels.block_scaled import MXFP4_BLOCK, dequantise_mxfp4, powers_of_two
from headrace.kernels.coded_linear.codes import TABLES, Code
from headrace.kernels.coded_linear.device_codes import LIFT, DeviceCodes, reorder_pairs
from headrace.kernels.moe import CODED_EXPERTS
from headrace.layers.build import Build
from headrace.layers.linear import stack_rows
from headrace.layers.mlp import choose_activation, describe_gate
from headrace.layers.moe.contract import ChosenTokens, GroupedTokens
from headrace.layers.moe.weights import exchange_experts
from headrace.layers.quantization.storage import EncodedWeight
from headrace.layers.spec import MlpSpec
from headrace.parallel.group import Group
from headrace.parallel.share import Share, as_share

CHUNK_ELEMENTS = 2**28
"""Most dequantised weights that exist at a time: 512 MiB in bfloat16."""

FEW_PAIRS = 64
"""Up to so many pairs, each dequantises its own copy of its expert's matrix: few share one, and the device need not be
asked for row counts."""

MOST_EXPONENT = 128
"""The largest e8m0 scale that kernels keep in a byte: 2."""

CODE_RMS = 2.926
"""Root mean square of the 16 E2M1 values (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives)."""


class Mxfp4Linear(EncodedWeight):
    """``codes`` [X, O, I / 2] and ``scales`` [X, O, I / 32], uint8; zero until a checkpoint fills them. Of all experts,
    some are here; X places have memory: more, where experts move. ``parts`` names the stacked outputs and their sizes
    in order. ``is_for_kernels``: experts are computed from what `pack` returns."""

    def __init__(self, build: Build, experts: int | Share, in_features: int, parts: dict[str, int]):
        super().__init__()
        if in_features % MXFP4_BLOCK:
            raise ConfigError(
                f"experts {in_features} wide cannot be kept in MXFP4, which takes multiples of {MXFP4_BLOCK}",
                param="moe_experts"
            )
        self.experts = as_share(experts)
        num_stacked = self.experts.length if self.experts.is_whole else build.count_places(self.experts.size)
        self.num_stacked, self.is_for_kernels = num_stacked, False
        self.rows, out_features = stack_rows(parts), sum(parts.values())
        self.codes, self.scales = (
            nn.Buffer(
                torch.zeros(num_stacked, out_features, columns, dtype=torch.uint8, device=build.device),
                persistent=False,
            )
            for columns in (in_features // 2, in_features // MXFP4_BLOCK)  # two codes to a byte, a scale per block
        )
        self.is_packed, self.has_bytes = False, False
        self._view: DeviceCodes | None = None

    def pack(self) -> DeviceCodes:
        """Codes and scales in the layout of GPU kernels, in the same memory. The first call after they are complete
        puts them in order."""
        if not self.is_packed:
            for matrices in self.codes.split(self.num_at_once):
                matrices.copy_(reorder_pairs(matrices))
            if int(self.scales.amax()) <= MOST_EXPONENT:  # what kernels keep in a byte
                self.scales.clamp_(min=1).add_(LIFT)
                self.has_bytes = True
            self.is_packed, self._view = True, None
        view = self._view
        if view is None or view.codes.data_ptr() != self.codes.data_ptr():  # else they were moved
            codes, scales = self.codes.flatten(0, 1), self.scales.flatten(0, 1)
            if not self.has_bytes:
                scales = powers_of_two(torch.float32, scales.device)[scales.int()]
            values = torch.tensor(TABLES[Code.E2M1], device=codes.device)
            view = self._view = DeviceCodes(
                Code.E2M1, 2 * codes.shape[1], codes, scales, MXFP4_BLOCK, values=values, has_whole_zeros=True
            )
        return view

    def make_room(self) -> None:
        """Give experts a form in which they can move between ranks, the same on all. Once, when the codes are in;
        raises `ConfigError` for scales that kernels do not keep in bytes."""
        if not self.is_for_kernels:
            return
        self.pack()
        if not self.has_bytes:
            raise ConfigError(
                "enable_eplb moves experts in MXFP4 with scales of 2 at most, and this model has larger ones: leave it "
                "out", param="enable_eplb"
            )

    def leave_as_it_is(self) -> None:
        """See `EncodedWeight`."""
        self.is_packed = self.has_bytes = True

    def unpack(self) -> None:
        """Called before codes and scales are filled again."""
        self.is_packed, self.has_bytes = False, False
        self._view = None

    @property
    def num_at_once(self) -> int:
        """How many matrices may be dequantised at a time."""
        return max(1, CHUNK_ELEMENTS // (2 * self.codes[0].numel()))

    def randomise(self, std: float, generator: torch.Generator) -> None:
        """See `EncodedWeight`. Codes are uniformly random; all scales are one power of two, E8M0 with a bias of 127."""
        self.unpack()
        # 8 bytes at a time, over the full range of int64 (None: up to its maximum)
        own = self.experts
        # all ranks draw the same experts, of which each keeps its own
        whole = self.codes if own.is_whole else self.codes.new_empty(own.size, *self.codes.shape[1:])
        whole.view(torch.int64).random_(-(2**63), None, generator=generator)
        if not own.is_whole:
            self.codes[: own.length].copy_(whole[own.start : own.stop])
        self.scales.fill_(127 + round(math.log2(std / CODE_RMS)))

    def matrices(self, experts: torch.Tensor | slice, dtype: torch.dtype) -> torch.Tensor:
        """Dequantised matrices of some experts, by index or range: [n, O, I]."""
        assert not self.is_packed, "codes are in another order once they are packed"
        return dequantise_mxfp4(self.codes[experts], self.scales[experts], dtype)


class Mxfp4ExpertWeights(nn.Module):
    """``gate_up`` with the gate's rows first, and ``down``; as `ExpertWeights`, without biases."""

    def __init__(self, experts: int | Share, spec: MlpSpec, hidden_size: int, build: Build):
        super().__init__()
        self.own, size = as_share(experts), spec.intermediate_size
        self.gate_up = Mxfp4Linear(build, self.own, hidden_size, {"gate": size, "up": size})
        self.down = Mxfp4Linear(build, self.own, size, {"down": hidden_size})

    def places(self, prefix: str, matrices: dict[str, str]) -> dict[str, torch.Tensor]:
        """Maps checkpoint names of codes and scales, ``<prefix>.<expert>.<matrix>.weight`` and ``.scale``, to the views
        that they fill. ``matrices`` has the checkpoint's names of ``gate``, ``up`` and ``down``."""
        places: dict[str, torch.Tensor] = {}
        for linear in (self.gate_up, self.down):
            linear.unpack()
            for part, rows in linear.rows.items():
                for x in range(self.own.length):
                    name = f"{prefix}.{self.own.start + x}.{matrices[part]}"
                    places |= {f"{name}.weight": linear.codes[x, rows], f"{name}.scale": linear.scales[x, rows]}
        return places

    def make_room(self) -> None:
        """See `Mxfp4Linear.make_room`."""
        for linear in (self.gate_up, self.down):
            linear.make_room()

    def exchange(self, group: Group, moves: Sequence[tuple[int, int]]) -> None:
        """See `exchange_experts`."""
        exchange_experts(self.buffers(), group, moves)


class Mxfp4Experts:
    """See `Experts`; speaks `GROUPED`. On a GPU it waits for the row counts of steps with more than `FEW_PAIRS`."""

    def __init__(self, weights: Mxfp4ExpertWeights, spec: MlpSpec, build: Build):
        self._weights = weights
        self._activate = choose_activation(spec, build, width=spec.intermediate_size)

    def run(self, tokens: GroupedTokens) -> torch.Tensor:
        gate_up, down = self._weights.gate_up, self._weights.down
        if tokens.hidden.shape[0] <= FEW_PAIRS:
            x = self._activate(_multiply_pairs(gate_up, tokens.hidden, tokens.experts))
            return _multiply_pairs(down, x, tokens.experts)
        ends = tokens.ends.tolist()  # waits for the device
        return _multiply_groups(down, self._activate(_multiply_groups(gate_up, tokens.hidden, ends)), ends)


class FusedMxfp4Experts:
    """See `Experts`; speaks `CHOICES`. On a GPU: codes are multiplied as they are, from choices to sums. ``kernel``: in
    place of the one that `CODED_EXPERTS` chooses."""

    def __init__(
        self, weights: Mxfp4ExpertWeights, spec: MlpSpec, build: Build, kernel: Callable[..., Any] | None = None
    ):
        self._weights, self._gate = weights, describe_gate(spec)
        self._run = kernel or CODED_EXPERTS.choose(build.query())
        weights.gate_up.is_for_kernels = weights.down.is_for_kernels = True

    def run(self, tokens: ChosenTokens) -> torch.Tensor:
        """`ChosenTokens` to weighted sums [T, D]. The first call, which captures and serves nothing, packs codes."""
        gate_up, down = (linear.pack() for linear in (self._weights.gate_up, self._weights.down))
        return self._run(tokens.hidden, tokens.ids, tokens.weights, (gate_up, None), (down, None), self._gate)


def _multiply_pairs(linear: Mxfp4Linear, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """``x`` [N, I], each row times the matrix of its expert: [N, O]."""
    parts = zip(x.unsqueeze(-1).split(linear.num_at_once), experts.split(linear.num_at_once), strict=True)
    return torch.cat([torch.bmm(linear.matrices(chosen, x.dtype), rows) for rows, chosen in parts]).squeeze(-1)


def _multiply_groups(linear: Mxfp4Linear, x: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """The same for rows sorted by expert: those of expert e are ``ends[e - 1]`` to ``ends[e]``. Each used chunk of
    experts is dequantised once; chunks that no row needs are skipped. Rows after the last end stay undefined."""
    out = x.new_empty(x.shape[0], linear.codes.shape[1])
    starts = [0, *ends[:-1]]
    for low in range(0, linear.num_stacked, linear.num_at_once):
        span = slice(low, min(low + linear.num_at_once, linear.num_stacked))
        if ends[span.stop - 1] > starts[low]:
            matrices = linear.matrices(span, x.dtype)
            for matrix, start, end in zip(matrices, starts[span], ends[span], strict=True):
                if end > start:
                    torch.mm(x[start:end], matrix.t(), out=out[start:end])
    return out
