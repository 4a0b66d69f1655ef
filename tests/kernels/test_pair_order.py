"""Thousands of pairs of token and expert sorted by own CUDA C++, against plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from headrace.kernels.moe import pair_order, reference


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts"),
    [(2049, 2, 3), (1025, 4, 32), (8192, 8, 128), (8193, 8, 128), (9001, 8, 60), (4100, 1, 1), (5000, 6, 256)],
)
def test_pairs_are_sorted(num_tokens: int, top_k: int, num_experts: int):
    """With as many pairs as threads keep bits of, and more; with pairs without an expert, and experts without any."""
    torch.manual_seed(num_tokens)
    for least, most in ((0, num_experts), (-1, num_experts), (-1, max(1, num_experts // 2))):
        ids = torch.randint(least, most, (num_tokens, top_k), device="cuda")
        order, place, ends = pair_order.group_pairs(ids, num_experts)
        expected = reference.group_pairs(ids, num_experts)
        there = int(expected[2][-1])
        assert torch.equal(ends, expected[2])
        assert torch.equal(order[:there], expected[0][:there])
        assert torch.equal(place[ids.flatten() >= 0], expected[1][ids.flatten() >= 0])


@pytest.mark.cuda
def test_few_pairs_are_sorted_in_triton(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pair_order, "find_kernel", lambda device: pytest.fail("compiles"))
    ids = torch.randint(-1, 7, (100, 3), device="cuda")
    assert torch.equal(pair_order.group_pairs(ids, 7)[2], reference.group_pairs(ids, 7)[2])
