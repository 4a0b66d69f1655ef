"""Plans through the runner: what a row yields is a function of its own tokens, however the plan cuts and mixes them."""

from __future__ import annotations

import random

import pytest
import torch
from driver import Driver
from toy import VOCAB_SIZE, WINDOW, toy_logits, toy_runner

from headrace.base.errors import HeadraceError
from headrace.base.sampling import LogitRules, Penalties, SamplingSpec
from headrace.base.step import StepPlan


def expected_greedy(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(toy_logits(tokens, WINDOW.window).argmax()))
    return tokens[len(prompt):]


GREEDY = SamplingSpec()


def prompt_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


def test_chunked_prefill_mixed_with_decodes():
    driver = Driver(toy_runner())
    prompts = {0: prompt_of(1, 3), 2: prompt_of(2, 21), 1: prompt_of(3, 9)}
    driver.start(0, prompts[0], GREEDY)
    driver.step({0: 8})
    driver.start(2, prompts[2], GREEDY)
    driver.start(1, prompts[1], GREEDY)
    for chunks in ({2: 5, 1: 4}, {2: 1, 1: 100}, {2: 7}, {2: 100}, {}, {}, {}):
        driver.step(chunks)
    for row, prompt in prompts.items():
        assert len(driver.output[row]) >= 4
        assert driver.output[row] == expected_greedy(prompt, len(driver.output[row]))


def test_rows_and_pages_are_reused():
    driver = Driver(toy_runner(max_rows=2, num_pages=13), num_pages=13)
    for round_ in range(5):
        prompts = {row: prompt_of(10 * round_ + row, 5 + 3 * row + round_) for row in (0, 1)}
        for row, prompt in prompts.items():
            driver.start(row, prompt, GREEDY)
        for _ in range(6):
            driver.step({0: 4, 1: 6})
        for row, prompt in prompts.items():
            assert driver.output[row] == expected_greedy(prompt, len(driver.output[row]))
            driver.release(row)


def test_two_plans_in_flight_take_the_token_from_the_device():
    driver = Driver(toy_runner())
    prompt = prompt_of(5, 6)
    driver.start(0, prompt, GREEDY)
    pending = [driver.runner.execute(driver.plan({0: 6}))]
    tokens = []
    for _ in range(5):
        pending.append(driver.runner.execute(driver.plan({})))
        tokens += pending.pop(0).result().token_ids
    assert tokens == expected_greedy(prompt, 5)


def test_reentry_continues_seeded_output():
    spec = SamplingSpec(
        temperature=0.9, top_p=0.95, seed=42, penalties=Penalties(1.3, 0.4, 0.2),
        rules=LogitRules(bad_words=[[7, 8], [9]], min_tokens=6, held_ids=[3, 4]),
    )
    prompt = prompt_of(6, 7)
    straight = Driver(toy_runner())
    straight.start(1, prompt, spec)
    for _ in range(10):
        straight.step({1: 100})
    again = Driver(toy_runner(), seed=9)
    again.start(3, prompt, spec, output=tuple(straight.output[1][:4]))
    for _ in range(9):
        again.step({3: 3})
    assert len(again.output[3]) > 6
    assert again.output[3] == straight.output[1][: len(again.output[3])]


def test_overrun_of_a_stopped_row_harms_nobody():
    """A decode beyond a row's pages writes to the null page: other rows go on as if nothing happened."""
    driver = Driver(toy_runner(page_size=4))
    for row in (0, 1):
        driver.start(row, prompt_of(20 + row, 4), GREEDY)
    driver.step({0: 4, 1: 4})
    plan = driver.plan({})
    driver.runner.execute(
        StepPlan(
            plan.step_id, 2, plan.rows, plan.begins, plan.lengths, plan.samples,
            appends=[a for a in plan.appends if a.row == 0]
        )
    ).result()
    before = [pool.layer(i)[0][1:].clone() for i, pool in enumerate(driver.runner.pools)]
    driver.runner.execute(StepPlan(99, 1, [1], [5], [1], [1])).result()
    for i, pool in enumerate(driver.runner.pools):
        assert torch.equal(pool.layer(i)[0][1:], before[i])


