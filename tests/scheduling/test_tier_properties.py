"""Tiers, leases and tickets, with copies that are slow, late, lost or fail in part: no page is lost or written by two,
none is read before it has arrived, and every request says what it says alone."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.scheduling.fake_runner import make_ask, make_engine, make_layout

VOCAB, STEM_LEN, MAX_MODEL_LEN = 31, 40, 64
STEMS = [[(5 * i + 11 * k) % VOCAB for i in range(STEM_LEN)] for k in range(5)]


class TierMachine(RuleBasedStateMachine):
    """A device that holds little more than one prompt, so that prefixes go out and come back all the time."""

    @initialize(
        window=st.sampled_from([0, 0, 3, 9]), full=st.booleans(), spare=st.integers(0, 14),
        host_pages=st.integers(3, 40), store_pages=st.sampled_from([1, 4, 20]), has_storage=st.booleans(),
        depth=st.integers(1, 2), num_stages=st.sampled_from([1, 1, 2]), rows=st.integers(1, 4),
    )
    def build(self, *, window, full, spare, host_pages, store_pages, has_storage, depth, num_stages, rows):
        self.now = 0.0
        layout = make_layout(
            1 + 16 + spare, page_size=4, max_rows=rows, max_model_len=MAX_MODEL_LEN, window=window,
            window_pages=17 + spare, full=full or not window, host_pages=host_pages, store_pages=store_pages,
            has_storage=has_storage,
        )
        self.engine = make_engine(
            layout, vocab=VOCAB, clock=lambda: self.now, max_step_tokens=16, overlap_depth=depth, num_stages=num_stages
        )
        self.tiers = self.engine.runner.tiers
        self.count = 0

    @rule(
        asks=st.lists(
            st.tuples(st.sampled_from(STEMS), st.integers(20, STEM_LEN), st.integers(0, 2), st.integers(1, 9)),
            min_size=1, max_size=6,
        ),
        steps=st.sampled_from([0, 3, 40]),
    )
    def add(self, asks, steps):
        for stem, length, tail, out in asks:
            self.count += 1
            self.engine.add(make_ask(f"r{self.count}", stem[:length] + [self.count % VOCAB] * tail, out))
        self.step(steps)

    @rule(steps=st.integers(1, 12))
    def few_steps(self, steps):
        self.step(steps)

    def step(self, steps):
        for _ in range(steps):
            self.engine.step()
            self.engine.scheduler.check()

    @rule()
    def finish_all(self):
        """Up to the limit of time: what still hangs is late by then."""
        for _ in range(60):
            self.engine.step()
        self.now += 6.0

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

    @rule(keep=st.integers(0, 3))
    def storage_forgets(self, keep):
        for pages in self.tiers.storage:
            for key in list(pages)[keep:]:
                del pages[key]

    def unfinished(self) -> list[str]:
        return [name for name in self.engine.asks if name not in self.engine.finishes]

    @invariant()
    def accounted(self):
        if hasattr(self, "engine"):
            self.engine.scheduler.check()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.tiers.delay_rate = 0.3
        self.engine.drain()
        self.engine.scheduler.check()
        self.engine.check_outputs()
        stats = self.engine.scheduler.stats()
        assert (stats.num_running, stats.num_queued, stats.num_used_pages) == (0, 0, 0)
        assert self.engine.scheduler.reset_prefix_cache()
        assert self.engine.scheduler.stats().tiers.host.num_used_pages == 0


TierMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestTiers = TierMachine.TestCase
