"""`cache_once`: a cache without bound, lock or expiry, for functions that make tables of constants. torch.compile
traces into it, as it does not into ``functools.cache``."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def cache_once(function: Callable[P, T]) -> Callable[P, T]:
    """Call ``function`` once for each set of hashable arguments, in whatever order its keywords come. ``f(1)`` and
    ``f(x=1)`` are different sets. An error is not cached."""
    results: dict[Any, T] = {}

    @wraps(function)
    def once(*args: P.args, **kwargs: P.kwargs) -> T:
        key = (args, tuple(sorted(kwargs.items())))
        if key not in results:
            results[key] = function(*args, **kwargs)
        return results[key]

    return once
