"""The contract of a mixture of experts: dispatchers, experts, and the token formats they exchange.

A `Dispatcher` and an `Experts` each speak one format, declared where they are registered; an adapter converts between
two. So N dispatchers and M experts are N + M implementations, not N * M. T tokens, D hidden size, k experts a token,
N pairs of token and expert, X experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from headrace.base.registry import Registry
from headrace.layers.build import Build
from headrace.layers.spec import MlpSpec

T = TypeVar("T")

# Token formats that plug-ins declare with ``speaks=`` when they are registered; out-of-tree ones may add others.
CHOICES = "choices"
"""Format: `ChosenTokens` go in, their weighted sums over experts [T, D] come out."""

GROUPED = "grouped"
"""Format: `GroupedTokens` go in, one unweighted row for each pair [N, D] comes out."""


@dataclass(slots=True)
class ChosenTokens:
    """Tokens in step order, and which of ``num_experts`` each chose: ``hidden`` [T, D], ``ids`` [T, k] int64,
    ``weights`` [T, k] float32. ``has_padding``: some ids are -1, no expert, and add nothing."""

    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    num_experts: int
    has_padding: bool = False


@dataclass(slots=True)
class GroupedTokens:
    """A row for each pair of token and expert, sorted by expert: ``hidden`` [N, D]; ``ends`` [X] int32, one past each
    expert's last row; ``experts`` [N] int64, each row's expert. Rows after the last end are padding: their ``experts``
    are any numbers in range, their results undefined, even NaN."""

    hidden: torch.Tensor
    ends: torch.Tensor
    experts: torch.Tensor


@runtime_checkable
class Mixture(Protocol):
    """A layer with experts of which a token chooses some."""

    def count_idle(self) -> int:
        """How many more parameters this rank's experts have than a token needs of them, on average; negative where
        experts in codes count as none."""


class Dispatcher(Protocol):
    """Sends tokens to the devices of their experts, and brings results back. Built once per layer. ``is_capturable``:
    its calls may be recorded in a CUDA graph; False where they wait for the device, or depend on numbers of the host.
    """

    is_capturable: bool

    def __init__(self, build: Build): ...

    def dispatch(self, tokens: ChosenTokens) -> Any:
        """The tokens for this device's experts, in the dispatcher's format."""

    def combine(self, results: Any) -> torch.Tensor:
        """The experts' results, in the same format, to weighted sums [T, D] for the tokens given to `dispatch`."""


class Experts(Protocol):
    """Computes this device's experts, on CUDA without waiting for the device. Built once per layer."""

    def __init__(self, weights: Any, spec: MlpSpec, build: Build):
        """``weights``: `ExpertWeights`, or `Mxfp4ExpertWeights` where the query says ``mxfp4``."""

    def run(self, tokens: Any) -> Any:
        """Tokens to results in the format it speaks."""


Adapter = Callable[[Any, Callable[[Any], Any]], Any]
"""``adapter(tokens, run)``: ``tokens`` in an outer format and ``run``, from tokens to results in an inner one, to
results in the outer."""


class SpeakerRegistry(Registry[T]):
    """Plug-ins that speak a token format, which is known without loading them."""

    def __init__(self, noun: str):
        super().__init__(noun)
        self._formats: dict[str, str] = {}
        self._waiting: set[str] = set()

    def add(
        self, name: str, target: str, *, speaks: str = CHOICES, waits: bool = False, **options: Any
    ) -> None:
        """See `Registry.add`; ``speaks`` is the token format. ``waits``: some calls wait for the device, so that steps
        with them are not recorded in CUDA graphs."""
        super().add(name, target, **options)
        self._formats[name] = speaks
        if waits:
            self._waiting.add(name)

    def format_of(self, name: str) -> str:
        """The format a plug-in speaks."""
        return self._formats[name]

    def waits(self, name: str) -> bool:
        """Whether some of its calls wait for the device."""
        return name in self._waiting


DISPATCHERS: SpeakerRegistry[type[Dispatcher]] = SpeakerRegistry("MoE dispatcher")
EXPERTS: SpeakerRegistry[type[Experts]] = SpeakerRegistry("MoE experts")
ADAPTERS: Registry[Adapter] = Registry("MoE adapter")
"""Named ``outer->inner``: the dispatcher's format and the experts'."""


def adapter_name(outer: str, inner: str) -> str:
    """The name under which the adapter between two formats is registered."""
    return f"{outer}->{inner}"
