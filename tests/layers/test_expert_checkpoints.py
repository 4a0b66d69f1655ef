"""Gate and up by turns, as some checkpoints have them, apart."""

from __future__ import annotations

import pytest
import torch

from headrace.layers.moe.checkpoint import separate_halves


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_turns_are_taken_apart(dim: int):
    x = torch.randn(8, 8, 8, generator=torch.Generator().manual_seed(0))
    even, odd = separate_halves(x, dim=dim)
    assert (
        torch.equal(even, x.index_select(dim, torch.arange(0, 8, 2)))
        and torch.equal(odd, x.index_select(dim, torch.arange(1, 8, 2)))
    )
    assert even.data_ptr() == x.data_ptr(), "a view"


def test_turns_that_do_not_come_out_even():
    with pytest.raises(ValueError, match="no halves"):
        separate_halves(torch.zeros(2, 7))
