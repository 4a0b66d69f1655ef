"""`Build`: device, dtype and options that every layer's constructor takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import torch

from headrace.kernels.lora import SlotRows
from headrace.kernels.operation import KernelQuery
from headrace.layers.batch import StepContext
from headrace.layers.lora.parts import BankSizes
from headrace.layers.quantization import SchemeChain, default_chain
from headrace.parallel.cut import Dim, ShardedParameter
from headrace.parallel.experts import ExpertRanks
from headrace.parallel.group import Group
from headrace.parallel.layout import Stage
from headrace.parallel.placement import check_copies

_is_deferring = ContextVar("is_deferring", default=False)


@contextmanager
def deferred_matrices() -> Iterator[None]:
    """In the body, matrices are built without memory, which they get when they are filled: weights that are kept in
    codes then never take the memory of plain ones."""
    token = _is_deferring.set(True)
    try:
        yield
    finally:
        _is_deferring.reset(token)


@dataclass(frozen=True)
class Build:
    """``dtype``: of weights and activations. ``max_model_len``: the longest context served, in tokens (0: the
    checkpoint's own limit); position tables have that length. ``moe_experts``: name of the experts implementation
    (``auto``: the best that supports the model here). ``schemes``: quantization schemes that checkpoint tensors pass
    through during loading. ``keeps_blocks``: layers keep a checkpoint's quantised blocks where they can. ``step``: see
    `StepContext`; each model has its own. ``tensor``: the ranks among which layers are divided.
    ``experts``: the ranks that have some experts each, whole ones; with a single one, those of ``tensor`` have a part
    of each expert. ``all2all_backend``: name of the dispatcher among them (``auto``: the best for these ranks).
    ``redundant_experts``: copies in each layer, where experts move between them while the model is served; else None.
    ``stage``: the layers that this rank has. ``adapters``: what layers make room for, None where none are served;
    ``is_output``: rows of layers are those that a head or classifier is called with, not the step's tokens.
    ``scales_cache``: a checkpoint's scales of keys and values are used, as pages hold 8-bit floats."""

    device: torch.device
    dtype: torch.dtype
    max_model_len: int = 0
    moe_experts: str = "auto"
    schemes: SchemeChain = field(default_factory=default_chain)
    keeps_blocks: bool = False
    step: StepContext = field(default_factory=StepContext)
    tensor: Group = field(default_factory=Group)
    experts: ExpertRanks = field(default_factory=ExpertRanks)
    all2all_backend: str = "auto"
    redundant_experts: int | None = None
    stage: Stage = field(default_factory=Stage)
    adapters: BankSizes | None = None
    is_output: bool = False
    scales_cache: bool = False

    @property
    def capability(self) -> tuple[int, int]:
        """CUDA compute capability; (0, 0) elsewhere."""
        return torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else (0, 0)

    @property
    def moves_experts(self) -> bool:
        """Whether experts move between ranks while the model is served."""
        return self.redundant_experts is not None

    def query(self, **shape: int) -> KernelQuery:
        """The query for choosing a kernel: this device and dtype, and ``shape``."""
        return KernelQuery(self.device.type, str(self.dtype).removeprefix("torch."), self.capability, shape)

    def parameter(self, *shape: Dim) -> ShardedParameter:
        """An uninitialised parameter: this rank's part of one of that shape."""
        return ShardedParameter.allocate(shape, self.dtype, self.device)

    def matrix(self, *shape: Dim, num_spare: int = 0) -> ShardedParameter:
        """The same for a weight that may be stored in another form: see `deferred_matrices`. ``num_spare``: see
        `ShardedParameter.allocate`."""
        return ShardedParameter.allocate(
            shape, self.dtype, self.device, is_deferred=_is_deferring.get(), num_spare=num_spare
        )

    def count_places(self, num_experts: int) -> int:
        """How many of a layer's experts this rank has memory for: its share or, where experts move, as many as each of
        the others, copies included. Raises `ConfigError` where they do not go evenly."""
        ranks = self.experts
        if self.redundant_experts is None or ranks.is_single:
            return ranks.share(num_experts).length
        check_copies(num_experts, self.redundant_experts, ranks.group.size)
        return (num_experts + self.redundant_experts) // ranks.group.size

    def find_adapter_rows(self) -> SlotRows | None:
        """Which rows of the step in hand have which adapter; None where none has."""
        return self.step.output_rows if self.is_output else self.step.batch.adapters

    def in_float32(self) -> Build:
        """A copy for a layer that computes in float32 in a model of any dtype; shares ``step`` and ``schemes``."""
        return replace(self, dtype=torch.float32)
