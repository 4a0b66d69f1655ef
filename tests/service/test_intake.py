"""Requests that arrive while the device computes are read meanwhile, not behind the step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from fakes import FakeExecutor, FakePending, continuation, engine_over

from headrace.base.config import engine_config
from headrace.base.messages import Call, EngineRequest, FromEngine, Outputs, ToEngine
from headrace.base.sampling import SamplingParams, SamplingSpec, StopSpec
from headrace.service.client import local
from headrace.service.client.local import LocalClient, _Intake
from headrace.service.process import EngineLoop

LENGTH = 4


class Client:
    """Sends a request a read. A step's device is busy while there are more, if it waits for them."""

    is_open = True

    def __init__(self, prompts: list[list[int]], executor: FakeExecutor, *, is_slow: bool, length: int = LENGTH):
        self._left = [
            EngineRequest(str(nth), prompt, SamplingSpec(), StopSpec(max_tokens=length))
            for nth, prompt in enumerate(prompts)
        ]
        self.tokens: dict[str, list[int]] = {request.request_id: [] for request in self._left}
        executor.is_busy = lambda: is_slow and bool(self._left)

    def receive(self, wait_ms: int) -> list[ToEngine]:
        if self._left:
            return [self._left.pop(0)]
        return [Call(1, "shutdown")] if wait_ms else []

    def send(self, message: FromEngine) -> None:
        if isinstance(message, Outputs):
            for output in message.outputs:
                self.tokens[output.request_id] += output.token_ids


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("is_slow", [False, True])
def test_a_long_step_takes_in_what_arrives(depth: int, is_slow: bool):
    executor = FakeExecutor(engine_config(overlap_depth=depth))
    prompts = [[1, 2, 3], [4, 5], [6], [7, 8]]
    client = Client(prompts, executor, is_slow=is_slow)
    EngineLoop(engine_over(executor), client).run()
    assert list(client.tokens.values()) == [continuation(prompt, LENGTH) for prompt in prompts]
    sizes = [len(plan.rows) for plan in executor.launched]
    # One at a time between steps, or all but the first behind the plans that were launched without them.
    assert sizes[:depth] == [1] * depth
    assert sizes[depth] == (len(prompts) if is_slow else 2)


def test_what_is_read_beside_a_step_is_launched_behind_it(monkeypatch: pytest.MonkeyPatch):
    """Where another plan may be in flight, and nothing was there to plan."""
    executor, events = FakeExecutor(engine_config(overlap_depth=2)), list[str]()
    execute, result = FakeExecutor.execute, FakePending.result
    monkeypatch.setattr(
        FakeExecutor, "execute", lambda self, plan: (events.append(f"{len(plan.rows)} rows"), execute(self, plan))[1]
    )
    monkeypatch.setattr(FakePending, "result", lambda self: (events.append("result"), result(self))[1])
    client = Client([[1], [2], [3], [4]], executor, is_slow=True, length=1)
    EngineLoop(engine_over(executor), client).run()
    assert events[:3] == ["1 rows", "3 rows", "result"]


def test_a_batch_is_prepared_while_the_device_computes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local, "TOKENS_QUEUED", 1)
    monkeypatch.setattr(local, "LEAST_QUEUED", 1)
    made: list[FakeExecutor] = []
    prompts = [[nth, nth + 1] for nth in range(12)]
    waiting = iter(prompts)
    taken: list[list[int]] = []

    def take():
        for prompt in waiting:
            taken.append(prompt)
            params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, detokenize=False)
            yield client.jobs.make(prompt, params, client.facts)

    def build(config, progress):
        made.append(FakeExecutor(config))
        made[0].is_busy = lambda: len(taken) < len(prompts)
        return engine_over(made[0])

    monkeypatch.setattr(local, "load_target", lambda target: build)
    client = LocalClient(engine_config(overlap_depth=1))
    outputs = client.run(take())
    assert [output.outputs[0].token_ids for output in outputs] == [continuation(prompt, LENGTH) for prompt in prompts]
    assert [len(plan.rows) for plan in made[0].launched[:2]] == [1, len(prompts)]
    client.close()


def test_one_request_begins_and_the_next_are_many(monkeypatch: pytest.MonkeyPatch):
    """Each of them has more tokens than are prepared before a step."""
    monkeypatch.setattr(local, "TOKENS_QUEUED", 1)
    monkeypatch.setattr(local, "LEAST_QUEUED", 5)
    made: list[FakeExecutor] = []

    def build(config, progress):
        made.append(FakeExecutor(config))
        return engine_over(made[0])

    monkeypatch.setattr(local, "load_target", lambda target: build)
    client = LocalClient(engine_config(overlap_depth=1))
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, detokenize=False)
    prompts = [[nth, nth + 1] for nth in range(9)]
    outputs = client.run(client.jobs.make(prompt, params, client.facts) for prompt in prompts)
    assert [output.outputs[0].token_ids for output in outputs] == [continuation(prompt, LENGTH) for prompt in prompts]
    assert [len(plan.rows) for plan in made[0].launched[:3]] == [1, 1 + 5, 1 + 5 + 3]
    client.close()


def test_no_more_is_prepared_than_the_engine_takes():
    """Where it is full, prompts would else pile up in memory: those of its next requests are there."""
    stop = StopSpec(max_tokens=1)
    jobs = (
        SimpleNamespace(requests=[EngineRequest(f"{nth}", [1] * 999, SamplingSpec(), stop)]) for nth in range(10**6)
    )
    intake = _Intake(cast(Any, jobs), window=3)
    taken = [len(list(intake.take())) for _ in range(50)]
    assert sum(taken) == 3 and len(intake.jobs) <= 2 * local.LEAST_QUEUED
    del intake.running["0"]
    assert [request.request_id for request in intake.take()] == ["3"]
