"""The contract of a mixture of experts: who brings tokens to experts, who computes, and the formats they meet in.

A `Dispatcher` and an `Experts` each speak one format, declared where they are registered; an adapter joins two formats.
So N dispatchers and M experts are N + M implementations. T tokens, D width, k experts a token, N pairs of token and
expert, X experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from headrace.base.registry import Registry
from headrace.layers.build import Build
from headrace.layers.spec import MlpSpec

T = TypeVar("T")

CHOICES = "choices"
"""Format: `ChosenTokens` go in, their weighted sums over experts [T, D] come out."""

GROUPED = "grouped"
"""Format: `GroupedTokens` go in, one unweighted row for each of theirs [N, D] comes out."""


@dataclass(slots=True)
class ChosenTokens:
    """Tokens as they are, and whom of ``num_experts`` they chose: ``hidden`` [T, D], ``ids`` [T, k] int64, ``weights``
    [T, k] float32. ``has_nobody``: some ids are -1, which stands for no expert here and adds nothing."""

    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    num_experts: int
    has_nobody: bool = False


@dataclass(slots=True)
class GroupedTokens:
    """A row for each pair of token and expert, in the order of experts: ``hidden`` [N, D]; ``ends`` [X] int32, one past
    each expert's last row; ``experts`` [N] int64, each row's expert. Rows behind the last end are nobody's: what comes
    out for them is open, even NaN, and ``experts`` has any number in range."""

    hidden: torch.Tensor
    ends: torch.Tensor
    experts: torch.Tensor


class Dispatcher(Protocol):
    """Brings tokens to the device where their experts are, and results back. Built once per layer."""

    def __init__(self, build: Build): ...

    def dispatch(self, tokens: ChosenTokens) -> Any:
        """The tokens for this device's experts, in the dispatcher's format."""

    def combine(self, results: Any) -> torch.Tensor:
        """What experts made of them, in the same format, to weighted sums [T, D] for the tokens given to `dispatch`."""


class Experts(Protocol):
    """Computes this device's experts. Nothing may wait for the device on CUDA. Built once per layer."""

    def __init__(self, weights: Any, spec: MlpSpec, build: Build):
        """``weights``: `ExpertWeights`, or `PackedExpertWeights` where the query says ``mxfp4``."""

    def run(self, tokens: Any) -> Any:
        """Tokens to results in the format it speaks."""


Adapter = Callable[[Any, Callable[[Any], Any]], Any]
"""``adapter(tokens, run)``: tokens of one format, and a function from tokens to results in another, to results of the
first."""


class SpeakerRegistry(Registry[T]):
    """Plug-ins that speak a token format, known without loading them."""

    def __init__(self, noun: str):
        super().__init__(noun)
        self._formats: dict[str, str] = {}

    def add(self, name: str, target: str, *, speaks: str = CHOICES, **options: Any) -> None:
        """See `Registry.add`; ``speaks`` names the format."""
        super().add(name, target, **options)
        self._formats[name] = speaks

    def format_of(self, name: str) -> str:
        """The format a plug-in speaks."""
        return self._formats[name]


DISPATCHERS: SpeakerRegistry[type[Dispatcher]] = SpeakerRegistry("MoE dispatcher")
EXPERTS: SpeakerRegistry[type[Experts]] = SpeakerRegistry("MoE experts")
ADAPTERS: Registry[Adapter] = Registry("MoE adapter")
"""Named ``outer->inner``: the dispatcher's format and the experts'."""


def adapter_name(outer: str, inner: str) -> str:
    """Under which the adapter between two formats is registered."""
    return f"{outer}->{inner}"
