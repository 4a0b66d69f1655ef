"""`cache_once`: results kept for good, for functions of a few hashable arguments that make tables of constants.

Refuses: bounds, locks, expiry. ``functools`` has these, and torch.compile does not trace into it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def cache_once(function: Callable[P, T]) -> Callable[P, T]:
    """Call ``function`` once for each set of arguments; the order of keyword arguments makes none. An error is not
    kept."""
    results: dict[Any, T] = {}

    @wraps(function)
    def once(*args: P.args, **kwargs: P.kwargs) -> T:
        key = (args, tuple(sorted(kwargs.items())))
        if key not in results:
            results[key] = function(*args, **kwargs)
        return results[key]

    return once
