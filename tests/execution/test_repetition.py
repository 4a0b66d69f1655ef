"""DRY and XTC against plain loops written from their definitions, alone and in batches; logprobs of named tokens."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_oracle import kept_probabilities, uniform

from headrace.base.sampling import ALL_LOGPROBS, DryPenalty, Exclusion, Penalties, SamplingSpec
from headrace.base.step import RowStart
from headrace.execution import repetition
from headrace.execution.repetition import REACH, XTC_STREAM, DryState, exclude_top_choices
from headrace.execution.rows import Rows
from headrace.execution.sampling import Sampler
from headrace.execution.step import SampleBatch
from headrace.execution.structured.bitmasks import RowBitmasks
from headrace.execution.upload import Upload

DEVICES = [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]
VOCAB = 12


def bits(tokens: set[int], vocab_size: int = VOCAB) -> bytes:
    return np.packbits([t in tokens for t in range(vocab_size)], bitorder="little").tobytes()


def dry_losses(history: list[int], dry: DryPenalty, vocab_size: int) -> list[float]:
    """What each token loses, by looking at every earlier place."""
    breakers = {t for t in range(vocab_size) if dry.breakers[t >> 3] >> (t & 7) & 1}
    seen = history[-dry.last_n:] if dry.last_n > 0 else history
    longest: dict[int, int] = {}
    for end in range(len(seen) - 1):
        length = 0
        while length <= end and seen[end - length] == seen[-1 - length] and seen[-1 - length] not in breakers:
            length += 1
        follower = seen[end + 1]
        longest[follower] = max(longest.get(follower, 0), length)
    return [
        dry.multiplier * dry.base ** (min(longest[t], dry.allowed_len + REACH) - dry.allowed_len)
        if t not in breakers and longest.get(t, 0) >= dry.allowed_len else 0.0
        for t in range(vocab_size)
    ]


class Bench:
    """A sampler and its rows on a device; samples next tokens and keeps the histories."""

    def __init__(self, device: torch.device, vocab_size: int = VOCAB, max_rows: int = 16):
        self.device, self.histories = device, dict[int, list[int]]()
        self.rows = Rows(max_rows, device)
        self.sampler = Sampler(self.rows, max_rows, vocab_size)

    def start(self, row: int, prompt: list[int], spec: SamplingSpec, output: list[int] | None = None) -> None:
        known = self.rows.start(RowStart(row, str(row), [*prompt, *(output or [])], len(prompt), spec))
        self.sampler.start(row, known)
        self.histories[row] = [*prompt, *(output or [])]

    def sample(self, logits: dict[int, torch.Tensor]):
        rows = np.array(list(logits), dtype=np.int64)
        batch = SampleBatch.of(np.stack((rows, np.zeros_like(rows))), 0, self.rows)
        positions = torch.tensor([len(self.histories[row]) - 1 for row in logits], device=self.device)
        upload = Upload()
        self.sampler.pack(batch, upload)
        stacked = torch.stack(list(logits.values())).to(self.device)
        sampled = self.sampler.sample(stacked, positions, batch, upload.send(self.device))
        for row, token in zip(logits, sampled.tokens[0].tolist(), strict=False):
            self.histories[row].append(token)
        return batch, sampled


def random_logits(seed: int, vocab_size: int = VOCAB) -> torch.Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


drys = st.builds(
    DryPenalty, multiplier=st.sampled_from([0.8, 2.0]), base=st.sampled_from([1.0, 1.75]),
    allowed_len=st.integers(1, 4), last_n=st.sampled_from([-1, 3, 8, 1000]),
    breakers=st.sets(st.integers(0, VOCAB - 1), max_size=2).map(bits),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=30), drys), min_size=1, max_size=4))
def test_dry_is_what_a_plain_loop_finds(cases: list[tuple[list[int], DryPenalty]]):
    for device in DEVICES:
        rows, sent = cases, dict[str, torch.Tensor]()
        state = DryState(VOCAB, device)
        table = Rows(8, device)
        for row, (history, dry) in enumerate(rows):
            spec = SamplingSpec(penalties=Penalties(dry=dry))
            state.start(row, table.start(RowStart(row, "r", history, 1, spec)))
        for new in (None, 1, 2):  # then again with tokens that were sampled since
            if new is not None:
                state.push(torch.full((len(rows), 1), new, device=device), sent)
                rows = [([*history, new], dry) for history, dry in rows]
            upload = Upload()
            state.pack(np.arange(len(rows)), upload)
            sent = upload.send(device)
            logits = torch.zeros((len(rows), VOCAB), device=device)
            state.apply(logits, sent)
            expected = [[-loss for loss in dry_losses(history, dry, VOCAB)] for history, dry in rows]
            assert torch.allclose(logits.cpu(), torch.tensor(expected), rtol=1e-5), (rows, logits, expected)


def test_drafts_are_history_to_the_positions_behind_them():
    history, drafts = [5, 1, 2, 3, 4, 1], [2, 3, 4]
    dry = DryPenalty(1.0, 2.0, 2, -1, bits(set()))
    for device in DEVICES:
        state, table = DryState(VOCAB, device), Rows(4, device)
        state.start(0, table.start(RowStart(0, "r", history, 1, SamplingSpec(penalties=Penalties(dry=dry)))))
        upload = Upload()
        state.pack(np.zeros(4, dtype=np.int64), upload, most_new=4)
        sent, logits = upload.send(device), torch.zeros((4, VOCAB), device=device)
        ids = torch.tensor([drafts] * 4, device=device)
        state.apply(logits, sent, ids, torch.arange(4, device=device))
        for seen in range(4):
            expected = [-loss for loss in dry_losses([*history, *drafts[:seen]], dry, VOCAB)]
            assert logits[seen].tolist() == expected, seen
        # two of four new tokens count: the state is that of a row that began with them
        new = torch.tensor([[2, 3, 9, 9]] * 4, device=device)
        state.push(new, sent, (torch.arange(4, device=device) < 2).expand(4, 4))
        upload, logits = Upload(), torch.zeros((1, VOCAB), device=device)
        state.pack(np.zeros(1, dtype=np.int64), upload)
        state.apply(logits, upload.send(device))
        assert logits[0].tolist() == [-loss for loss in dry_losses([*history, 2, 3], dry, VOCAB)]


def test_long_matches_count_up_to_the_reach_and_stay_finite():
    dry = DryPenalty(1.0, 2.0, 3, -1, bits(set()))
    history = [7, *range(10)] + [1] * 400
    losses = dry_losses(history, dry, VOCAB)
    assert losses[1] == 2.0**REACH
    bench = Bench(DEVICES[0])
    bench.start(0, history, SamplingSpec(penalties=Penalties(dry=dry)))
    _, sampled = bench.sample({0: torch.tensor([1.0] + [50.0] + [0.0] * 10)})
    assert sampled.tokens[:2, 0].tolist() == [0, 0], "greedy rows are kept from repeating, too"


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_rows_are_alike_alone_in_a_batch_and_after_a_retraction(device: torch.device):
    spec = SamplingSpec(
        temperature=0.9, top_k=8, top_p=0.95, seed=11,
        penalties=Penalties(1.1, 0.1, 0.2, DryPenalty(0.8, 1.75, 2, -1, bits({3})), Exclusion(0.5, 0.1)),
    )
    others = [SamplingSpec(), SamplingSpec(temperature=1.0, seed=3), SamplingSpec(penalties=Penalties(1.3)),
              SamplingSpec(temperature=1.0, penalties=Penalties(dry=DryPenalty(1, 1.5, 1, 5, bits(set()))))]
    prompt = [1, 2, 3, 4, 1, 2, 3]
    alone, crowd, resumed = Bench(device), Bench(device), Bench(device)
    alone.start(0, prompt, spec)
    for row, other in enumerate(others):
        crowd.start(row, [row, 2, row], other)
    crowd.start(9, prompt, spec)
    for step in range(40):
        logits = random_logits(step)
        if step == 25:
            resumed.start(4, prompt, spec, output=alone.histories[0][len(prompt):])
        alone.sample({0: logits})
        crowd.sample({**{row: random_logits(100 + step + row) for row in range(4)}, 9: logits})
        if step >= 25:
            resumed.sample({4: logits})
    assert alone.histories[0] == crowd.histories[9] == resumed.histories[4]
    assert len(set(alone.histories[0][len(prompt):])) > 3


def excluded_set(logits: np.ndarray, spec: SamplingSpec, position: int) -> set[int]:
    xtc = spec.penalties.xtc
    p = kept_probabilities(logits.astype(np.float64), spec)
    kept = {t for t in range(len(p)) if p[t] > 0}
    above = sorted((t for t in kept if p[t] >= xtc.threshold), key=lambda t: -p[t])
    seed = (spec.seed + XTC_STREAM + 2**63) % 2**64 - 2**63
    is_chosen = uniform(seed, position) < xtc.probability
    return kept - set(above[:-1]) if is_chosen and len(above) > 1 else kept


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(-(2**63), 2**63 - 1), st.integers(0, 1000), st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([0.0, 0.05, 0.2, 0.5]), st.sampled_from([0.3, 1.0, 1.5]),
    st.sampled_from([(0, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.8, 0.0), (5, 0.9, 0.02), (0, 1.0, 0.1)]),
)
def test_xtc_leaves_what_its_definition_leaves(number, seed, position, probability, threshold, temperature, cuts):
    for head in (3, 1024):  # with few of the best tokens first, which may not be enough
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(repetition, "HEAD", head)
            check_xtc(number, seed, position, probability, threshold, temperature, cuts)


def check_xtc(number, seed, position, probability, threshold, temperature, cuts):
    top_k, top_p, min_p = cuts
    xtc = Exclusion(probability, threshold)
    spec = SamplingSpec(temperature, top_k, top_p, min_p, seed, penalties=Penalties(xtc=xtc))
    logits = random_logits(number)
    for device in DEVICES:
        edited = logits.to(device).unsqueeze(0).clone()
        reals = torch.tensor([probability, threshold, temperature, top_p, min_p], dtype=torch.float64, device=device)
        exclude_top_choices(
            edited, torch.tensor([seed], device=device), torch.tensor([position], device=device), reals,
            torch.tensor([top_k], device=device)
        )
        left = {t for t in range(VOCAB) if edited[0, t] > -math.inf}
        assert left == excluded_set(logits.numpy(), spec, position)
        assert all(edited[0, t] == logits[t] for t in left)


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_xtc_has_its_probability_over_positions_and_seeds(device: torch.device):
    spec = SamplingSpec(temperature=1.0, seed=5, penalties=Penalties(xtc=Exclusion(0.25, 0.15)))
    logits = torch.tensor([10.0, 9.5, 9.0] + [-50.0] * (VOCAB - 3))
    bench = Bench(device)
    bench.start(0, [1], spec)
    for _ in range(1200):
        bench.sample({0: logits})
    share = np.bincount(bench.histories[0][1:], minlength=VOCAB) / 1200
    plain = np.exp([0.0, -0.5, -1.0]) / np.exp([0.0, -0.5, -1.0]).sum()
    assert share[:3] == pytest.approx([0.75 * plain[0], 0.75 * plain[1], 0.75 * plain[2] + 0.25], abs=0.05)


def test_xtc_chooses_among_what_the_grammar_allows():
    """Without the mask, the tokens that the grammar allows would be the ones excluded."""
    spec = SamplingSpec(temperature=1.0, seed=5, penalties=Penalties(xtc=Exclusion(1.0, 0.1)))
    logits = torch.tensor([5.0, 5.0, 5.0] + [0.0] * (VOCAB - 3))

    class OneMask:
        def __init__(self):
            self.errors = dict[int, str]()

        def send(self):
            return torch.tensor([[0b1], [-1]], dtype=torch.int32), torch.tensor([0, -1], dtype=torch.int32)

    bench = Bench(DEVICES[0])
    for row in range(2):
        bench.start(row, [1], spec)
    batch, upload = SampleBatch.of(np.array([[0, 1], [0, 0]]), 0, bench.rows), Upload()
    bench.sampler.pack(batch, upload)
    masks: RowBitmasks = OneMask()
    sampled = bench.sampler.sample(
        torch.stack([logits, logits]), torch.zeros(2, dtype=torch.int64), batch, upload.send(DEVICES[0]), masks
    )
    ids, states, _ = sampled.tokens.tolist()
    assert states == [0, 0] and ids[0] == 0 and ids[1] in range(2, VOCAB)


def test_rows_without_these_samplers_pay_nothing():
    """The work of a step without DRY and XTC does not depend on whether others have used them."""
    vocab = 50_000
    bench = Bench(DEVICES[0], vocab)
    logits = random_logits(0, vocab)
    bench.start(0, [1, 2], SamplingSpec(penalties=Penalties(1.2)))

    def measure() -> float:
        times = []
        for _ in range(15):
            begin = time.perf_counter()
            bench.sample({0: logits})
            times.append(time.perf_counter() - begin)
        return sorted(times)[3]

    before = measure()
    dry = DryPenalty(1.0, 1.75, 2, -1, bits(set(), vocab))
    bench.start(1, list(range(2000)), SamplingSpec(penalties=Penalties(dry=dry)))
    bench.sample({1: logits})
    upload = Upload()
    batch = SampleBatch.of(np.array([[0], [0]]), 0, bench.rows)
    bench.sampler.pack(batch, upload)
    assert not [name for name in upload.send(DEVICES[0]) if name.startswith(("dry", "xtc"))]
    assert measure() < 3 * before + 0.005


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_named_and_all_logprobs_of_each_row(device: torch.device):
    bench = Bench(device)
    specs = [
        SamplingSpec(num_logprobs=2, logprob_ids=[7, 3, 7]), SamplingSpec(num_logprobs=ALL_LOGPROBS),
        SamplingSpec(num_logprobs=0, logprob_ids=[1]), SamplingSpec(), SamplingSpec(num_logprobs=3),
    ]
    for row, spec in enumerate(specs):
        bench.start(row, [1], spec)
    logits = {row: random_logits(row) for row in range(5)}
    batch, sampled = bench.sample(logits)
    records = sampled.logprobs.copy_to_host().records(batch.top_counts, batch.id_counts)
    assert list(batch.logged) == [0, 1, 2, 4]
    for row, record in zip(batch.logged, records, strict=True):
        exact = logits[int(row)].log_softmax(-1)
        assert record.id_logprobs == pytest.approx([float(exact[i]) for i in specs[row].logprob_ids], rel=1e-5)
        count = min(specs[row].num_logprobs, VOCAB)
        assert record.top_ids == exact.argsort(descending=True)[:count].tolist()
        assert record.top_logprobs == pytest.approx(exact.sort(descending=True).values[:count].tolist(), rel=1e-5)
