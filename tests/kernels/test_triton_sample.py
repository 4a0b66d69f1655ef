"""Triton sampling: the same tokens as the reference draws, whatever the cuts, and from whatever batch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from headrace.kernels.sample import DrawParams, reference
from headrace.kernels.sample import triton as sample

DEVICES = [pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    if not torch.cuda.is_available():
        monkeypatch.setattr(sample, "BLOCK", 256)


def _params(rows, device, *, top_k=0, top_p=1.0, min_p=0.0, vocab=0):
    def fill(value, dtype):
        return torch.full((rows,), value, dtype=dtype, device=device)

    seed = torch.arange(rows, device=device) * 7919 - 5
    ranked = top_k if top_k else (vocab if top_p < 1 else 0)
    return DrawParams(
        fill(0.8, torch.float64), fill(top_k, torch.int64), fill(top_p, torch.float64), fill(min_p, torch.float64), seed,
        torch.arange(rows, device=device) % 5, has_min_p=min_p > 0, has_top_p=top_p < 1, num_ranked=ranked,
    )


def _logits(rows, vocab, device, *, has_ties):
    logits = 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows))
    return (logits.bfloat16().float() if has_ties else logits).to(device)


CUTS = {
    "none": {},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.7},
    "top-k-top-p": {"top_k": 50, "top_p": 0.8},
    "min-p": {"min_p": 0.1},
    "all": {"top_k": 40, "top_p": 0.9, "min_p": 0.05},
    "top-k-beyond-the-vocabulary": {"top_k": 2000},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("name", CUTS)
def test_draws_what_the_reference_draws(name, has_ties, device):
    rows, vocab = (200, 151936) if device == "cuda" else (4, 400)
    logits = _logits(rows, vocab, device, has_ties=has_ties)
    params = _params(rows, device, **CUTS[name], vocab=vocab)
    drawn, expected = sample.sample(logits.clone(), params), reference.sample(logits.clone(), params)
    differing = int((drawn != expected).sum())
    assert differing <= rows // 100, "float32 sums may move a border token now and then, no more"


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_draws_the_same_alone(device):
    logits = _logits(2, 150, device, has_ties=False)
    params = _params(2, device, top_k=20, top_p=0.9)
    together = sample.sample(logits, params)
    for row in range(2):
        part = slice(row, row + 1)
        alone = DrawParams(
            params.temperature[part], params.top_k[part], params.top_p[part], params.min_p[part], params.seed[part], params.position[part],
            has_min_p=False, has_top_p=True, num_ranked=20,
        )
        assert torch.equal(sample.sample(logits[part], alone), together[part])


@pytest.mark.parametrize("device", DEVICES)
def test_rows_without_a_distribution_give_some_token(device):
    logits = torch.zeros(3, 300, device=device)
    logits[0], logits[1, 7], logits[2] = float("nan"), float("nan"), float("-inf")
    ids = sample.sample(logits, _params(3, device, top_k=5, top_p=0.9))
    assert ((ids >= 0) & (ids < 300)).all()


@pytest.mark.parametrize("device", DEVICES)
def test_find_best(device):
    logits = _logits(5, 1000, device, has_ties=False)
    logits[2, 7], logits[3] = float("nan"), float("-inf")
    values, ids = sample.find_best(logits)
    expected = logits.max(-1)
    assert torch.equal(values.nan_to_num(nan=1e30), expected.values.nan_to_num(nan=1e30))
    assert torch.equal(ids[[0, 1, 4]], expected.indices[[0, 1, 4]])
    assert ((ids >= 0) & (ids < 1000)).all()


@pytest.mark.parametrize("device", DEVICES)
def test_keep_best_stores_what_a_greedy_step_needs(device):
    logits = _logits(5, 9000, device, has_ties=False)
    logits[2, 7], logits[3], logits[4, 1] = float("nan"), float("-inf"), float("inf")
    rows, last_token = torch.tensor([6, 1, 3, 0, 2], device=device), torch.full((8,), -5, device=device)
    other = last_token.clone()
    drawn, expected = sample.keep_best(logits, rows, last_token), reference.keep_best(logits, rows, other)
    assert drawn[1].tolist() == expected[1].tolist() == [0, 0, 1, 1, 1]
    assert torch.equal(drawn[0, :2], logits[:2].argmax(-1)) and torch.equal(drawn[0, [0, 1, 4]], expected[0, [0, 1, 4]])
    assert torch.equal(last_token[rows], drawn[0]) and last_token[[4, 5, 7]].tolist() == [-5, -5, -5]
