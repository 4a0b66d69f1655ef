"""Dense random loads with images over tiny pools: encoders, pieces, prefixes, stages and retraction meet all the time,
and nothing is read before it was encoded."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.config import CacheConfig, SchedulerConfig
from headrace.base.errors import OutOfPages, RequestError
from headrace.base.media_facts import MediaFacts
from headrace.base.step import MediaPlan, StepPlan
from headrace.scheduling import budget, encoding
from headrace.scheduling.encoding import EncoderLimits
from headrace.scheduling.scheduler import Features, Scheduler
from tests.scheduling.fake_runner import FakeEngine, FakeRunner, make_ask, make_layout
from tests.scheduling.test_encoding import make_item

VOCAB, IMAGE = 31, 30
MAX_MODEL_LEN = 80
SIZES = {content: 1 + 7 * i % 23 for i, content in enumerate("abcdefgh")}
"""Placeholders of each image."""


class MediaRunner(FakeRunner):
    """Checks that what plans use was encoded, and that what is under way is finished or given up."""

    def __init__(self, layout, vocab: int, num_pieces: int):
        super().__init__(layout, vocab)
        self._num_pieces, self.outputs = num_pieces, set[int]()
        self._begun, self._left = set[int](), 0

    def execute(self, plan: StepPlan, failed: set[str] = frozenset()):
        self._encode(plan.media)
        return super().execute(plan, failed)

    def idles(self, plan: StepPlan) -> bool:
        return super().idles(plan) and plan.media == MediaPlan()

    def reset(self) -> None:
        super().reset()
        self.outputs.clear()
        self._begun, self._left = set(), 0

    def _encode(self, media: MediaPlan) -> None:
        drops = set(media.drops)
        if self._begun & drops and (media.begun or not media.num_pieces):
            assert self._begun <= drops
            drops -= self._begun
            self._begun, self._left = set(), 0
        if media.begun:
            assert not self._begun, "one batch at a time"
            self._begun, self._left = {each.key for each in media.begun}, self._num_pieces
        assert media.num_pieces <= self._left
        self._left -= media.num_pieces
        if not self._left:
            self.outputs |= self._begun
            self._begun = set()
        self.outputs |= {each.key for each in media.encodes}
        assert {use.key for use in media.uses} <= self.outputs, "read before it was encoded"
        assert drops <= self.outputs
        self.outputs -= drops


def build(rng: random.Random) -> FakeEngine:
    page_size, window = rng.choice([1, 2, 4, 8]), rng.choice([0, 0, 6, 20])
    pages, stages = -(-MAX_MODEL_LEN // page_size), rng.choice([1, 1, 2, 3])
    layout = make_layout(
        1 + pages + rng.randrange(2 * pages), page_size=page_size, max_rows=rng.randint(1, 8),
        max_model_len=MAX_MODEL_LEN, window=window,
        window_pages=3 + -(-window // page_size) + rng.randrange(pages), full=not window or rng.random() < 0.75,
    )
    is_whole, num_pieces = rng.random() < 0.25, rng.choice([1, 3, 9])
    facts = MediaFacts({"image": IMAGE}, {"image": "<image>"}, 4, is_whole=is_whole, num_pieces=num_pieces)
    scheduler = Scheduler(
        SchedulerConfig(
            max_step_tokens=rng.choice([32, 40, 64]), overlap_depth=rng.randint(1, 2),
            max_running_requests=layout.max_rows, policy=rng.choice(["fcfs", "priority", "longest-prefix"]),
            inter_token_target_ms=rng.choice([None, None, 5.0]),
        ),
        CacheConfig(prefix_cache=rng.random() < 0.8), layout, clock=lambda: 0.0, features=Features(stages, media=facts),
    )
    most = max(SIZES.values())
    scheduler._running.encoders._limits = EncoderLimits(rng.choice([8, 30]), most + rng.randrange(30), most)
    engine = FakeEngine(scheduler, layout, vocab=VOCAB, num_stages=stages)
    engine.runner = MediaRunner(layout, VOCAB, num_pieces)
    return engine


def draw_ask(rng: random.Random, index: int):
    prompt, media = [], []
    for _ in range(rng.randint(1, 3)):
        prompt += [rng.randrange(3) for _ in range(rng.randint(1, 4))]
        if rng.random() < 0.7 and len(prompt) < 40:
            content = rng.choice(list(SIZES))
            media.append(make_item(len(prompt), SIZES[content], content))
            prompt += [IMAGE] * SIZES[content]
    prompt.append(1)
    return make_ask(
        f"r{index}", prompt, rng.choice([1, 1, 5, 20]), seed=rng.randrange(3), media=media,
        namespace=rng.choice(["", "", "x"]), origin=rng.choice([(), ("a", "1"), ("a", "2"), ("b", "3")]),
        priority=rng.randint(0, 2),
    )


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_request_with_images_ends_as_if_it_had_run_alone(seed: int) -> None:
    rng = random.Random(seed)
    before = encoding.BESIDE_TOKENS, budget.MEDIA_CHUNK
    encoding.BESIDE_TOKENS, budget.MEDIA_CHUNK = rng.choice([2, 9]), rng.choice([4, 16])
    try:
        engine = build(rng)
        arrivals = [draw_ask(rng, index) for index in range(30)]
        for _ in range(20_000):
            if not arrivals and not engine.scheduler.has_work:
                break
            while arrivals and rng.random() < 0.5:
                try:
                    engine.add(arrivals.pop())
                except (RequestError, OutOfPages):
                    continue
            engine.step_among_faults(rng)
        assert not engine.scheduler.has_work, "no end in sight"
    finally:
        encoding.BESIDE_TOKENS, budget.MEDIA_CHUNK = before
    engine.check_outputs()
    stats = engine.scheduler.stats()
    assert stats.num_used_pages == stats.num_queued == stats.num_running == 0
