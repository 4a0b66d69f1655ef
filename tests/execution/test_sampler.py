"""The sampler against exact distributions, an independent numpy implementation, and itself in other batches."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_oracle import edited_logits, kept_probabilities, sample, uniform

from headrace.base.sampling import LogitRules, Penalties, SamplingSpec, ThinkingLimit
from headrace.base.step import RowStart
from headrace.execution.rows import Rows
from headrace.execution.sampling import Sampled, Sampler
from headrace.execution.step import SampleBatch
from headrace.execution.upload import Upload
from headrace.kernels.sample import NOT_FINITE, NOTHING_ALLOWED, OK, SampleParams
from headrace.kernels.sample import reference as sample_reference

CPU = torch.device("cpu")


class Bench:
    """A sampler with rows of its own; samples the next tokens of any of them."""

    def __init__(self, vocab_size: int, max_rows: int = 16):
        self.rows = Rows(max_rows, CPU)
        self.sampler = Sampler(self.rows, max_rows, vocab_size)
        self.lens: dict[int, int] = {}

    def start(self, row: int, prompt: list[int], spec: SamplingSpec, output: tuple[int, ...] = ()) -> None:
        known = self.rows.start(RowStart(row, str(row), [*prompt, *output], len(prompt), spec))
        self.sampler.start(row, known)
        self.lens[row] = len(prompt) + len(output)

    def sample(self, logits: dict[int, torch.Tensor]) -> tuple[SampleBatch, Sampled]:
        rows = np.array(list(logits), dtype=np.int64)
        batch = SampleBatch.of(np.stack((rows, np.zeros_like(rows))), 0, self.rows)
        positions = torch.tensor([self.lens[row] - 1 for row in logits])
        upload = Upload()
        self.sampler.pack(batch, upload)
        sampled = self.sampler.sample(torch.stack(list(logits.values())), positions, batch, upload.send(CPU))
        for row in logits:
            self.lens[row] += 1
        return batch, sampled


def random_logits(seed: int, vocab_size: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def params_of(
    count: int, vocab_size: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0,
    seed: int = 0
) -> SampleParams:
    full = torch.full
    return SampleParams(
        full((count,), temperature, dtype=torch.float64), full((count,), top_k),
        full((count,), top_p, dtype=torch.float64),
        full((count,), min_p, dtype=torch.float64), full((count,), seed), torch.arange(count),
        has_min_p=min_p > 0, has_top_p=top_p < 1, num_ranked=top_k or (vocab_size if top_p < 1 else 0),
    )


@pytest.mark.parametrize("seed", [0, 1, -5, 2**63 - 1, -(2**63)])
def test_uniform_is_the_documented_hash(seed: int):
    positions = torch.tensor([0, 1, 2, 1000, 2**31])
    found = sample_reference.uniform(torch.full((5,), seed), positions)
    assert found.dtype == torch.float64
    assert found.tolist() == [uniform(seed, int(p)) for p in positions]


def test_uniforms_are_uniform_over_seeds_and_over_positions():
    for seeds, positions in (
        (torch.arange(20000), torch.zeros(20000, dtype=torch.int64)),
        (torch.zeros(20000, dtype=torch.int64), torch.arange(20000))
    ):
        values = sample_reference.uniform(seeds, positions)
        counts = torch.histc(values, bins=50, min=0, max=1)
        chi_square = float(((counts - 400) ** 2 / 400).sum())
        assert chi_square < 95  # 49 degrees of freedom: exceeded with probability 1e-4, and the seeds are fixed
        assert abs(float(torch.corrcoef(torch.stack((values[:-1], values[1:])))[0, 1])) < 0.03


@pytest.mark.parametrize(
    "cut",
    [
        {}, {"temperature": 0.6}, {"temperature": 1.7, "top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1},
        {"top_k": 12, "top_p": 0.7, "min_p": 0.02, "temperature": 1.2}
    ]
)
def test_samples_follow_the_exact_distribution(cut: dict):
    vocab_size, count = 24, 20000
    logits = random_logits(7, vocab_size, 1.5)
    ids = sample_reference.sample_rows(logits.repeat(count, 1), params_of(count, vocab_size, seed=11, **cut))
    expected = kept_probabilities(logits.numpy(), SamplingSpec(**{"temperature": 1.0, **cut}))
    observed = np.bincount(ids.numpy(), minlength=vocab_size)
    kept = expected > 0
    assert not observed[~kept].any()
    chi_square = float(((observed[kept] - count * expected[kept]) ** 2 / (count * expected[kept])).sum())
    freedom = kept.sum() - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 8


def test_ties_with_the_last_token_kept_are_kept():
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0, -3.0]]).repeat(4000, 1)
    assert set(sample_reference.sample_rows(logits.clone(), params_of(4000, 6, top_k=2)).tolist()) == {1, 2, 3, 4}
    assert set(sample_reference.sample_rows(logits.clone(), params_of(4000, 6, top_k=1)).tolist()) == {1}
    assert set(sample_reference.sample_rows(logits.clone(), params_of(4000, 6, top_p=1e-6)).tolist()) == {1}


def test_slicing_does_not_change_samples(monkeypatch: pytest.MonkeyPatch):
    logits = torch.stack([random_logits(i, 60) for i in range(9)])
    whole = sample_reference.sample_rows(logits.clone(), params_of(9, 60, top_p=0.9))
    monkeypatch.setattr(sample_reference, "SLICE_NUMEL", 130)
    assert torch.equal(sample_reference.sample_rows(logits.clone(), params_of(9, 60, top_p=0.9)), whole)


def test_large_vocabulary_samples_alone_as_in_a_batch():
    """Large enough that torch would split a reduction over one row between threads, had we used one."""
    vocab_size = 150_000
    rows = {i: random_logits(i, vocab_size, 1.0) for i in range(4)}
    specs = [
        SamplingSpec(temperature=1.0, seed=i, top_k=k, top_p=p) for i,
        (k, p) in enumerate(((0, 1.0), (0, 0.95), (50, 0.9), (1000, 1.0)))
    ]
    together, tokens = Bench(vocab_size), []
    for row, spec in enumerate(specs):
        together.start(row, [1], spec)
        alone = Bench(vocab_size)
        alone.start(9, [1], spec)
        tokens.append(int(alone.sample({9: rows[row].clone()})[1].tokens[0]))
    assert together.sample({r: x.clone() for r, x in rows.items()})[1].tokens[0].tolist() == tokens


def test_short_ranking_and_full_sort_sample_the_same(monkeypatch: pytest.MonkeyPatch):
    logits = torch.stack([random_logits(i, 3000, 0.2 + i % 4) for i in range(40)])
    params = params_of(40, 3000, top_p=0.9)
    params.top_k[::3], params.top_p[::5] = 40, 1.0
    params.top_k[1] = 2000
    sampled = []
    for head in (64, 1024, 3000):
        monkeypatch.setattr(sample_reference, "HEAD", head)
        sampled.append([sample_reference.sample_rows(logits.clone(), params).tolist()])
        for i in range(40):
            alone = SampleParams(
                *(
                    t[i : i + 1]
                    for t in (
                        params.temperature, params.top_k, params.top_p, params.min_p, params.seed, params.position
                    )
                ),
                has_min_p=False, has_top_p=True, num_ranked=int(params.top_k[i]) or 3000,
            )
            assert sample_reference.sample_rows(logits[i : i + 1].clone(), alone).tolist() == [sampled[-1][0][i]]
    assert sampled[0] == sampled[1] == sampled[2]


V = 13
token = st.integers(0, V - 1)
penalties = st.none() | st.builds(Penalties, st.floats(0.5, 2.0), st.floats(-2, 2), st.floats(-2, 2))
rules = st.none() | st.builds(
    LogitRules, st.dictionaries(token, st.floats(-5, 5), max_size=4),
    st.lists(token, min_size=4, max_size=9, unique=True) | st.just([]),
    st.lists(st.lists(token, min_size=1, max_size=3), max_size=3), st.integers(0, 4),
    st.lists(token, max_size=2, unique=True),
)
specs = st.builds(
    SamplingSpec, st.sampled_from([0.0, 0.3, 1.0, 2.5]), st.sampled_from([0, 1, 3, 8, 50]),
    st.sampled_from([1.0, 0.9, 0.5, 0.05]),
    st.sampled_from([0.0, 0.05, 0.3]), st.integers(-(2**63), 2**63 - 1), st.sampled_from([-1, 0, 3]), st.just(-1),
    penalties, rules,
)
prompts = st.lists(token, min_size=1, max_size=6)


@settings(max_examples=120, deadline=None)
@given(st.lists(st.tuples(specs, prompts), min_size=1, max_size=5), st.integers(0, 10**6))
def test_every_processor_against_numpy_and_every_row_against_itself_alone(requests: list, seed: int):
    bench, outputs = Bench(V), [[] for _ in requests]
    alone = [Bench(V) for _ in requests]
    for row, (spec, prompt) in enumerate(requests):
        bench.start(row, prompt, spec)
        alone[row].start(3, prompt, spec)
    for step in range(4):
        logits = {row: random_logits(seed + 31 * step + row, V) for row in range(len(requests))}
        batch, sampled = bench.sample({row: x.clone() for row, x in logits.items()})
        for row, (spec, prompt) in enumerate(requests):
            chosen = int(sampled.tokens[0, row])
            assert chosen == int(alone[row].sample({3: logits[row].clone()})[1].tokens[0])
            assert chosen == int(bench.rows.tensors.last_token[row])
            x = edited_logits(logits[row].numpy(), spec, prompt, outputs[row])
            if not np.isfinite(x).any():
                assert sampled.tokens[1, row] == NOTHING_ALLOWED
            elif spec.is_greedy:
                assert sampled.tokens[1, row] == OK
                assert x[chosen] == pytest.approx(x.max(), abs=1e-5)
            else:
                assert sampled.tokens[1, row] == OK
                _check_sample(x, spec, chosen, step)
            outputs[row].append(chosen)
        _check_logprobs(batch, sampled, logits)


def _check_sample(x: np.ndarray, spec: SamplingSpec, chosen: int, position: int) -> None:
    """The oracle's token, unless float32 rounding moved a cut or a border within 1e-5: then merely possible."""
    probabilities = kept_probabilities(x, spec)
    if sample(probabilities, spec.seed, position) == chosen:
        return
    for shift in (-1e-5, 1e-5):
        nudged = kept_probabilities(
            x, SamplingSpec(spec.temperature, spec.top_k, min(1.0, spec.top_p + shift), max(0.0, spec.min_p + shift))
        )
        cumulative = np.cumsum(nudged)
        near = [
            int(np.searchsorted(cumulative, uniform(spec.seed, position) + s, side="right")) for s in (-1e-5, 0, 1e-5)
        ]
        if chosen in near:
            return
    raise AssertionError(f"sampled {chosen}, expected {sample(probabilities, spec.seed, position)}")


