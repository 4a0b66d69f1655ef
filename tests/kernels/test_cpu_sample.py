"""Own C++ argmax and sampling against plain torch, for every instruction set here."""

from __future__ import annotations

import pytest
import torch
from cpu_isas import isa  # noqa: F401
from sample_cases import CUTS, random_logits, sample_params

from headrace.kernels.sample import SampleParams, cpu, reference

pytestmark = pytest.mark.usefixtures("isa")


@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize(("rows", "vocab"), [(150, 1531), (40, 64), (9, 1), (30, 20_000)])
def test_draws_what_the_reference_draws(name: str, has_ties: bool, rows: int, vocab: int):
    wide = random_logits(rows, vocab + 5, has_ties=has_ties)
    logits, params = wide[:, :vocab], sample_params(rows, **CUTS[name], vocab=vocab)
    sampled, expected = cpu.sample_rows(logits, params), reference.sample_rows(logits.clone(), params)
    assert int((sampled != expected).sum()) <= rows // 100, "float32 sums may move a border token now and then, no more"


@pytest.mark.parametrize("flatness", [1e-4, 1.0, 30.0])
def test_cuts_of_every_kind_beside_one_another(flatness: float):
    rows, vocab = 200, 700
    logits = random_logits(rows, vocab) / flatness
    logits[::3, torch.randperm(vocab)[:650]] = -torch.inf
    generator, params = torch.Generator().manual_seed(1), sample_params(rows)
    params.temperature = torch.rand(rows, generator=generator, dtype=torch.float64) * 2 + 0.05
    params.top_k = torch.randint(0, 900, (rows,), generator=generator) * (torch.arange(rows) % 2)
    params.top_p = 1 - torch.rand(rows, generator=generator, dtype=torch.float64) * (torch.arange(rows) % 5 < 3)
    params.min_p = torch.rand(rows, generator=generator, dtype=torch.float64) ** 4 * (torch.arange(rows) % 7 < 2)
    params.has_min_p = params.has_top_p = True
    params.num_ranked = vocab
    sampled, expected = cpu.sample_rows(logits, params), reference.sample_rows(logits.clone(), params)
    assert int((sampled != expected).sum()) <= 2
    assert logits.gather(1, sampled.unsqueeze(1)).isfinite().all()


def test_a_row_draws_the_same_alone():
    logits, params = random_logits(3, 5000), sample_params(3, top_k=20, top_p=0.9)
    together = cpu.sample_rows(logits, params)
    for row in range(3):
        part = slice(row, row + 1)
        alone = SampleParams(
            params.temperature[part], params.top_k[part], params.top_p[part], params.min_p[part], params.seed[part],
            params.position[part], has_min_p=False, has_top_p=True, num_ranked=20,
        )
        assert torch.equal(cpu.sample_rows(logits[part], alone), together[part])


def test_rows_without_a_distribution_give_some_token():
    logits = torch.zeros(4, 300)
    logits[0], logits[1, 7], logits[2], logits[3, 5] = float("nan"), float("nan"), -torch.inf, torch.inf
    ids = cpu.sample_rows(logits, sample_params(4, top_k=5, top_p=0.9))
    assert ((ids >= 0) & (ids < 300)).all()


@pytest.mark.parametrize("vocab", [1, 31, 32, 1000, 5003])
def test_find_best(vocab: int):
    logits = random_logits(7, vocab)
    logits[2, vocab // 2], logits[3], logits[4, -1], logits[5, -1] = float("nan"), -torch.inf, torch.inf, float("nan")
    values, ids = cpu.argmax(logits)
    expected = logits.max(-1)
    assert torch.equal(values.nan_to_num(nan=1e30), expected.values.nan_to_num(nan=1e30))
    assert torch.equal(ids[[0, 1, 4, 6]], expected.indices[[0, 1, 4, 6]])
    assert ((ids >= 0) & (ids < vocab)).all()


def test_wrong_shapes_are_refused():
    with pytest.raises(RuntimeError, match="float32"):
        cpu.argmax(torch.zeros(2, 8, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="per-row arguments"):
        cpu.sample_rows(torch.zeros(3, 8), sample_params(2))
