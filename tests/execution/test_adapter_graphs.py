"""Captured steps with adapters say the same as plain ones, and steps without adapters use other graphs."""

from __future__ import annotations

import random

import pytest
import torch
from driver import Driver
from test_families_through_plans import NUM_PAGES, PAGE_SIZE, VOCAB_SIZE, PretendedRecorder, build, open_steps

from headrace.base.sampling import SamplingSpec
from headrace.execution.runner import Runner
from headrace.kernels.lora import is_dense
from headrace.layers.batch import ForwardBatch
from headrace.layers.lora import parts as parts_module
from headrace.layers.lora.contract import AdaptedPart, AdapterWeights
from headrace.layers.lora.parts import BankSizes
from headrace.layers.lora.sites import PreparedAdapter

SLOTS = 3


def make_adapter(runner: Runner, seed: int, rank: int, kinds: tuple[str, ...] = ("linear",)) -> PreparedAdapter:
    banks, generator = runner._inputs.adapters.banks, torch.Generator().manual_seed(seed)
    parts = []
    for site in banks.sites.sites.values():
        if site.kind in kinds:
            a = torch.randn(rank, site.in_features, generator=generator) * 0.3
            b = torch.randn(site.out_features, rank, generator=generator) * 0.3
            parts.append(AdaptedPart(site.module, site.part, a=a, b=b))
    return banks.prepare(AdapterWeights(parts, rank, "", []))


def run(runner: Runner, slots: dict[int, int], adapters: dict[int, PreparedAdapter]) -> dict[int, list[int]]:
    """Prefills in chunks beside decodes, then decodes alone."""
    for slot, adapter in adapters.items():
        runner._inputs.adapters.banks.load(slot, adapter)
    driver = Driver(runner, num_pages=NUM_PAGES, page_size=PAGE_SIZE)
    for row, length in ((0, 5), (1, 20), (2, 1)):
        prompt = random.Random(row).choices(range(1, VOCAB_SIZE), k=length)
        driver.start(row, prompt, SamplingSpec(), adapter_slot=slots[row])
    for chunks in ({0: 8, 1: 6}, {1: 13, 2: 1}, {1: 1}, {}, {}, {}):
        driver.step(chunks)
    return driver.output


@pytest.mark.interpreted
@pytest.mark.parametrize("slots", [{0: 0, 1: 2, 2: -1}, {0: 1, 1: 1, 2: 0}, {0: -1, 1: -1, 2: -1}], ids=str)
def test_captured_steps_with_adapters_compute_the_same(slots: dict[int, int]):
    outputs = []
    for is_captured in (False, True):
        _, runner = build("gemma3", BankSizes(SLOTS, 20))
        recorder = PretendedRecorder()
        if is_captured:
            open_steps(runner, recorder)
        adapters = {slot: make_adapter(runner, slot, 3 + 8 * slot) for slot in range(SLOTS)}
        outputs.append(run(runner, slots, adapters))
        assert bool(recorder.num_recorded) == is_captured
    assert outputs[0] == outputs[1]


def test_steps_of_few_and_of_many_adapters():
    """Small ranks: all slots at once; larger ones: the first, and then all or none."""
    found = {(slots, rank): BankSizes(slots, rank).dense_counts for slots in (1, 8, 64, 65) for rank in (4, 64, 300)}
    assert found == {
        (1, 4): (1,), (1, 64): (1,), (1, 300): (1,), (8, 4): (8,), (8, 64): (2, 8), (8, 300): (1, 0),
        (64, 4): (8, 64), (64, 64): (2, 0), (64, 300): (1, 0), (65, 4): (8, 0), (65, 64): (2, 0), (65, 300): (1, 0),
    }
    assert all([is_dense(rows, *few) for rows in (15, 16, 4096)] == [False, True, True] for few in ((8, 16), (1, 304)))
    assert [is_dense(rows, 64, 16) for rows in (15, 16, 512, 513)] == [False, True, True, False]


@pytest.mark.interpreted
@pytest.mark.parametrize("most", [32, 96])
def test_captured_steps_of_each_kind(most: int, monkeypatch: pytest.MonkeyPatch):
    """Rows of the first slot alone, and of several: a kind for each, and the same tokens as without."""
    monkeypatch.setattr(parts_module, "DENSE_RANKS", 32)
    monkeypatch.setattr(parts_module, "MOST_DENSE_RANKS", most)
    outputs = []
    for slots in ({0: 0, 1: -1, 2: 0}, {0: 0, 1: 2, 2: -1}):
        for is_captured in (False, True):
            _, runner = build("gemma3", BankSizes(SLOTS, 20))
            recorder, captured = PretendedRecorder(), runner._inputs.adapters.captured
            assert [kind.num_dense for kind in captured] == [1, SLOTS if most == 96 else 0]
            if is_captured:
                open_steps(runner, recorder)
            adapters = {slot: make_adapter(runner, slot, 3 + 8 * slot) for slot in range(SLOTS)}
            outputs.append(run(runner, slots, adapters))
            assert bool(recorder.num_recorded) == is_captured
    assert outputs[0] == outputs[1] and outputs[2] == outputs[3]


@pytest.mark.interpreted
def test_an_adapter_with_more_than_additions_runs_as_written():
    """An embedding's addition is none that a captured step computes; steps of other rows still replay."""
    outputs = []
    for is_captured in (False, True):
        _, runner = build("llama", BankSizes(SLOTS, 4))
        recorder = PretendedRecorder()
        if is_captured:
            open_steps(runner, recorder)
        adapters = {0: make_adapter(runner, 1, 4, ("linear", "embedding"))}
        outputs.append(run(runner, {0: 0, 1: -1, 2: 0}, adapters))
        assert not recorder.num_recorded
    assert outputs[0] == outputs[1]


@pytest.mark.interpreted
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_last_layers_compute_wanted_tokens_only(family: str, monkeypatch: pytest.MonkeyPatch):
    """Chunks of prompts that are not sampled, and rows with adapters of their own."""
    outputs, kept, select = [], [], ForwardBatch.select_queries

    def select_and_tell(batch: ForwardBatch, q: torch.Tensor) -> torch.Tensor:
        found = select(batch, q)
        kept.append((len(q), len(found), 0 if batch.adapters is None else batch.adapters.num_rows))
        return found

    monkeypatch.setattr(ForwardBatch, "select_queries", select_and_tell)
    for is_pruned in (False, True):
        assert not any(after < before for before, after, _ in kept)
        _, runner = build(family, BankSizes(SLOTS, 12))
        runner._inputs.adapters.prunes = is_pruned
        adapters = {slot: make_adapter(runner, slot, 3 + 4 * slot) for slot in range(SLOTS)}
        outputs.append(run(runner, {0: 2, 1: -1, 2: 1}, adapters))
    assert outputs[0] == outputs[1]
    assert any(0 < after < before and after == adapted for before, after, adapted in kept)