def _check_logprobs(batch: SampleBatch, sampled: Sampled, logits: dict[int, torch.Tensor]) -> None:
    if not len(batch.logged):
        assert sampled.logprobs is None
        return
    for place, record in zip(batch.logged, sampled.logprobs.records(batch.top_counts, batch.id_counts), strict=True):
        oracle = logits[int(batch.rows[place])].log_softmax(-1)
        assert record.token_id == int(sampled.tokens[0, place])
        assert record.logprob == pytest.approx(float(oracle[record.token_id]), abs=1e-6)
        assert record.rank == 1 + int((oracle > oracle[record.token_id]).sum())
        best = oracle.topk(batch.top_counts[list(batch.logged).index(place)])
        assert record.top_ids == best.indices.tolist()
        assert record.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-6)


def test_same_seed_same_tokens_and_other_seed_other_tokens():
    tokens = []
    for seed in (5, 5, 6):
        bench = Bench(50)
        bench.start(2, [1, 2], SamplingSpec(temperature=1.0, seed=seed))
        tokens.append([int(bench.sample({2: random_logits(i, 50, 0.5)})[1].tokens[0]) for i in range(20)])
    assert tokens[0] == tokens[1] != tokens[2]


def test_non_finite_rows_are_told_apart():
    bench = Bench(8)
    logits = {row: random_logits(row, 8) for row in range(5)}
    logits[1][4] = math.nan
    logits[2][0] = math.inf
    logits[3][:] = -math.inf
    logits[4][2] = -math.inf
    for row in logits:
        bench.start(
            row, [0],
            SamplingSpec(
                temperature=1.0 if row % 2 else 0.0, seed=row, rules=LogitRules(bias={1: 1.0}) if row == 2 else None
            )
        )
    ids, states, counts = bench.sample(logits)[1].tokens.tolist()
    assert counts == [1] * 5
    assert states == [OK, NOT_FINITE, NOT_FINITE, NOT_FINITE, OK]
    assert all(0 <= token < 8 for token in ids)


