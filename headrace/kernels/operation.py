"""`Operation`: the registry of one operation's solutions. A package holds the contracts of one operation or a few,
``reference.py`` (plain torch, the oracle) and one module per faster solution; its ``__init__`` registers them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headrace.base.registry import Registry


@dataclass(frozen=True)
class KernelQuery:
    """What a solution must support to be chosen. ``device``: torch device type; ``dtype``: torch dtype name;
    ``capability``: CUDA compute capability ((0, 0) elsewhere); ``shape``: the sizes that the operation documents."""

    device: str
    dtype: str
    capability: tuple[int, int] = (0, 0)
    shape: dict[str, int] = field(default_factory=dict)


class Operation(Registry[Callable[..., Any]]):
    """Solutions of one operation. ``OPERATION.choose(query)`` returns the callable once, when a layer is built;
    nothing is looked up on the hot path."""


def requires(
    *, device: str | None = None, dtypes: tuple[str, ...] = (), capability: tuple[int, int] = (0, 0)
) -> Callable[[KernelQuery], str | None]:
    """A ``supports`` predicate for the common cases: it returns the reason against a query, or None. ``capability`` is
    the least CUDA compute capability."""

    def reason_against(query: KernelQuery) -> str | None:
        if device is not None and query.device != device:
            return f"needs a {device} device"
        if dtypes and query.dtype not in dtypes:
            return f"takes {', '.join(dtypes)}, not {query.dtype}"
        if query.device == "cuda" and query.capability < capability:
            return f"needs compute capability {capability[0]}.{capability[1]}"
        return None

    return reason_against


def choose_fused(operation: Operation, query: KernelQuery) -> Callable[..., Any] | None:
    """The best kernel of an operation that fuses several, or None if there is only the reference: then the separate
    operations, each with its own best kernel, are faster."""
    chosen = operation.choose(query)
    return None if chosen is operation.load("reference") else chosen
