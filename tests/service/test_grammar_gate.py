"""Requests wait for their grammars in nobody's way."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from fakes import FakeExecutor, continuation, engine_over

from headrace.base.config import engine_config
from headrace.base.errors import RequestError
from headrace.base.grammar import Grammar
from headrace.base.hooks import Hooks
from headrace.base.messages import EngineRequest, RequestOutput
from headrace.base.sampling import SamplingSpec, StopSpec
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
