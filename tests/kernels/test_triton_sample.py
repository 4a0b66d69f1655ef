"""Triton sampling: the same tokens as the reference, whatever the cuts and the batch."""

from __future__ import annotations

import pytest
import torch
from sample_cases import CUTS, random_logits, sample_ids, sample_params

pytest.importorskip("triton")

from headrace.kernels.sample import SampleParams, reference
from headrace.kernels.sample import triton as sample

DEVICES = [pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    if not torch.cuda.is_available():
        monkeypatch.setattr(sample, "BLOCK", 256)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("name", CUTS)
def test_draws_what_the_reference_draws(name, has_ties, device):
    rows, vocab = (200, 151936) if device == "cuda" else (4, 400)
    logits = random_logits(rows, vocab, device, has_ties=has_ties)
    params = sample_params(rows, device, **CUTS[name], vocab=vocab)
    sampled, expected = sample_ids(sample.sample, logits, params), reference.sample_rows(logits.clone(), params)
    differing = int((sampled != expected).sum())
    assert differing <= rows // 100, "float32 sums may move a border token now and then, no more"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spread", [0.05, 0.9, 6.0], ids=["all alike", "below the first guess", "few"])
def test_wherever_the_cut_falls(spread, device):
    """Above the first guess of it or below, among more tokens than are gathered or one; beside rows that are not
    cut."""
    rows, vocab = (64, 151936) if device == "cuda" else (2, 500)
    logits = random_logits(rows, vocab, device) * spread
    for cut in (
        {"top_p": 0.97}, {"top_k": 300}, {"top_k": 200, "top_p": 0.9}
    ) if device == "cuda" else ({"top_k": 200, "top_p": 0.9},):
        params = sample_params(rows, device, **cut, vocab=vocab)
        params.top_p[1::3], params.top_k[1::3] = 1.0, 0
        sampled, expected = sample_ids(sample.sample, logits, params), reference.sample_rows(logits.clone(), params)
        assert int((sampled != expected).sum()) <= rows // 50, cut


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_draws_the_same_alone(device):
    logits = random_logits(2, 150, device, has_ties=False)
    params = sample_params(2, device, top_k=20, top_p=0.9)
    together = sample_ids(sample.sample, logits, params)
    for row in range(2):
        part = slice(row, row + 1)
        alone = SampleParams(
            params.temperature[part], params.top_k[part], params.top_p[part], params.min_p[part], params.seed[part],
            params.position[part], has_min_p=False, has_top_p=True, num_ranked=20,
        )
        assert torch.equal(sample_ids(sample.sample, logits[part], alone), together[part])


@pytest.mark.parametrize("device", DEVICES)
def test_rows_without_a_distribution_give_some_token(device):
    logits = torch.zeros(3, 300, device=device)
    logits[0], logits[1, 7], logits[2] = float("nan"), float("nan"), float("-inf")
    ids = sample_ids(sample.sample, logits, sample_params(3, device, top_k=5, top_p=0.9))
    assert ((ids >= 0) & (ids < 300)).all()


@pytest.mark.parametrize("device", DEVICES)
def test_find_best(device):
    logits = random_logits(5, 1000, device, has_ties=False)
    logits[2, 7], logits[3] = float("nan"), float("-inf")
    values, ids = sample.argmax(logits)
    expected = logits.max(-1)
    assert torch.equal(values.nan_to_num(nan=1e30), expected.values.nan_to_num(nan=1e30))
    assert torch.equal(ids[[0, 1, 4]], expected.indices[[0, 1, 4]])
    assert ((ids >= 0) & (ids < 1000)).all()


@pytest.mark.parametrize("device", DEVICES)
def test_keep_best_stores_what_a_greedy_step_needs(device):
    logits = random_logits(5, 9000, device, has_ties=False)
    logits[2, 7], logits[3], logits[4, 1] = float("nan"), float("-inf"), float("inf")
    sampled, expected = sample.sample_greedy(logits), reference.sample_greedy(logits)
    assert sampled[1].tolist() == expected[1].tolist() == [0, 0, 1, 1, 1]
    assert torch.equal(sampled[0, :2], logits[:2].argmax(-1))
    assert torch.equal(sampled[0, [0, 1, 4]], expected[0, [0, 1, 4]])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shares", [[9000], [4000, 5000], [1, 8998, 1], [1128, 1124] * 4])
def test_shares_of_the_vocabulary_give_what_all_of_it_does(shares, device):
    vocab = sum(shares)
    logits = random_logits(6, vocab, device, has_ties=False)
    logits[2, 7], logits[3], logits[4, 1] = float("nan"), float("-inf"), float("inf")
    logits[5, [0, vocab - 1]] = 1e4  # the first of two that are alike
    found, firsts = [], [sum(shares[:i]) for i in range(len(shares))]
    for first, part in zip(firsts, logits.split(shares, dim=1), strict=True):
        found.append(sample.argmax_share(part, first))
        expected = reference.argmax_share(part, first)
        assert torch.equal(found[-1][[0, 1, 5]], expected[[0, 1, 5]])
    expected = reference.sample_greedy(logits)
    for merge in (sample.merge_shares, reference.merge_shares):
        merged = merge(torch.cat(found, dim=1))
        assert torch.equal(merged[1], expected[1])
        assert torch.equal(merged[0, [0, 1, 4, 5]], expected[0, [0, 1, 4, 5]])
        assert ((merged[0] >= 0) & (merged[0] < vocab)).all()
