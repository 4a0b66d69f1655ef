"""`ExpertWeights`: the stacked matrices of all experts of a layer.

X experts, F expert intermediate size, D hidden size, O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from headrace.base.errors import ConfigError
from headrace.kernels.coded_linear.device_codes import DeviceCodes
from headrace.kernels.coded_linear.forms import CodedWeight
from headrace.kernels.packed_linear.forms import PanelWeight
from headrace.kernels.packed_linear.layout import PackedMatrix
from headrace.layers.build import Build
from headrace.layers.linear import stack_rows
from headrace.layers.lora.stack import StackBank
from headrace.layers.quantization.storage import StorableLayer, plain_weight
from headrace.layers.spec import MlpSpec
from headrace.parallel.cut import Cut, cut_of, spare_of, with_spare
from headrace.parallel.group import Group
from headrace.parallel.share import Share, as_share


class StackedLinear(StorableLayer):
    """``weight`` [X, O, I] and, if wanted, ``bias`` [X, O]; kernels multiply with it. ``parts`` names the stacked
    outputs and their sizes in order. The weight may be ``stored`` as one matrix [X * O, I] if its experts allow. Sizes
    may be a rank's `Share`, as those of `Linear`; of X it is the experts that are here."""

    is_storable = False  # set by the experts that have kernels for stored stacks: `moe.stored`, `moe.grouped`
    is_rounded = False  # set by `moe.rounded`: its codes are multiplied with rounded activations

    def __init__(
        self, build: Build, stacked: int | Share, inputs: int | Share, parts: dict[str, int | Share], *, bias: bool
    ):
        super().__init__()
        self.experts, columns = as_share(stacked), as_share(inputs)
        self.num_stacked = self.experts.length
        self.shares = {name: as_share(size) for name, size in parts.items()}
        self.rows = stack_rows({name: share.length for name, share in self.shares.items()})
        outputs = tuple(self.shares.values())
        self._allocate = lambda: build.parameter(self.experts, outputs, columns)
        # places beyond the experts that are here: for others, and copies, where experts move
        self._num_spare = 0 if self.experts.is_whole else build.count_places(self.experts.size) - self.num_stacked
        self.weight = build.matrix(self.experts, outputs, columns, num_spare=self._num_spare)
        self.bias = build.parameter(self.experts, outputs) if bias else None
        self._adds_bias = columns.is_whole or build.tensor.rank == 0
        self.lora: StackBank | None = None
        if build.adapters is not None:
            self.lora = StackBank(self.shares, columns, self.experts, build.device)

    @property
    def own_bias(self) -> torch.Tensor | None:
        """The bias that this rank adds: of partial sums, one rank adds it."""
        return self.bias if self._adds_bias else None

    @property
    def stack(self) -> Share:
        """See `StorableLayer`."""
        return self.experts

    def part(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """The view of ``weight`` or ``bias`` called ``name``: ``"3/gate"`` is expert 3's gate."""
        expert, _, rows = name.partition("/")
        # a view [rows, I] of one expert's matrix; its storage is the whole stack's
        return parameter[int(expert) - self.experts.start, self.rows[rows]]

    def part_cut(self, parameter: torch.Tensor, name: str) -> Cut:
        """See `StorableLayer.part_cut`."""
        _, *dims = cut_of(parameter).dims
        return Cut(tuple(dims)).with_rows(self.shares[name.partition("/")[2]])

    def make_room(self) -> None:
        """Have all places for experts, those beyond what is here empty. Once, when the weights are in; raises
        `ConfigError` for packed ones."""
        if plain_weight(self) is None:
            raise ConfigError("enable_eplb moves plain experts, and this model's are packed", param="enable_eplb")
        for name, tensor in list(self.named_parameters(recurse=False)):
            room = with_spare(tensor, self._num_spare) if spare_of(tensor) else None
            if room is None:
                room = torch.cat((tensor.data, tensor.new_empty(self._num_spare, *tensor.shape[1:])))
            room[len(tensor) :] = 0
            setattr(self, name, nn.Parameter(room, requires_grad=False))
        self.num_stacked += self._num_spare

    @property
    def codes(self) -> DeviceCodes:
        """The matrices, [X * O, I], where a GPU keeps them in codes."""
        assert isinstance(self.stored, CodedWeight)
        return self.stored.weight

    @property
    def panels(self) -> PackedMatrix:
        """The matrices, [X * O, I], where a CPU keeps them packed."""
        assert isinstance(self.stored, PanelWeight)
        return self.stored.matrix

    def restore(self) -> None:
        """Keep the stored weight as a plain parameter again."""
        weight = self._allocate()
        weight.data.copy_(self.unpack(weight.dtype))
        self.stored, self.weight = None, weight

    def unpack(self, dtype: torch.dtype) -> torch.Tensor:
        """The stored weight as a new plain tensor, [X, O, I]."""
        assert self.stored is not None
        return self.stored.unpack(dtype).unflatten(0, (self.num_stacked, -1))


class ExpertWeights(nn.Module):
    """``gate_up`` [X, 2F, D], the gate's rows first, and ``down`` [X, D, F]. ``experts``: those that are here;
    ``size``: what is here of their intermediate dims, by default all."""

    def __init__(
        self, experts: int | Share, spec: MlpSpec, hidden_size: int, build: Build, *, size: Share | None = None
    ):
        super().__init__()
        width = size or spec.intermediate_size
        self.gate_up = StackedLinear(build, experts, hidden_size, {"gate": width, "up": width}, bias=spec.bias)
        self.down = StackedLinear(build, experts, width, {"down": hidden_size}, bias=spec.bias)

    def make_room(self) -> None:
        """See `StackedLinear.make_room`."""
        for stack in (self.gate_up, self.down):
            stack.make_room()

    def exchange(self, group: Group, moves: Sequence[tuple[int, int]]) -> None:
        """See `exchange_experts`."""
        exchange_experts([parameter.data for parameter in self.parameters()], group, moves)


def exchange_experts(tensors: Iterable[torch.Tensor], group: Group, moves: Sequence[tuple[int, int]]) -> None:
    """Copy experts between ranks: from and to which place, numbered over all ranks, which have as many each. Each
    tensor has a row for each place here; all are read before any is written."""
    rank, size = group.rank, group.size
    for tensor in tensors:
        each = len(tensor)
        gone = sorted((to // each, to, start) for start, to in moves if start // each == rank)
        come = sorted((start // each, to) for start, to in moves if to // each == rank)
        sent, received = (
            [sum(peer == other for peer, *_ in ends) for other in range(size)] for ends in (gone, come)
        )
        index = torch.tensor([start % each for *_, start in gone], dtype=torch.int64, device=tensor.device)
        rows = group.exchange_rows(tensor.index_select(0, index), sent, received)
        places = torch.tensor([to % each for _, to in come], dtype=torch.int64, device=tensor.device)
        tensor.index_copy_(0, places, rows)