def test_state_of_penalties_is_allocated_only_when_asked_for_and_reused():
    bench = Bench(40)
    bench.start(0, [1], SamplingSpec())
    assert bench.sampler._penalties._counts.numel() == 0
    for round_ in range(3):
        for row in range(6):
            bench.start(row, [row, round_], SamplingSpec(penalties=Penalties(1.0, 1.5, 0.5)), output=(row + 20,))
        assert len(bench.sampler._penalties._counts) == 8
        logits = {row: torch.zeros(40) for row in range(6)}
        for row in range(6):
            logits[row][row + 20] = 1.9  # 1.9 - 1.5 - 0.5 < 0.1
            logits[row][39] = 0.1
        assert bench.sample(logits)[1].tokens[0].tolist() == [39] * 6
        for row in range(6):
            bench.sampler.release(row)


def test_bad_word_over_the_border_of_prompt_and_output():
    bench = Bench(10)
    bench.start(0, [5, 6], SamplingSpec(rules=LogitRules(bad_words=[[6, 7], [6, 8, 9]])))
    best = torch.zeros(10)
    best[7], best[8] = 3.0, 2.0
    assert int(bench.sample({0: best.clone()})[1].tokens[0]) == 8
    best[9] = 4.0
    assert int(bench.sample({0: best.clone()})[1].tokens[0]) == 7
    assert int(bench.sample({0: best.clone()})[1].tokens[0]) == 9


