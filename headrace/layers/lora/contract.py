"""The records between adapter files and layers: which modules of a model take adapters (`AdapterSites`), and what an
adapter has for them (`AdapterWeights`). O outputs, I inputs, r rank, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal

import torch

SiteKind = Literal["linear", "embedding", "head", "experts"]

TENSORS = ("a", "b", "magnitude", "bias", "weight", "token_ids", "token_rows")
"""Those of an `AdaptedPart`."""


@dataclass(frozen=True, slots=True)
class AdapterSite:
    """One checkpoint module that an adapter may change. ``module`` is the served model's own module, ``part`` one of
    its stacked outputs (empty: all of them), ``expert`` the number in a stack of experts, -1 elsewhere. Sizes are those
    of the checkpoint, whatever a rank has of them; an embedding has V inputs and D outputs, a head D and V."""

    module: str
    part: str
    in_features: int
    out_features: int
    kind: SiteKind = "linear"
    expert: int = -1


@dataclass(frozen=True)
class AdapterSites:
    """The sites of a model by checkpoint module name, such as ``model.layers.3.self_attn.q_proj``. ``rename`` turns
    other spellings that the family reads into these names; ``stacked_experts``: how a tensor of all experts is laid
    out, see `headrace.layers.names.CheckpointNames`. ``is_tied``: the head is the embedding's matrix.
    ``unused``: beginnings of the names of modules that checkpoints have and the served model leaves out."""

    sites: Mapping[str, AdapterSite]
    rename: Callable[[str], str]
    stacked_experts: str
    hidden_size: int
    is_tied: bool = False
    unused: tuple[str, ...] = ()


@dataclass(slots=True)
class AdaptedPart:
    """What an adapter has for one site; ``module``, ``part`` and ``expert`` are those of the site. Tensors have the
    checkpoint's sizes, in any float dtype, and memory that several of an adapter may share.

    ``a`` [r, I] and ``b`` [O, r] add ``scale * b @ a`` to the weight; of an embedding ``a`` is [r, V] and ``b`` [D, r].
    ``magnitude`` [O]: the norms that rows of the weight have with that addition (DoRA, arXiv:2402.09353). ``bias`` [O]
    and ``weight`` [O, I] replace the base's; an embedding's weight is [V, D]. ``token_rows`` [n, D] replace the rows
    ``token_ids`` [n] int64 of an embedding or head. ``bound``: no number of it has a larger magnitude."""

    module: str
    part: str = ""
    expert: int = -1
    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    scale: float = 1.0
    magnitude: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    token_ids: torch.Tensor | None = None
    token_rows: torch.Tensor | None = None
    bound: float = inf

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those that are there."""
        return [tensor for name in TENSORS if (tensor := getattr(self, name)) is not None]

    @property
    def rank(self) -> int:
        """0 without a low-rank addition."""
        return 0 if self.a is None else self.a.shape[0]

    @property
    def is_low_rank(self) -> bool:
        """Whether ``a`` and ``b`` are all there is."""
        others = (self.magnitude, self.bias, self.weight, self.token_ids)
        return self.a is not None and all(tensor is None for tensor in others)


@dataclass(frozen=True)
class AdapterWeights:
    """An adapter in host memory. ``rank``: the largest of its parts; ``digest``: SHA-256 of the content, in hex;
    ``modules``: last parts of the names of adapted checkpoint modules, sorted."""

    parts: list[AdaptedPart]
    rank: int
    digest: str
    modules: list[str]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for part in self.parts for tensor in part.tensors)
