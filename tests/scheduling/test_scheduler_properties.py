"""Whatever arrives, is aborted, evicted, retracted or fails: pages are accounted for, requests end once, outputs are
those of a request that runs alone."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.base.errors import HeadraceError, OutOfPages
from headrace.scheduling.encoding import EncoderAccount, EncoderLimits
from headrace.scheduling.request import Request, State
from headrace.scheduling.running import RunningSet
from tests.scheduling.fake_runner import FORCED, make_ask, make_engine, make_layout

VOCAB = 23
STEMS = [[(7 * i + k) % VOCAB for i in range(40)] for k in range(3)]
MAX_MODEL_LEN = 48


@st.composite
def prompts(draw) -> list[int]:
    """A piece of one of three stems and a tail of its own: many prefixes are shared, some end on page borders."""
    stem = draw(st.sampled_from(STEMS))
    tail = draw(st.lists(st.integers(0, VOCAB - 1), max_size=6))
    return (stem[: draw(st.integers(0, 36))] + tail) or [draw(st.integers(0, VOCAB - 1))]


class SchedulerMachine(RuleBasedStateMachine):
    """Drives a scheduler over the fake device with every event the engine can meet, in any order."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4, 8]),
        spare_pages=st.integers(0, 30),
        window=st.sampled_from([0, 0, 1, 3, 5, 8, 16]),
        spare_window_pages=st.integers(0, 12),
        full=st.booleans(),
        rows=st.integers(1, 5),
        depth=st.integers(1, 2),
        num_stages=st.sampled_from([1, 1, 2, 3]),
        step_tokens=st.integers(8, 40),
        policy=st.sampled_from(["fcfs", "priority", "longest-prefix"]),
        starvation=st.integers(1, 5),
        prefix_cache=st.booleans(),
        share=st.booleans(),
        soft_pages=st.sampled_from([0, 0, 3, 12]),
        host_pages=st.sampled_from([0, 0, 4, 20, 60]),
        store_pages=st.sampled_from([1, 3, 20]),
        has_storage=st.booleans(),
        failure_rate=st.sampled_from([0.0, 0.0, 0.1, 0.6]),
        delay_rate=st.sampled_from([0.0, 0.5, 0.9]),
    )
    def build(
        self, *, page_size, spare_pages, window, spare_window_pages, full, rows, depth, num_stages, step_tokens, policy,
        starvation, prefix_cache, share, soft_pages, host_pages, store_pages, has_storage, failure_rate,
        delay_rate
    ):
        self.now = 0.0
        num_pages = 1 + -(-MAX_MODEL_LEN // page_size) // 2 + spare_pages
        window_pages = 3 + -(-window // page_size) + spare_window_pages
        layout = make_layout(
            num_pages, page_size=page_size, max_rows=rows, max_model_len=MAX_MODEL_LEN, window=window,
            window_pages=window_pages, full=full or not window, soft_pages=soft_pages,
            host_pages=host_pages, store_pages=store_pages, has_storage=has_storage,
        )
        self.engine = make_engine(
            layout, vocab=VOCAB, prefix_cache=prefix_cache, clock=lambda: self.now, max_step_tokens=step_tokens,
            overlap_depth=depth, num_stages=num_stages, policy=policy,
            starvation_steps=starvation, share_prefix_in_batch=share, max_queued=12,
        )
        tiers = self.engine.runner.tiers
        tiers.failure_rate, tiers.delay_rate = failure_rate, delay_rate
        self.count = 0

    @rule(
        prompt=prompts(), max_tokens=st.integers(0, 20), seed=st.integers(0, 2), min_tokens=st.integers(0, 6),
        stops=st.lists(st.integers(0, VOCAB - 1), max_size=2),
        namespace=st.sampled_from(["", "", "a"]), priority=st.integers(-1, 1),
        deadline=st.sampled_from([None, None, None, 3.0]),
        prompt_logprobs=st.sampled_from([-1, -1, -1, 0]), grammar=st.sampled_from([None, FORCED]),
        origin=st.sampled_from([(), ("a", "1"), ("a", "2"), ("b", "3"), ("b", "c", "4")]),
    )
    def add(
        self, prompt, max_tokens, seed, min_tokens, stops, namespace, priority, deadline, prompt_logprobs, grammar,
        origin
    ):
        self.count += 1
        ask = make_ask(
            f"r{self.count}", prompt, max_tokens, seed=seed, min_tokens=min_tokens, eos_ids=stops[:1],
            stop_ids=stops[1:], namespace=namespace,
            priority=priority, deadline_s=deadline, prompt_logprobs=prompt_logprobs, grammar=grammar,
            origin=origin,
        )
        try:
            self.engine.add(ask)
        except OutOfPages:
            needed = min(len(prompt) + max(1, max_tokens), MAX_MODEL_LEN) - 1
            groups = self.engine.layout.groups
            assert any(needed > (g.num_pages - 1) * self.engine.layout.page_size for g in groups if not g.spec.window)
        except HeadraceError:
            asks = [self.engine.asks[request_id] for request_id in self.unfinished()]
            num_own = sum(other.origin[:-1] == origin[:-1] for other in asks)
            assert len(asks) >= 12 or (origin and num_own >= 6)

    def unfinished(self) -> list[str]:
        return [request_id for request_id in self.engine.asks if request_id not in self.engine.finishes]

    @precondition(lambda self: self.unfinished())
    @rule(pick=st.integers(0, 100), reason=st.sampled_from(["abort", "abort", "stop"]))
    def abort(self, pick, reason):
        waiting = self.unfinished()
        request_id = waiting[pick % len(waiting)]
        finish = self.engine.abort(request_id).finish
        assert finish.reason == "abort" and self.engine.abort(request_id, reason) is None

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def expire(self, seconds):
        self.now += seconds
        for output in self.engine.take(self.engine.scheduler.expire()):
            assert output.finish.error.kind == "deadline_exceeded"

    @rule()
    def step(self):
        self.engine.step()

    @rule(steps=st.integers(2, 12))
    def several_steps(self, steps):
        for _ in range(steps):
            self.engine.step()
            self.engine.scheduler.check()

    @rule()
    def launch(self):
        if len(self.engine.flights) < self.engine.depth:
            self.engine.launch()

    @precondition(lambda self: self.unfinished())
    @rule(pick=st.integers(0, 100))
    def launch_with_failing_row(self, pick):
        if len(self.engine.flights) < self.engine.depth:
            waiting = self.unfinished()
            self.engine.launch({waiting[pick % len(waiting)]})

    @precondition(lambda self: self.engine.flights)
    @rule()
    def crash(self):
        for output in self.engine.crash(RuntimeError("boom")):
            assert output.finish.error.kind == "step_failed"

    @rule()
    def reset_cache(self):
        self.engine.scheduler.reset_prefix_cache()

    @invariant()
    def accounted(self):
        if hasattr(self, "engine"):
            self.engine.scheduler.check()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.engine.drain()
        self.engine.scheduler.check()
        self.engine.check_outputs()
        stats = self.engine.scheduler.stats()
        assert (stats.num_running, stats.num_queued, stats.num_used_pages) == (0, 0, 0)
        assert self.engine.scheduler.reset_prefix_cache()


SchedulerMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestScheduler = SchedulerMachine.TestCase


def test_the_device_hears_nothing_of_a_request_that_leaves_before_its_plan():
    running = RunningSet(2, EncoderAccount(None, EncoderLimits(1, 1, 1)))
    request = Request(make_ask("a", [1, 2]), seq=0, max_model_len=64, deadline=None)
    running.register(request)
    for _ in range(2):  # retracted, and let in again
        running.start_prefill(request)
        running.leave(request, State.RETRACTED)
    assert running.take_changes() == ([], [])
    running.start_prefill(request)
    assert [start.row for start in running.take_changes()[1]] == [request.row]
    running.leave(request, State.FINISHED)
    assert running.take_changes() == ([0], [])
