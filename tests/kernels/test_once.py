"""`cache_once`: one call for each set of arguments, errors not kept, and torch.compile sees through it."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.once import cache_once


def test_one_call_for_each_set_of_arguments():
    calls = []

    @cache_once
    def make(*args: int, **kwargs: int) -> object:
        """Makes things."""
        calls.append((args, kwargs))
        return object()

    assert make(1, x=2, y=3) is make(1, y=3, x=2)
    assert make(1) is not make(2) and make(1) is make(1)
    assert make(1) is not make(x=1), "names are part of the key"
    assert len(calls) == 4
    assert make.__name__ == "make" and make.__doc__ == "Makes things."


def test_errors_are_not_kept():
    attempts = []

    @cache_once
    def fail_once(x: int) -> int:
        attempts.append(x)
        if len(attempts) == 1:
            raise RuntimeError("not yet")
        return x

    with pytest.raises(RuntimeError):
        fail_once(1)
    assert [fail_once(1), fail_once(1)] == [1, 1] and len(attempts) == 2
    with pytest.raises(TypeError, match="unhashable"):
        fail_once([1])


def test_inside_compiled_code():
    calls = []

    @cache_once
    def table(size: int, *, fill: float = 1.0) -> torch.Tensor:
        calls.append(size)
        return torch.full((size,), fill)

    table(4, fill=2.0)

    @torch.compile(backend="eager", fullgraph=True)
    def scale(x: torch.Tensor) -> torch.Tensor:
        return x * table(4, fill=2.0)

    for _ in range(3):
        assert torch.equal(scale(torch.arange(4.0)), 2 * torch.arange(4.0))
    assert calls == [4]