def test_released_row_reads_and_writes_the_null_page():
    driver = Driver(toy_runner())
    driver.start(0, prompt_of(30, 8), GREEDY)
    driver.step({0: 8})
    driver.release(0)
    driver.runner.execute(driver.plan({})).result()
    assert not driver.runner._tables.tensor.any()


def test_prefill_without_samples_yields_nothing():
    driver = Driver(toy_runner())
    driver.start(0, prompt_of(31, 9), GREEDY)
    assert driver.step({0: 4}).token_ids == []


def test_row_that_was_never_started_fails_the_step():
    with pytest.raises(HeadraceError, match="never started"):
        toy_runner().execute(StepPlan(1, 0, [2], [0], [3], [1]))


def test_non_finite_logits_fail_one_row_alone():
    runner = toy_runner()
    driver = Driver(runner)
    prompts = {row: prompt_of(40 + row, 4) for row in range(3)}
    for row, prompt in prompts.items():
        driver.start(row, prompt, SamplingSpec(temperature=1.0, seed=1) if row == 1 else GREEDY)
    runner._model.poison = 1
    result = driver.step({0: 4, 1: 4, 2: 4})
    assert [row for row, _ in result.failed_rows] == [1] and "not finite" in result.failed_rows[0][1]
    runner._model.poison = None
    driver.step({})
    for row in (0, 2):
        assert driver.output[row] == expected_greedy(prompts[row], 2)


@pytest.mark.parametrize("chunk", [1, 3, 300])
def test_prompt_logprobs_over_chunks(chunk: int):
    driver = Driver(toy_runner(max_model_len=320, num_pages=90, max_tokens=320), num_pages=90)
    prompt = prompt_of(50, 20 if chunk < 300 else 290)
    driver.start(0, prompt, SamplingSpec(num_prompt_logprobs=2, num_logprobs=1))
    driver.start(1, prompt_of(51, 5), GREEDY)
    found, last = {}, None
    while last is None:
        result = driver.step({0: chunk, 1: 2})
        for part in result.prompt_logprobs:
            assert part.row == 0
            found |= {part.start + i: entry for i, entry in enumerate(part.entries)}
        last = next((record for record in result.logprobs or [] if record), None)
    assert sorted(found) == list(range(1, len(prompt)))
    for position, entry in found.items():
        oracle = toy_logits(prompt[:position], WINDOW.window).log_softmax(-1)
        assert entry.token_id == prompt[position]
        assert entry.logprob == pytest.approx(float(oracle[prompt[position]]), abs=1e-5)
        assert entry.rank == 1 + int((oracle > oracle[prompt[position]]).sum())
        assert entry.top_logprobs == pytest.approx(sorted(oracle.double().numpy(), reverse=True)[:2], abs=1e-5)
    oracle = toy_logits(prompt, WINDOW.window).log_softmax(-1)
    assert last.rank == 1 and len(last.top_ids) == 1
    assert last.logprob == pytest.approx(float(oracle.max()), abs=1e-5)


def test_random_plans_against_the_oracle():
    for seed in range(4):
        rng = random.Random(seed)
        driver = Driver(toy_runner(num_pages=60), seed=seed, num_pages=60)
        prompts: dict[int, list[int]] = {}
        for _ in range(40):
            for row in range(4):
                if row not in prompts and rng.random() < 0.5:
                    prompts[row] = prompt_of(rng.randrange(10**6), rng.randint(1, 24))
                    driver.start(row, prompts[row], GREEDY)
                elif row in prompts and (len(driver.output[row]) > 12 or rng.random() < 0.04):
                    assert driver.output[row] == expected_greedy(prompts.pop(row), len(driver.output[row]))
                    driver.release(row)
            if driver.computed:
                driver.step({row: rng.randint(0, 9) for row in prompts})
