"""Two halves by turns, as kernels want gate and up, and apart again, as checkpoints have them."""

from __future__ import annotations

import pytest
import torch

from headrace.layers.moe.checkpoint import interleave_halves, separate_halves


@pytest.mark.parametrize(("size", "group"), [(256, 64), (12, 1), (12, 3), (8, 4)])
def test_turns_of_a_group_each(size: int, group: int):
    turns = interleave_halves(torch.arange(size)[None], group=group)[0].tolist()
    half = size // 2
    expected = [
        x
        for start in range(0, half, group)
        for x in (*range(start, start + group), *range(half + start, half + start + group))
    ]
    assert turns == expected


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_apart_again(dim: int):
    x = torch.randn(8, 8, 8, generator=torch.Generator().manual_seed(0))
    first, second = separate_halves(interleave_halves(x, group=2, dim=dim), group=2, dim=dim)
    assert torch.equal(torch.cat((first, second), dim=dim), x)
    even, odd = separate_halves(x, group=1, dim=dim)
    assert (
        torch.equal(even, x.index_select(dim, torch.arange(0, 8, 2)))
        and torch.equal(odd, x.index_select(dim, torch.arange(1, 8, 2)))
    )
    assert even.data_ptr() == x.data_ptr(), "a view"


@pytest.mark.parametrize(
    ("size", "group", "said"), [(7, 1, "no halves"), (12, 4, "no multiple of 4"), (64, 64, "no multiple of 64")]
)
def test_turns_that_do_not_come_out_even(size: int, group: int, said: str):
    for function in (interleave_halves, separate_halves):
        with pytest.raises(ValueError, match=said):
            function(torch.zeros(2, size), group=group)
