"""Tiers, leases and tickets, with copies that are slow, late, lost or fail in part: no page is lost or written by two,
none is read before it has arrived, and every request says what it says alone."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from tests.scheduling.fake_runner import make_ask, make_engine, make_layout
from tests.scheduling.pages_machine import MAX_MODEL_LEN, PAGE, SETTINGS, STEM_LEN, STEMS, VOCAB, PagesMachine


class TierMachine(PagesMachine):
    """A device that holds little more than one prompt, so that prefixes go out and come back all the time."""

    @initialize(
        window=st.sampled_from([0, 0, 3, 9]), full=st.booleans(), spare=st.integers(0, 14),
        host_pages=st.integers(3, 40), store_pages=st.sampled_from([1, 4, 20]), has_storage=st.booleans(),
        depth=st.integers(1, 2), num_stages=st.sampled_from([1, 1, 2]), rows=st.integers(1, 4),
    )
    def build(self, *, window, full, spare, host_pages, store_pages, has_storage, depth, num_stages, rows):
        layout = make_layout(
            1 + 16 + spare, page_size=PAGE, max_rows=rows, max_model_len=MAX_MODEL_LEN, window=window,
            window_pages=17 + spare, full=full or not window, host_pages=host_pages, store_pages=store_pages,
            has_storage=has_storage,
        )
        self.engine = make_engine(
            layout, vocab=VOCAB, clock=lambda: self.now, max_step_tokens=16, overlap_depth=depth, num_stages=num_stages
        )
        self.tiers = self.engine.runner.tiers

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

    @rule()
    def finish_all(self):
        """Up to the limit of time: what still hangs is late by then."""
        for _ in range(60):
            self.engine.step()
        self.now += 6.0

    @rule(pick=st.integers(0, 100))
    def launch_with_failing_row(self, pick):
        names = self.unfinished()
        if names and len(self.engine.flights) < self.engine.scheduler.depth:
            self.engine.launch({names[pick % len(names)]})

    @rule(keep=st.integers(0, 3))
    def storage_forgets(self, keep):
        for pages in self.tiers.storage:
            for key in list(pages)[keep:]:
                del pages[key]

    def finish(self) -> None:
        self.engine.drain()


TierMachine.TestCase.settings = settings(SETTINGS, max_examples=60, stateful_step_count=40)
TestTiers = TierMachine.TestCase
