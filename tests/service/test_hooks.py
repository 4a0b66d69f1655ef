"""Step hooks and request coordinators: what they are told, that they may hold requests, and that their failures are
theirs."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeExecutor, continuation

from headrace.base.config import engine_config
from headrace.base.errors import PluginError
from headrace.base.hooks import HOOKS, Hooks, RequestUpdate, load_hooks
from headrace.base.messages import EngineRequest, RequestOutput
from headrace.base.sampling import SamplingSpec, StopSpec
from headrace.base.step import StepPlan
from headrace.scheduling.scheduler import Scheduler
from headrace.service.coordination import COORDINATORS, GrammarGate, create_coordinator, create_coordinators
from headrace.service.engine import Engine


class Recorder:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.plans: list[StepPlan] = []

    def request_admitted(self, update: RequestUpdate) -> None:
        self.told.append(("admitted", update))

    def request_retracted(self, update: RequestUpdate) -> None:
        self.told.append(("retracted", update))

    def request_finished(self, update: RequestUpdate, reason: str) -> None:
        self.told.append(("finished", update, reason))

    def step_planned(self, plan: StepPlan) -> None:
        self.plans.append(plan)


def engine_with(*hooks: tuple[str, Any], **options: Any) -> Engine:
    executor = FakeExecutor(engine_config(**options))
    told = Hooks(hooks)
    return Engine(
        Scheduler(executor.config.scheduler, executor.config.cache, executor.layout, hooks=told), executor, told
    )


def request(request_id: str, prompt: list[int], max_tokens: int = 4) -> EngineRequest:
    return EngineRequest(request_id, prompt, SamplingSpec(), StopSpec(max_tokens=max_tokens))


def run(engine: Engine, count: int = 20) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    for _ in range(count):
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [t for o in outputs for t in o.token_ids]


def test_a_request_is_told_of_from_its_first_token_to_its_end():
    hook = Recorder()
    engine = engine_with(("recorder", hook))
    engine.submit(request("a", [1, 2, 3]))
    run(engine)
    admitted, finished = hook.told
    assert admitted == ("admitted", RequestUpdate("a", admitted[1].row, 3, 3, 1)) and admitted[1].row >= 0
    assert finished[:1] == ("finished",) and finished[1].output_len == 4 and finished[2] == "length"
    assert [plan.num_decodes for plan in hook.plans] == [0, 1, 1, 1]
    engine.submit(request("b", [1], max_tokens=50))
    engine.abort("b")
    run(engine)
    assert hook.told[2:] == [("finished", RequestUpdate("b", -1, 1, 0, 0), "abort")]


def test_retractions_are_told():
    hook = Recorder()
    engine = engine_with(("recorder", hook))
    engine.submit(request("a", [1, 2, 3], max_tokens=6))
    run(engine, 3)
    engine.drain(retracts=True)
    assert tokens(run(engine)["a"])[-2:] == continuation([1, 2, 3], 6)[-2:]
    assert [update[0] for update in hook.told] == ["admitted", "retracted", "admitted", "finished"]


class Faulty:
    """Raises where it is told to."""

    def __init__(self, where: str):
        self.where, self.num_calls = where, 0

    def __getattr__(self, event: str) -> Any:
        if event != self.where:
            raise AttributeError(event)

        def fail(*args: Any) -> None:
            self.num_calls += 1
            raise ZeroDivisionError("its own fault")

        return fail


@pytest.mark.parametrize(
    "event", ["holds_request", "request_admitted", "request_finished", "step_planned", "ready_requests"]
)
def test_a_hook_that_raises_is_switched_off_and_named_and_hurts_nobody(event: str, caplog: pytest.LogCaptureFixture):
    faulty, other, holder = Faulty(event), Recorder(), Holder()
    engine = engine_with(("acme_faulty", faulty), ("recorder", other), ("holder", holder))
    holder.ready = ["a", "b"]
    with caplog.at_level(logging.WARNING):
        engine.submit(request("a", [1]))
        engine.submit(request("b", [2]))
        outputs = run(engine)
    assert tokens(outputs["a"]) == continuation([1], 4) and tokens(outputs["b"]) == continuation([2], 4)
    assert faulty.num_calls == 1 and "'acme_faulty' is switched off" in caplog.text and event in caplog.text
    assert [update[0] for update in other.told].count("finished") == 2 and not engine.has_work
    engine.check()


class Holder:
    """Holds every request until the test lets it go."""

    def __init__(self) -> None:
        self.ready: list[str] = []

    def holds_request(self, request: EngineRequest) -> bool:
        return True

    def ready_requests(self) -> list[str]:
        return self.ready


def test_a_hook_may_hold_requests_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headrace.service.engine.MAX_EMPTY_STEPS", 3)
    monkeypatch.setattr("headrace.service.coordination.IDLE_WAIT_S", 0.0)
    holder = Holder()
    engine = engine_with(("holder", holder))
    for name in ("a", "b", "c"):
        engine.submit(request(name, [1]))
    engine.abort("c")
    outputs = run(engine)
    assert list(outputs) == ["c"] and engine.has_work and engine.stats().num_queued == 2
    holder.ready = ["b", "c", "nobody"]
    assert tokens(run(engine)["b"]) == continuation([1], 4) and engine.stats().num_queued == 1
    holder.ready_requests = lambda: 1 / 0  # type: ignore[method-assign, return-value, assignment]
    assert tokens(run(engine)["a"]) == continuation([1], 4), "a hook that fails holds nobody"
    assert not engine.has_work


def test_a_request_held_for_too_long_runs(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    engine, now = engine_with(("holder", Holder())), [0.0]
    gate = engine._waiting_room._coordinators[0]
    gate._clock = lambda: now[0]
    engine.submit(request("a", [1]))
    monkeypatch.setattr("headrace.service.coordination.IDLE_WAIT_S", 0.0)
    assert run(engine, 3) == {}
    now[0] = 61.0
    assert tokens(run(engine)["a"]) == continuation([1], 4) and "held by a step hook" in caplog.text


def test_questions_to_all_hooks():
    """OR, and the lists joined; hooks without the method are passed over."""
    class Answers:
        def __init__(self, *answers: Any):
            self.answers, self.num_asked = list(answers), 0

        def ask(self) -> Any:
            self.num_asked += 1
            return self.answers.pop(0)

    first, second, mute = Answers(False, [1, 2], True), Answers(True, None), object()
    hooks = Hooks([("mute", mute), ("first", first), ("second", second)])
    assert hooks.any("ask") and second.num_asked == 1
    assert hooks.collect("ask") == [1, 2]
    assert hooks.any("ask") and second.num_asked == 2, "the first yes is enough"
    assert not hooks.any("nothing") and hooks.collect("nothing") == [] and not Hooks()


# -- registries -------------------------------------------------------------------------------------------------------

SITE = '''
class Hook:
    plugin_api = 1
    made = []
    def __init__(self, config):
        self.made.append(config)
class Old(Hook):
    plugin_api = 0
class Broken(Hook):
    def __init__(self, config):
        raise OSError("no such device")
class Coordinator:
    plugin_api = 1
    is_waiting = False
    def __init__(self, executor, hooks):
        pass
    def concerns(self, request):
        return False
    def poll(self):
        return []
'''


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with hooks and coordinators, some unfit, beside this one."""
    info = tmp_path / "acme_hooks-1.0.dist-info"
    info.mkdir()
    (tmp_path / "acme_hooks.py").write_text(SITE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-hooks\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[headrace.hooks]\nacme = acme_hooks:Hook\nacme_old = acme_hooks:Old\nacme_broken = "
        "acme_hooks:Broken\nacme_missing = acme_hooks:Missing\n"
        "[headrace.coordinators]\nacme = acme_hooks:Coordinator\nacme_missing = acme_hooks:Missing\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for registry in (HOOKS, COORDINATORS):
        for name in ("_entries", "_loaded", "_failures"):
            monkeypatch.setattr(registry, name, dict(getattr(registry, name)))
    yield
    sys.modules.pop("acme_hooks", None)


def test_installed_hooks_are_used_and_unfit_ones_named(installed: None, caplog: pytest.LogCaptureFixture):
    config = engine_config()
    with caplog.at_level(logging.WARNING):
        hooks = load_hooks(config)
    assert hooks.names == ["acme"] and sys.modules["acme_hooks"].Hook.made == [config]
    for said in (
        "acme_old' was made for plug-in API 0", "acme_broken' failed to start: OSError: no such device",
        "acme_missing' failed to load"
    ):
        assert said in caplog.text


def test_coordinators_in_order_of_priority(installed: None, caplog: pytest.LogCaptureFixture):
    executor = FakeExecutor(engine_config())
    with caplog.at_level(logging.WARNING):
        made = create_coordinators(executor, Hooks())
    assert [type(coordinator).__name__ for coordinator in made] == ["HookGate", "GrammarGate", "Coordinator"]
    assert "acme_missing' failed to load" in caplog.text
    assert isinstance(create_coordinator("grammar", executor, Hooks()), GrammarGate)


def test_a_coordinator_that_is_not_there_is_an_error_that_lists_those_that_are():
    with pytest.raises(PluginError, match=r"unknown request coordinator 'hisparse'; known: hooks, grammar") as caught:
        create_coordinator("hisparse", FakeExecutor(engine_config()), Hooks())
    assert isinstance(caught.value, RuntimeError)


def test_the_step_log_is_there_at_level_debug(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    import headrace.service.build  # noqa: F401  registers it

    assert "step_log" not in load_hooks(engine_config()).names
    monkeypatch.setenv("HEADRACE_LOG_LEVEL", "debug")
    hooks = load_hooks(engine_config())
    assert hooks.names == ["step_log"]
    engine = engine_with(("step_log", hooks._hooks["step_log"]))
    with caplog.at_level(logging.DEBUG):
        engine.submit(request("a", [1, 2, 3]))
        run(engine)
    for said in (
        "1 chunks of 3 tokens", "1 decodes", "request a: prompt of 3 tokens", "request a: ended (length) after 4 tokens"
    ):
        assert said in caplog.text
