"""What the models of tiers and of exchanges have in common: an engine with few pages, whose copies are slow, late, lost
or fail in part, and requests of which each must say what it says alone."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.scheduling.fake_runner import FakeEngine, FakeTiers

VOCAB, STEM_LEN, MAX_MODEL_LEN, PAGE = 31, 40, 64, 4
STEMS = [[(5 * i + 11 * k) % VOCAB for i in range(STEM_LEN)] for k in range(5)]
SETTINGS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


class PagesMachine(RuleBasedStateMachine):
    """A subclass makes ``engine`` and ``tiers`` as it is initialized, and may have its own `step`."""

    engine: FakeEngine
    tiers: FakeTiers
    now = 0.0
    count = 0  # of requests

    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()
            self.engine.scheduler.check()

    @rule(steps=st.integers(1, 12))
    def few_steps(self, steps):
        self.step(steps)

    @rule(failure=st.sampled_from([0.0, 0.0, 0.0, 0.2, 1.0]), delay=st.sampled_from([0.0, 0.3, 0.9, 1.0]))
    def change_weather(self, failure, delay):
        self.tiers.failure_rate, self.tiers.delay_rate = failure, delay

    @precondition(lambda self: self.unfinished())
    @rule(pick=st.integers(0, 100))
    def abort(self, pick):
        waiting = self.unfinished()
        self.engine.abort(waiting[pick % len(waiting)])

    @precondition(lambda self: self.engine.flights)
    @rule(really=st.booleans())
    def crash(self, really):
        if really:
            self.engine.crash(RuntimeError("boom"))

    @rule(really=st.sampled_from([False, False, True]))
    def reset_cache(self, really):
        if really:
            self.engine.scheduler.reset_prefix_cache()

    def unfinished(self) -> list[str]:
        return [name for name in self.engine.asks if name not in self.engine.finishes]

    @invariant()
    def accounted(self):
        if hasattr(self, "engine"):
            self.engine.scheduler.check()

    def finish(self) -> None:
        """Bring all to its end: by `teardown`, where the engine was made."""
        raise NotImplementedError

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.tiers.delay_rate = 0.3
        self.finish()
        self.engine.scheduler.check()
        self.engine.check_outputs()
        stats = self.engine.scheduler.stats()
        assert (stats.num_running, stats.num_queued, stats.num_used_pages) == (0, 0, 0)
        assert self.engine.scheduler.reset_prefix_cache()
        assert self.engine.scheduler.stats().tiers.host.num_used_pages == 0
