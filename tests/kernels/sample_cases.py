"""Logits and sampling parameters, shared by the tests of all solutions."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.kernels.sample import SampleParams

CUTS = {
    "none": {},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.7},
    "top-k-top-p": {"top_k": 50, "top_p": 0.8},
    "min-p": {"min_p": 0.1},
    "all": {"top_k": 40, "top_p": 0.9, "min_p": 0.05},
    "top-k-beyond-the-vocabulary": {"top_k": 2000},
}


def sample_params(
    rows: int, device: str = "cpu", *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, vocab: int = 0
) -> SampleParams:
    """The same cuts for all rows, whose seeds and positions differ."""
    def fill(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    seed = torch.arange(rows, device=device) * 7919 - 5
    ranked = top_k if top_k else (vocab if top_p < 1 else 0)
    return SampleParams(
        fill(0.8, torch.float64), fill(top_k, torch.int64), fill(top_p, torch.float64), fill(min_p, torch.float64),
        seed, torch.arange(rows, device=device) % 5, has_min_p=min_p > 0, has_top_p=top_p < 1, num_ranked=ranked,
    )


def random_logits(rows: int, vocab: int, device: str = "cpu", *, has_ties: bool = False) -> torch.Tensor:
    logits = 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows))
    return (logits.bfloat16().float() if has_ties else logits).to(device)


def sample_ids(sample: Callable[..., torch.Tensor], logits: torch.Tensor, params: SampleParams) -> torch.Tensor:
    """The ids that a solution of `SAMPLE` samples from a copy of the logits."""
    return sample(logits.clone(), params=params)[0]
