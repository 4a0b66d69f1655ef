"""Plans through the runner give the same results whether a step of decodes is one call or many."""

from __future__ import annotations

import pytest
import torch
from driver import Driver
from tiny_checkpoint import write_tiny_checkpoint

from headrace.base.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from headrace.base.parallel import DeviceConfig
from headrace.base.sampling import LogitRules, Penalties, SamplingSpec
from headrace.base.step import StepResult
from headrace.execution.building import build_executor
from headrace.execution.executor import LocalExecutor
from headrace.execution.paths import FusedPath
from headrace.kernels import native
from headrace.kernels.packed_linear.choice import FormChoice

SPECS = [
    SamplingSpec(), SamplingSpec(), SamplingSpec(temperature=0.8, top_p=0.7, seed=5), SamplingSpec(num_logprobs=3),
    SamplingSpec(penalties=Penalties(repetition=1.3)), SamplingSpec(rules=LogitRules(bias={7: 50.0})), SamplingSpec(),
]


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> LocalExecutor:
    if native.build().status != "ready":
        pytest.skip("no native kernels")
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("fused"), 3)
    config = EngineConfig(
        model=ModelConfig(model=str(folder), dtype="float32"), cache=CacheConfig(kv_pages=200, page_size=4),
        scheduler=SchedulerConfig(max_running_requests=8), device=DeviceConfig(device="cpu"),
    )
    with pytest.MonkeyPatch.context() as patch:
        # which may not be the fastest form for weights as small as these
        patch.setattr(FormChoice, "choose", lambda *_: "panels")
        built = build_executor(config)
    yield built
    built.close()


def play(
    executor: LocalExecutor, specs: list[SamplingSpec], *, fuses: bool, monkeypatch: pytest.MonkeyPatch
) -> list[StepResult]:
    """Requests that come one after the other, decode together, and go."""
    runner, calls = executor._runner, []
    launch = FusedPath._launch
    monkeypatch.setattr(runner, "paths", runner.paths if fuses else runner.paths[-1:])
    monkeypatch.setattr(FusedPath, "_launch", lambda *args: calls.append(1) or launch(*args))
    driver, results = Driver(executor._runner, num_pages=200), []
    for row, spec in enumerate(specs):
        driver.start(row, [(3 + 5 * row + 7 * i) % 199 for i in range(3 + 4 * row)], spec)
        results += [driver.step({row: 100}), driver.step({})]
    results += [driver.step({}) for _ in range(5)]
    driver.release(1)
    results += [driver.step({}) for _ in range(2)]
    for row in list(driver.held):
        driver.release(row)
    driver.step({})
    monkeypatch.undo()
    assert len(calls) == (len(specs) + 7 if fuses else 0)
    return results


@pytest.mark.parametrize("specs", [SPECS[:2], SPECS])
def test_results_are_the_same(executor, specs, monkeypatch):
    fused, plain = (play(executor, specs, fuses=fuses, monkeypatch=monkeypatch) for fuses in (True, False))
    for one, other in zip(fused, plain, strict=True):
        assert one.token_ids == other.token_ids
        assert one.failed_rows == other.failed_rows == one.refused_rows == []
        assert repr(one.logprobs) == repr(other.logprobs)


def test_a_row_without_numbers_fails_alone(executor, monkeypatch):
    driver = Driver(executor._runner, num_pages=200)
    for row in range(3):
        driver.start(row, [5 + row, 9, 11, 20 + row], SamplingSpec())
    driver.step(dict.fromkeys(range(3), 10))
    pages = executor._runner.pools[0].layer(0)[1]
    pages[driver.held[1][0][0]] = torch.nan
    result = driver.step({})
    assert [row for row, _ in result.failed_rows] == [1] and "not finite" in result.failed_rows[0][1]
    pages.zero_()
    for row in range(3):
        driver.release(row)
    driver.step({})


def test_results_are_read_after_the_next_step_was_launched(executor):
    """Steps of the same rows write to the same arrays."""
    runner, found = executor._runner, []
    for is_late in (False, True):
        driver = Driver(runner, num_pages=200)
        for row in range(3):
            driver.start(row, [5 + row, 9, 11, 20 + row], SamplingSpec())
        driver.step(dict.fromkeys(range(3), 10))
        pending, results = [], []
        for _ in range(6):
            pending.append(runner.execute(driver.plan({})))
            results += [] if is_late else [pending.pop().result().token_ids]
        found.append([step.result().token_ids for step in pending] or results)
        for row in range(3):
            driver.release(row)
        driver.step({})
    assert found[0] == found[1] and len(set(map(tuple, found[0]))) > 1
