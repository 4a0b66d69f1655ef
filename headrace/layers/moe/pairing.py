"""`pair_experts`: chooses the best dispatcher and experts that support a layer on this device and between whose token
formats there is an adapter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from headrace.base.errors import ConfigError, PluginError
from headrace.base.registry import Registry
from headrace.kernels.operation import KernelQuery
from headrace.layers.build import Build
from headrace.layers.moe.contract import (
    ADAPTERS,
    DISPATCHERS,
    EXPERTS,
    Adapter,
    ChosenTokens,
    Dispatcher,
    adapter_name,
)
from headrace.layers.spec import MlpSpec

Pair = tuple[str, str]


@dataclass(frozen=True)
class PairedExperts:
    """Dispatcher, adapter and experts as one function from chosen tokens to weighted sums [T, D]. ``is_capturable``:
    it may be recorded in a CUDA graph, as no call waits for the device or depends on numbers of the host."""

    dispatcher: Dispatcher
    adapt: Adapter
    run: Callable[[Any], Any]
    is_capturable: bool

    def __call__(self, tokens: ChosenTokens) -> torch.Tensor:
        sent = self.dispatcher.dispatch(tokens)
        if isinstance(sent, ChosenTokens) and not len(sent.hidden):  # kernels take one row at least
            return self.dispatcher.combine(sent.hidden)
        return self.dispatcher.combine(self.adapt(sent, self.run))


def pair_experts(weights: Any, spec: MlpSpec, build: Build, query: KernelQuery) -> PairedExperts:
    """Choose and build both, and the adapter between them.

    Raises `ConfigError` listing the pairs that are possible when the wanted one is not.
    """
    dispatcher_name, experts_name = choose_pair(
        query, dispatcher=None if build.all2all_backend == "auto" else build.all2all_backend,
        experts=None if build.moe_experts == "auto" else build.moe_experts
    )
    dispatcher = DISPATCHERS.load(dispatcher_name)(build)
    experts = EXPERTS.load(experts_name)(weights, spec, build)
    adapt = find_adapter(DISPATCHERS.format_of(dispatcher_name), EXPERTS.format_of(experts_name))
    return PairedExperts(
        dispatcher, adapt, experts.run, dispatcher.is_capturable and not EXPERTS.waits(experts_name)
    )


def choose_pair(query: KernelQuery, *, dispatcher: str | None = None, experts: str | None = None) -> Pair:
    """Names of a dispatcher and experts: those given, or the best that support the query, load and can be paired."""
    faults: list[str] = []
    dispatchers = _find_able(DISPATCHERS, query, dispatcher, faults)
    able = _find_able(EXPERTS, query, experts, faults)
    for pair in [(d, e) for d in dispatchers for e in able]:
        outer, inner = DISPATCHERS.format_of(pair[0]), EXPERTS.format_of(pair[1])
        if not has_adapter(outer, inner):
            faults.append(
                f"dispatcher {pair[0]!r} speaks {outer}, experts {pair[1]!r} speak {inner}, and no adapter joins the "
                "two"
            )
            continue
        try:  # load now: a plug-in that fails to import makes way for the next pair
            DISPATCHERS.load(pair[0]), EXPERTS.load(pair[1]), find_adapter(outer, inner)
        except PluginError as error:
            faults.append(str(error))
            continue
        return pair
    pairs = ", ".join(f"{d} + {e}" for d, e in list_pairs(query)) or "none"
    raise ConfigError(
        f"no way to compute the experts of this model: {'; '.join(faults)}. Dispatcher + experts that can be joined "
        f"here: {pairs}",
        param="all2all_backend" if dispatcher is not None and dispatcher not in dispatchers else "moe_experts"
    )


def list_pairs(query: KernelQuery) -> list[Pair]:
    """All pairs that support the query and have an adapter, best first; nothing is loaded."""
    return [
        (d, e) for d in _find_able(DISPATCHERS, query, None, []) for e in _find_able(EXPERTS, query, None, [])
        if has_adapter(DISPATCHERS.format_of(d), EXPERTS.format_of(e))
    ]


def _find_able(registry: Registry[Any], query: KernelQuery, wanted: str | None, faults: list[str]) -> list[str]:
    """Names of those that support the query, best first; reasons against the others are added to ``faults``."""
    if wanted is not None and wanted not in registry:
        faults.append(f"there is no {registry.noun} {wanted!r}, only {', '.join(registry.names())}")
    able = []
    for name in registry.names() if wanted is None else [wanted] if wanted in registry else []:
        reason = registry.reason_against(name, query)
        able += [name] if reason is None else []
        faults += [f"{registry.noun} {name!r}: {reason}"] if reason else []
    return able


def has_adapter(outer: str, inner: str) -> bool:
    """Whether there is an adapter from a dispatcher's format to that of experts."""
    return outer == inner or adapter_name(outer, inner) in ADAPTERS


def find_adapter(outer: str, inner: str) -> Adapter:
    """The adapter between two formats; `pass_through` between equal ones."""
    return pass_through if outer == inner else ADAPTERS.load(adapter_name(outer, inner))


def pass_through(tokens: Any, run: Callable[[Any], Any]) -> Any:
    """The adapter between equal formats."""
    return run(tokens)
