"""Requests that follow others which ended together begin together; nobody else waits."""

from __future__ import annotations

from fakes import FakeExecutor

from headrace.base.config import engine_config
from headrace.base.messages import Call, EngineRequest, FromEngine, Outputs, ToEngine
from headrace.base.sampling import SamplingSpec, StopSpec
from headrace.scheduling.scheduler import Scheduler
from headrace.service.engine import Engine
from headrace.service.gathering import BETWEEN_S, FIRST_S, Gathering
from headrace.service.process import EngineLoop

BETWEEN_MS, FIRST_MS = round(BETWEEN_S * 1e3), round(FIRST_S * 1e3)


class Clients:
    """Requests of the first wave at once; the others one a turn, once so many have been told that they ended and so
    many steps have been computed. Notes how long the loop was ready to wait."""

    is_open = True

    def __init__(self, waves: list[tuple[int, int, list[EngineRequest]]], executor: FakeExecutor):
        self._waves, self._executor = waves, executor
        self._num_told = 0
        self.waits: list[int] = []

    def receive(self, wait_ms: int) -> list[ToEngine]:
        self.waits.append(wait_ms)
        if not self._waves:
            return [Call(1, "shutdown")] if wait_ms > FIRST_MS else []
        num_needed, num_steps, requests = self._waves[0]
        if self._num_told < num_needed or len(self._executor.launched) < num_steps:
            return []
        taken = requests[:] if not num_needed else requests[:1]
        del requests[: len(taken)]
        if not requests:
            self._waves.pop(0)
        return list(taken)

    def send(self, message: FromEngine) -> None:
        if isinstance(message, Outputs):
            self._num_told += sum(output.finish is not None for output in message.outputs)


def run_waves(*waves: tuple[int, int, list[int]]) -> tuple[list[int], list[int]]:
    """``(after how many ends and steps, lengths of outputs)``; rows of each step, and the waits."""
    executor = FakeExecutor(engine_config(), delay_s=0.03)
    engine = Engine(Scheduler(executor.config.scheduler, executor.config.cache, executor.layout), executor)
    asked = [
        (
            after, steps,
            [
                EngineRequest(f"{i}-{j}", [1, i, j], SamplingSpec(), StopSpec(max_tokens=n)) for j,
                n in enumerate(lengths)
            ]
        )
        for i, (after, steps, lengths) in enumerate(waves)
    ]
    clients = Clients(asked, executor)
    EngineLoop(engine, clients).run()
    return [len(plan.rows) for plan in executor.launched], clients.waits


def test_who_follows_others_that_ended_together_begin_together():
    rows, waits = run_waves((0, 0, [2, 2, 2]), (3, 0, [2, 2, 2]))
    assert rows == [3, 3, 3, 3] and BETWEEN_MS in waits


def test_one_that_ended_before_the_others_waits_for_their_followers():
    """Else waves stay split for ever."""
    rows, waits = run_waves((0, 0, [2, 3, 3, 3]), (1, 3, [2]), (4, 0, [2, 2, 2]))
    assert rows == [4, 4, 3, 4, 4]
    assert BETWEEN_MS in waits


def test_a_request_alone_waits_for_nobody():
    rows, waits = run_waves((0, 0, [2]), (1, 0, [2, 2]))
    assert rows[:3] == [1, 1, 1] and BETWEEN_MS not in waits


def test_no_more_is_gathered_than_ended():
    rows, _ = run_waves((0, 0, [2, 2]), (2, 0, [2, 2, 2]))
    assert rows[2] == 2


def test_who_runs_does_not_wait():
    _, waits = run_waves((0, 0, [2, 2, 6]), (2, 0, [2, 2]))
    assert not {BETWEEN_MS, FIRST_MS} & set(waits)


def test_the_length_of_a_step_bounds_the_wait():
    now = [0.0]
    gathering = Gathering(lambda: now[0])
    gathering.note_first_step(0.010)
    gathering.note_end(4, 1)
    assert gathering.is_due
    gathering.begin()
    assert gathering.patience_ms(1) == 10
    now[0] = 0.002
    assert gathering.patience_ms(2) == BETWEEN_MS
    now[0] = 0.009
    assert gathering.patience_ms(4) == 1
    assert gathering.patience_ms(5) == 0
    now[0] = 0.011
    assert gathering.patience_ms(4) == 0
    gathering.end()
    assert not gathering.is_due
    gathering.note_first_step(0.030)
    gathering.note_end(1, 5)
    assert not gathering.is_due
