"""Requests wait for their grammars in nobody's way."""

from __future__ import annotations

import gc
from concurrent.futures import Future
from weakref import ref

import pytest
from fakes import FakeExecutor, continuation, engine_over

from headrace.base.config import engine_config
from headrace.base.errors import RequestError
from headrace.base.grammar import Grammar
from headrace.base.hooks import Hooks
from headrace.base.messages import EngineRequest, RequestOutput
from headrace.base.sampling import SamplingSpec, StopSpec
from headrace.scheduling.scheduler import Scheduler
from headrace.service.coordination import GrammarGate, WaitingRoom
from headrace.service.engine import Engine


class SlowGrammars(FakeExecutor):
    """Grammars are compiled when the test says so."""

    def __init__(self, **options: object):
        super().__init__(engine_config(**options))
        self.futures: dict[str, Future[object]] = {}

    def prepare_grammar(self, grammar: Grammar) -> Future[object]:
        return self.futures.setdefault(grammar.text, Future())


def request(
    request_id: str, prompt: list[int], max_tokens: int = 4, grammar: str | None = None, **more: object
) -> EngineRequest:
    spec = SamplingSpec(grammar=None if grammar is None else Grammar("regex", grammar))
    return EngineRequest(request_id, prompt, spec, StopSpec(max_tokens=max_tokens), **more)


def step(engine: Engine, count: int) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    for _ in range(count):
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [t for o in outputs for t in o.token_ids]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_bystander_gets_a_token_every_step_while_a_grammar_compiles(depth: int):
    executor = SlowGrammars(overlap_depth=depth)
    engine = engine_over(executor)
    engine.submit(request("bystander", [1], max_tokens=20))
    engine.submit(request("waits", [2], grammar="slow"))
    engine.submit(request("also waits", [2], grammar="slow"))
    assert tokens(step(engine, 8)["bystander"]) == continuation([1], 8), "one token a step"
    assert engine.stats().num_queued == 2 and engine.stats().num_running == 1
    engine.check()
    executor.futures["slow"].set_result(None)
    outputs = step(engine, 12)
    assert tokens(outputs["bystander"]) == continuation([1], 20)[8:]
    assert tokens(outputs["waits"]) == tokens(outputs["also waits"]) == continuation([2], 4)
    step(engine, 2)
    assert not engine.has_work
    engine.check()


def test_a_grammar_that_fails_ends_its_requests_alone():
    executor = SlowGrammars()
    engine = engine_over(executor)
    for name, grammar in (("bad", "bad"), ("broken", "broken"), ("good", "good")):
        engine.submit(request(name, [3], grammar=grammar))
    executor.futures["bad"].set_exception(RequestError("the keyword 'not' cannot be enforced", param="json_schema"))
    executor.futures["broken"].set_exception(KeyError("x"))
    executor.futures["good"].set_result(None)
    outputs = step(engine, 6)
    (bad,), (broken,) = outputs["bad"], outputs["broken"]
    assert bad.finish.error.to_error().status == broken.finish.error.to_error().status == 400
    assert (
        bad.finish.error.message == "the keyword 'not' cannot be enforced" and bad.finish.error.param == "json_schema"
    )
    assert tokens(outputs["good"]) == continuation([3], 4) and not engine.has_work
    engine.check()


def test_waiting_requests_can_be_aborted_counted_and_not_doubled():
    executor = SlowGrammars(max_queued=2)
    engine = engine_over(executor)
    engine.submit(request("a", [1], grammar="slow"))
    engine.submit(request("b", [1], grammar="slow"))
    engine.submit(request("c", [1], grammar="slow"))
    (refused,) = step(engine, 1)["c"]
    assert refused.finish.error.kind == "queue_full"
    engine.abort("b")
    engine.submit(request("a", [1], grammar="slow"))
    outputs = step(engine, 1)
    assert outputs["b"][0].finish.reason == "abort" and outputs["a"][0].finish.error.param == "request_id"
    executor.futures["slow"].set_result(None)
    assert tokens(step(engine, 5)["a"]) == continuation([1], 4), "the first of that name goes on"
    assert not engine.has_work
    engine.check()


def test_a_grammar_that_takes_too_long_is_given_up():
    now = [0.0]
    executor = SlowGrammars()
    engine = engine_over(executor)
    engine._waiting_room = WaitingRoom(
        engine._scheduler, [GrammarGate(executor, Hooks(), limit_s=5, clock=lambda: now[0])]
    )
    engine.submit(request("a", [1], grammar="slow"))
    assert step(engine, 3) == {} and engine.has_work
    now[0] = 5.1
    (output,) = step(engine, 1)["a"]
    assert output.finish.error.to_error().status == 400 and "5 s" in output.finish.error.message
    assert not engine.has_work


def test_an_engine_that_only_waits_does_not_think_it_is_stuck(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headrace.service.engine.MAX_EMPTY_STEPS", 3)
    monkeypatch.setattr("headrace.service.coordination.IDLE_WAIT_S", 0.0)
    executor = SlowGrammars()
    engine = engine_over(executor)
    engine.submit(request("a", [1], grammar="slow"))
    assert step(engine, 20) == {}
    executor.futures["slow"].set_result(None)
    assert tokens(step(engine, 5)["a"]) == continuation([1], 4)


class Later:
    """A coordinator behind that of grammars, which holds all until the test says so."""

    def __init__(self):
        self.held: list[EngineRequest] = []
        self.is_open = False

    @property
    def is_waiting(self) -> bool:
        return bool(self.held)

    def concerns(self, request: EngineRequest) -> bool:
        return True

    def hold(self, request: EngineRequest) -> None:
        self.held.append(request)

    def poll(self) -> list[tuple[EngineRequest, None]]:
        ready, self.held = (self.held, []) if self.is_open else ([], self.held)
        return [(request, None) for request in ready]

    def pause(self) -> None:
        pass


@pytest.mark.parametrize("outcome", [None, RequestError("cannot be enforced", param="json_schema")])
def test_the_grammar_of_a_request_that_ended_does_nothing_to_the_next_of_its_id(outcome: RequestError | None):
    executor, later = SlowGrammars(), Later()
    scheduler = Scheduler(executor.config.scheduler, executor.config.cache, executor.layout)
    engine = Engine(scheduler, executor, gates=[later])
    engine.submit(request("r", [1], grammar="slow"))
    engine.abort("r")
    assert [output.finish.reason for output in engine.step()] == ["abort"]
    engine.submit(request("r", [2], max_tokens=4))
    if outcome is None:
        executor.futures["slow"].set_result(None)
    else:
        executor.futures["slow"].set_exception(outcome)
    assert step(engine, 3) == {} and engine.stats().num_queued == 1
    assert [tuple(one.prompt_token_ids) for one in later.held] == [(2,)]
    later.is_open = True
    assert tokens(step(engine, 8)["r"]) == continuation([2], 4)
    assert not engine.has_work
    engine.check()


def test_what_a_coordinator_drops_is_not_kept():
    """Of requests that end while it holds them, as thousands may in an engine's life."""
    executor, later = SlowGrammars(), Later()
    scheduler = Scheduler(executor.config.scheduler, executor.config.cache, executor.layout)
    room, held = WaitingRoom(scheduler, [later]), request("r", [1])
    room.enter(held)
    later.held.clear()
    dropped = ref(held)
    del held
    gc.collect()
    assert dropped() is None and room.poll() == []