def test_longer_bad_words_of_a_later_row_keep_the_history_of_others():
    bench = Bench(10)
    bench.start(0, [1, 2], SamplingSpec(rules=LogitRules(bad_words=[[2, 9]])))
    bench.start(1, [3, 4, 5, 6], SamplingSpec(rules=LogitRules(bad_words=[[3, 4, 5, 6, 9]])))
    best = torch.zeros(10)
    best[9], best[8] = 2.0, 1.0
    assert bench.sample({0: best.clone(), 1: best.clone()})[1].tokens[0].tolist() == [8, 8]
    assert bench.sample({0: best.clone(), 1: best.clone()})[1].tokens[0].tolist() == [9, 9]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_reasoning_is_ended_at_its_limit(temperature):
    """End is token 7, start token 3; what a row would say without a limit is fixed by its logits."""
    def say(spec_limit: ThinkingLimit | None, wanted: list[int], known: tuple[int, ...] = ()) -> list[int]:
        bench = Bench(12)
        bench.start(
            1, [3, 5], SamplingSpec(temperature=temperature, rules=LogitRules(bias={11: -1.0}, thinking=spec_limit)),
            output=known
        )
        bench.start(2, [5], SamplingSpec(rules=LogitRules(bias={0: 1.0})))
        said = []
        for token in wanted:
            logits = torch.full((12,), -50.0)
            logits[token] = 50.0
            _, sampled = bench.sample({2: logits.clone(), 1: logits})
            said.append(int(sampled.tokens[0, 1]))
            assert int(sampled.tokens[0, 0]) == token, "other rows are left alone"
        return said

    assert say(None, [1, 2, 4, 5]) == [1, 2, 4, 5]
    assert say(ThinkingLimit(2, 7), [1, 2, 4, 5]) == [1, 2, 7, 5], "ended once, then free"
    assert say(ThinkingLimit(0, 7), [1, 2]) == [7, 2]
    assert say(ThinkingLimit(2, 7), [1, 7, 4, 5]) == [1, 7, 4, 5], "ended by itself"
    assert say(ThinkingLimit(3, 7, 3), [3, 2, 4, 5, 6]) == [3, 2, 4, 7, 6]
    assert say(ThinkingLimit(3, 7, 3), [1, 2, 4, 5, 6]) == [1, 2, 4, 5, 6], "never begun"
    assert say(ThinkingLimit(2, 7), [4, 5], known=(1, 2)) == [7, 5], "started again with what it had said"
    assert say(ThinkingLimit(2, 7), [4, 5], known=(7, 2)) == [4, 5]
    assert say(ThinkingLimit(3, 7, 3), [4, 5], known=(3, 2, 1)) == [7, 5]
