"""The engine process uses the time in which nobody asks for anything, a little at a time."""

from __future__ import annotations

from fakes import FakeExecutor

from headrace.base.config import engine_config
from headrace.base.messages import Call, EngineRequest, FromEngine, Outputs, ToEngine
from headrace.base.sampling import SamplingSpec, StopSpec
from headrace.scheduling.scheduler import Scheduler
from headrace.service.engine import Engine
from headrace.service.process import GATHER_MS, IDLE_PAUSE_MS, IDLE_WAIT_MS, EngineLoop


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
    assert set(idle[4:]) == {(IDLE_WAIT_MS, moments) for moments in range(3, 3 + len(idle[4:]))}, "nothing was left after the third"
    assert any(isinstance(message, Outputs) and message.outputs for message in channel.sent)


class LiveChannel(ScriptedChannel):
    """Sends what follows when something has ended: one message a turn, as clients do that wait for their answers."""

    def __init__(self, first: list[ToEngine], later: list[ToEngine], executor: FakeExecutor):
        super().__init__([], executor)
        self.first, self.later = first, later

    def receive(self, wait_ms: int) -> list[ToEngine]:
        self.waits.append((wait_ms, 0))
        if self.first:
            messages, self.first = self.first, []
            return messages
        num_ended = sum(o.finish is not None for m in self.sent if isinstance(m, Outputs) for o in m.outputs)
        if num_ended and self.later:
            return [self.later.pop(0)]
        return [Call(1, "shutdown")] if not self.later and num_ended > 2 else []


def run_waves(num_first: int, num_later: int, *, delay_s: float) -> tuple[list[int], list[int]]:
    """Rows of each step after the first wave, and the waits."""
    config = engine_config()
    executor = FakeExecutor(config, delay_s=delay_s)
    engine = Engine(Scheduler(executor.config.scheduler, executor.config.cache, executor.layout), executor)
    requests = [EngineRequest(str(i), [1, i], SamplingSpec(), StopSpec(max_tokens=3)) for i in range(num_first + num_later)]
    channel = LiveChannel(requests[:num_first], requests[num_first:], executor)
    EngineLoop(engine, channel).run()
    return [len(plan.rows) for plan in executor.launched[3:]], [wait for wait, _ in channel.waits]


def test_requests_that_follow_others_which_ended_together_begin_together():
    rows, waits = run_waves(3, 3, delay_s=0.05)
    assert rows[0] == 3
    assert GATHER_MS in waits


def test_a_request_alone_waits_for_nobody():
    rows, waits = run_waves(1, 2, delay_s=0.05)
    assert rows[0] == 1
    assert GATHER_MS not in waits


def test_no_more_is_gathered_than_ended():
    rows, _ = run_waves(2, 3, delay_s=0.05)
    assert rows[0] == 2
