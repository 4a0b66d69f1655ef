"""`cache_once`: a cache without bound, lock or expiry, for functions that make tables of constants. Unlike
``functools.cache`` it can be traced by torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def cache_once(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap ``function`` so that it is called once for each set of hashable arguments; the order of keywords does not
    matter, but ``f(1)`` and ``f(x=1)`` are different sets. An error is not cached. Two threads may both compute a
    missing entry."""
    results: dict[Any, T] = {}

    @wraps(function)
    def once(*args: P.args, **kwargs: P.kwargs) -> T:
        key = (args, tuple(sorted(kwargs.items())))
        if key not in results:
            results[key] = function(*args, **kwargs)
        return results[key]

    return once
