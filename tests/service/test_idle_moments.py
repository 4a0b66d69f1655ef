"""The engine process uses the time in which nobody asks for anything, a little at a time."""

from __future__ import annotations

from collections.abc import Sequence

from fakes import FakeExecutor

from headrace.base.config import engine_config
from headrace.base.messages import Call, EngineRequest, FromEngine, Outputs, ToEngine
from headrace.base.sampling import SamplingSpec, StopSpec
from headrace.scheduling.scheduler import Scheduler
from headrace.service.coordination import Released
from headrace.service.engine import Engine
from headrace.service.process import IDLE_PAUSE_MS, IDLE_WAIT_MS, EngineLoop


class ScriptedChannel:
    """Hands out one list of messages at a time, and notes how long the loop was ready to wait and had idled by then."""

    is_open = True

    def __init__(self, script: list[list[ToEngine]], executor: FakeExecutor):
        self._script, self._executor = iter(script), executor
        self.waits: list[tuple[int, int]] = []
        self.sent: list[FromEngine] = []

    def receive(self, wait_ms: int) -> list[ToEngine]:
        self.waits.append((wait_ms, self._executor.num_idle_moments))
        return next(self._script)

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)


def test_idle_moments_are_used_and_requests_go_first():
    config = engine_config()
    executor = FakeExecutor(config)
    engine = Engine(Scheduler(executor.config.scheduler, executor.config.cache, executor.layout), executor)
    request = EngineRequest("r", [1, 2], SamplingSpec(), StopSpec(max_tokens=3))
    script = [[], [request], *[[]] * 20, [Call(1, "shutdown")]]
    channel = ScriptedChannel(script, executor)
    EngineLoop(engine, channel).run()
    idle = [(wait, moments) for wait, moments in channel.waits if wait]
    assert idle[:4] == [(IDLE_PAUSE_MS, 0), (IDLE_PAUSE_MS, 1), (IDLE_PAUSE_MS, 1), (IDLE_PAUSE_MS, 2)]
    assert set(idle[4:]) == {(IDLE_WAIT_MS, moments) for moments in range(3, 3 + len(idle[4:]))}, (
        "nothing was left after the third"
    )
    assert any(isinstance(message, Outputs) and message.outputs for message in channel.sent)


class DistantGate:
    """A coordinator that is told of its surroundings from outside, as by a transfer agent; holds no request."""

    is_waiting = False
    num_polls = 0

    def concerns(self, request: EngineRequest) -> bool:
        return False

    def hold(self, request: EngineRequest) -> None:
        raise AssertionError("it holds nothing")

    def poll(self) -> list[Released]:
        self.num_polls += 1
        return []

    def pause(self) -> None:
        raise AssertionError("nothing waits here")

    def decline(self, rooms: Sequence[str], reason: str) -> None:
        raise AssertionError("nothing is refused here")

    def close(self) -> None:
        pass


def test_coordinators_hear_what_happens_while_nobody_asks_for_anything():
    executor, gate = FakeExecutor(engine_config()), DistantGate()
    scheduler = Scheduler(executor.config.scheduler, executor.config.cache, executor.layout)
    script: list[list[ToEngine]] = [*[[]] * 5, [Call(1, "shutdown")]]
    EngineLoop(Engine(scheduler, executor, gates=[gate]), ScriptedChannel(script, executor)).run()
    assert gate.num_polls == 5
