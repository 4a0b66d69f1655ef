"""How much steps compute beside decodes: simulated devices, whose step times are known to the test and not to the
scheduler, and what it learns of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.cache import CacheGroup, CacheLayout, CacheSpec
from headrace.base.config import CacheConfig, SchedulerConfig
from headrace.base.media import MediaArray, MediaItem, MediaPlace, digest_of
from headrace.base.media_facts import MediaFacts
from headrace.base.messages import EngineRequest
from headrace.base.sampling import SamplingSpec, StopSpec
from headrace.base.step import StepPlan, StepResult
from headrace.scheduling import budget
from headrace.scheduling.budget import FIRST_CHUNK, LEAST_BESIDE, StepBudget, StepLimit
from headrace.scheduling.scheduler import Features, Scheduler
from headrace.scheduling.timing import MOST_CLASSES, RECENT, StepTimes, StepWork

IMAGE = 99
FACTS = MediaFacts({"image": IMAGE}, {"image": "<image>"}, 4, num_pieces=33)

Cost = Callable[[StepWork], float]


def gpu_cost(work: StepWork) -> float:
    """Seconds of a step on a made-up GPU: reading the weights takes as long as 250 tokens of computing."""
    computed = 12e-6 * (work.decodes + work.tokens)
    return max(3e-3, computed) + 2e-9 * work.context + 1.5e-9 * work.pairs + 13e-6 * work.encoded


class Device:
    """Computes plans in the time that ``cost`` says, in a clock of its own; a share of ``noise`` more or less, and
    every so many steps (``hiccups``) half a second late."""

    def __init__(
        self, cost: Cost = gpu_cost, *, target_ms: float | None = 8.0, noise: float = 0.0, hiccups: int = 0,
        **options: int
    ):
        self.cost, self.noise, self.hiccups = cost, noise, hiccups
        self.random, self.now = random.Random(7), 0.0
        config = SchedulerConfig(**{
            "max_step_tokens": 8192, "overlap_depth": 1, "max_running_requests": 64,
            "inter_token_target_ms": target_ms, **options,
        })
        groups = [CacheGroup(CacheSpec("full", 1, 8, 8, "float32"), [0], 40_000)]
        self.scheduler = Scheduler(
            config, CacheConfig(prefix_cache=False), CacheLayout(16, 64, 200_000, groups),
            clock=lambda: self.now, features=Features(media=FACTS),
        )
        self.works: list[StepWork] = []
        self.seconds: list[float] = []
        self.tokens: dict[str, list[float]] = {}
        """When each token of a request was there."""
        self._under_way = 0

    def add(self, name: str, prompt: int, output: int, *, images: int = 0, client: str = "") -> None:
        """A prompt of so many tokens, of which ``images`` times 1,300 are of images."""
        ids, items = [1] * prompt, []
        for number in range(images):
            offset = 10 + number * 1310
            ids[offset : offset + 1300] = [IMAGE] * 1300
            place = MediaPlace("image", digest_of("image", "", [name.encode(), bytes([number])]), [(offset, 1300)])
            items.append(MediaItem(place, {"pixel_values": MediaArray("float32", (1,), bytes(4))}))
        origin = (client, name) if client else ()
        self.scheduler.add(EngineRequest(name, ids, SamplingSpec(), StopSpec(output), media=items, origin=origin))
        self.tokens[name] = []

    def step(self) -> None:
        """One plan, from its planning to its commit."""
        plan = self.scheduler.plan()
        assert plan is not None, "something can always run"
        work = self._describe(plan)
        seconds = self.cost(work) * (1 + self.noise * self.random.uniform(-1, 1))
        if self.hiccups and len(self.works) % self.hiccups == self.hiccups - 1:
            seconds += 0.5
        self.now += seconds
        self.works.append(work)
        self.seconds.append(seconds)
        result = StepResult(plan.step_id, [1] * sum(plan.samples))
        for output in self.scheduler.commit(plan, result, seconds=seconds):
            assert output.finish is None or output.finish.reason == "length"
            self.tokens[output.request_id] += [self.now] * len(output.token_ids)

    def run(self, most: int = 5000) -> None:
        """Steps until all requests have ended."""
        for _ in range(most):
            if not self.scheduler.has_requests:
                self.scheduler.check()
                return
            self.step()
        raise AssertionError("no end in sight")

    def gaps(self, name: str) -> list[float]:
        """Seconds between the tokens of a request, ascending."""
        return sorted(after - before for before, after in pairwise(self.tokens[name]))

    def mixed(self) -> list[StepWork]:
        """Steps in which decodes waited for prompts or images."""
        return [work for work in self.works if work.is_mixed]

    def _describe(self, plan: StepPlan) -> StepWork:
        count, media = plan.num_decodes, plan.media
        if media.begun:
            self._under_way = sum(each.item.place.num_tokens for each in media.begun)
        encoded = media.num_pieces * self._under_way / FACTS.num_pieces
        encoded += sum(each.item.place.num_tokens for each in media.encodes)
        prompts = list(zip(plan.begins[count:], plan.lengths[count:], strict=True))
        return StepWork(
            sum(plan.lengths[:count]), sum(plan.begins[:count]), sum(length for _, length in prompts),
            sum(length * (begin + length / 2) for begin, length in prompts), encoded,
        )


def stream_beside(device: Device, *prompts: int, images: int = 0, warm_up: int = 60, every: int = 20) -> None:
    """A stream of text, and prompts that come one by one while it runs, after so many steps each."""
    device.add("stream", 40, 2500)
    for _ in range(warm_up):
        device.step()
    for number, length in enumerate(prompts):
        device.add(f"prompt {number}", length, 1, images=images)
        for _ in range(every):
            device.step()
    device.run()


def test_prompts_beside_a_stream_keep_the_target():
    without, bounded = Device(target_ms=None), Device(target_ms=8.0)
    stream_beside(without, *[6000] * 20)
    stream_beside(bounded, *[6000] * 20)
    assert without.gaps("stream")[-1] > 70e-3
    gaps = bounded.gaps("stream")
    assert gaps[-1] <= 8e-3 * 1.25  # while costs are being learned
    assert gaps[-len(gaps) // 100] <= 8e-3 * 1.05
    assert max(work.tokens for work in bounded.mixed()) > 400, "and is used"
    assert all(len(times) == 1 for name, times in bounded.tokens.items() if name != "stream")


def test_noise_and_steps_that_were_held_up_change_little():
    device = Device(target_ms=8.0, noise=0.1, hiccups=50)
    stream_beside(device, *[6000] * 25)
    gaps = [gap for gap in device.gaps("stream") if gap < 0.4]
    assert gaps[-len(gaps) // 100] <= 8e-3 * 1.15  # ten percent of noise
    busy = [work for work in device.mixed()[20:] if work.tokens]
    assert sum(work.tokens for work in busy) / len(busy) > 300


def test_a_first_step_that_compiles_for_seconds_is_forgotten():
    device = Device(target_ms=8.0)
    costs = iter([2.0])
    device.cost = lambda work: next(costs, 0.0) + gpu_cost(work) if work.is_mixed else gpu_cost(work)
    stream_beside(device, *[6000] * 20)
    assert 0 < device.mixed()[0].tokens <= FIRST_CHUNK
    assert max(work.tokens for work in device.mixed()) > 400
    assert device.gaps("stream")[-2] <= 8e-3 * 1.5


def test_chunks_get_smaller_with_the_context():
    device = Device(target_ms=20.0)
    stream_beside(device, 100_000)
    chunks = [work.tokens for work in device.mixed() if work.tokens]
    assert chunks[-2] < 0.25 * max(chunks) and sum(chunks) == 100_000
    gaps = device.gaps("stream")
    assert gaps[-1] <= 20e-3 * 1.25 and gaps[-len(gaps) // 50] <= 20e-3 * 1.02


def test_images_beside_a_stream_keep_the_target():
    bounded = Device(target_ms=6.0)
    stream_beside(bounded, *[1350] * 20, images=1)
    gaps = bounded.gaps("stream")
    assert gaps[-1] <= 6e-3 * 1.5 and gaps[-len(gaps) // 100] <= 6e-3 * 1.1
    assert sum(work.encoded for work in bounded.works) == pytest.approx(20 * 1300)


def test_prompts_of_few_images_are_divided_beside_a_stream():
    """Without a target, too: each of 1,350 tokens would hold it up for 16 ms. Prompts of text are not."""
    images, texts = Device(target_ms=None), Device(target_ms=None)
    stream_beside(images, *[1350] * 20, images=1, every=40)
    stream_beside(texts, *[1350] * 20, every=40)
    assert images.gaps("stream")[-1] < 5e-3 and texts.gaps("stream")[-1] > 15e-3
    found = [work.tokens for work in images.mixed() if work.tokens]
    assert max(found) <= budget.MEDIA_CHUNK - 1 and sum(found) == 20 * 1350, "with its decode they fit a graph"
    assert sum(work.tokens for work in images.works) == 20 * 1350 + 40


@pytest.mark.parametrize("num_decodes", [1, 48])
def test_prompts_of_many_images_are_computed_as_fast_as_ever(num_decodes: int, monkeypatch: pytest.MonkeyPatch):
    firsts: list[list[float]] = []
    for chunk in (budget.MEDIA_CHUNK, 1 << 20):
        monkeypatch.setattr(budget, "MEDIA_CHUNK", chunk)
        device = Device(target_ms=None, max_running_requests=64)
        for number in range(num_decodes):
            device.add(f"stream {number}", 40, 500)
        for _ in range(5):
            device.step()
        begun = device.now
        for number in range(16):
            device.add(f"image {number}", 1350, 1, images=1)
        device.run()
        device.scheduler.check()
        firsts.append(sorted(device.tokens[f"image {number}"][0] - begun for number in range(16)))
    for bounded, free in zip(*firsts, strict=True):
        assert bounded <= 1.25 * free
    assert firsts[0][-1] <= 1.1 * firsts[1][-1]


def test_a_target_bounds_by_time_alone():
    limit = StepLimit(8192, target_s=1.0)
    timed, plain = limit.begin_step([5], [1]), StepLimit(8192).begin_step([5], [1])
    for each in (timed, plain):
        each.bound_media(300, 1)
    assert timed.media_tokens is None and plain.media_tokens == budget.MEDIA_CHUNK // 2
    plain.take(0, 100)
    plain.take(0, 100, has_media=True)
    assert plain.media_tokens == budget.MEDIA_CHUNK // 2 - 100


def test_a_step_that_fails_ends_those_whose_images_it_encodes():
    """Or an image that no encoder can compute would fail the streams of others again and again."""
    device = Device(target_ms=6.0)
    device.add("stream", 40, 2500)
    for _ in range(5):
        device.step()
    device.add("image", 1400, 1, images=1)
    device.add("text", 9000, 1)
    while (plan := device.scheduler.plan()) is not None and not plan.media.num_pieces:
        device.scheduler.commit(plan, StepResult(plan.step_id, [1] * sum(plan.samples)), seconds=3e-3)
    assert plan is not None
    ended = {output.request_id for output in device.scheduler.fail(plan, RuntimeError("a kernel"))}
    assert {"stream", "image"} <= ended
    device.scheduler.check()
    device.tokens["text"] = []
    if "text" not in ended:
        device.run()
    assert not device.scheduler.has_requests


def test_prompts_of_text_go_on_beside_many_images():
    device = Device(target_ms=6.0)
    device.add("stream", 40, 2500)
    for number in range(8):
        device.add(f"image {number}", 4000, 1, images=3)
    for _ in range(5):
        device.step()
    device.add("text", 3000, 1)
    begun = len(device.works)
    while not device.tokens["text"]:
        device.step()
    assert len(device.works) - begun < 300
    device.run()
    assert sum(work.encoded for work in device.works) == pytest.approx(8 * 3 * 1300)


@pytest.mark.parametrize("images", [0, 1])
def test_a_target_that_decodes_alone_miss_stops_no_prompt(images: int):
    device = Device(target_ms=0.5)
    stream_beside(device, *[3000] * 8, images=images)
    assert len(device.tokens) == 9 and all(device.tokens.values())
    busy = [work for work in device.mixed() if work.tokens]
    assert sum(work.tokens for work in busy) == 8 * 3000
    assert sum(work.tokens >= LEAST_BESIDE for work in busy) >= len(busy) - 8 * (1 + 2 * images), "but at ends"


def test_a_slow_device_computes_few_tokens_beside_a_stream():
    """Where each token takes a millisecond, as on a few cores."""
    device = Device(lambda work: 20e-3 + 1e-3 * (work.decodes + work.tokens) + 1e-8 * work.pairs, target_ms=100.0)
    stream_beside(device, *[600] * 8)
    gaps = device.gaps("stream")
    assert gaps[-len(gaps) // 50] <= 105e-3 and max(work.tokens for work in device.mixed()[9:]) >= 60


def test_the_price_of_a_target_is_what_decodes_take_of_it():
    """Of each step of 8 ms decodes take 3, which leaves prompts five eighths of the time that they had alone."""
    without, bounded = Device(target_ms=None), Device(target_ms=8.0)
    ends = []
    for device in (without, bounded):
        device.add("stream", 40, 3000)
        for _ in range(200):
            device.step()
        begun = device.now
        for number in range(30):
            device.add(f"prompt {number}", 4000, 1)
        while not device.tokens["prompt 29"]:
            device.step()
        ends.append(device.now - begun)
    assert ends[1] / ends[0] < 8 / 5


def test_a_device_that_gets_slower_is_noticed():
    device = Device(target_ms=10.0)
    device.add("stream", 40, 4000)
    for number in range(200):
        device.add(f"prompt {number}", 2000, 1)
    for _ in range(200):
        device.step()
    device.cost = lambda work: 2 * gpu_cost(work)
    changed = len(device.seconds)
    for _ in range(200):
        device.step()
    assert max(device.seconds[changed : changed + 10]) > 15e-3
    assert max(device.seconds[changed + 2 * RECENT :]) <= 12.5e-3
    assert max(device.seconds[changed + 150 :]) <= 11.5e-3
    device.cost = gpu_cost
    for _ in range(60):
        device.step()
    assert min(work.tokens for work in device.works[-30:]) > 400 and max(device.seconds[-30:]) <= 12e-3


def test_long_streams_of_text_do_not_make_it_forget_prompts():
    device = Device(target_ms=8.0)
    stream_beside(device, *[6000] * 10)
    device.add("later", 40, 6000)
    for _ in range(4000):
        device.step()
    begun = len(device.works)
    device.add("prompt", 6000, 1)
    device.run()
    found = [gpu_cost(work) for work in device.works[begun:] if work.tokens]
    assert max(found) <= 8e-3 * 1.1 and len(found) < 30


def test_clients_share_what_a_step_may_compute():
    device = Device(target_ms=8.0)
    device.add("stream", 40, 2500)
    for _ in range(40):
        device.step()
    for client in "abcd":
        device.add(client, 5000, 1, client=client)
    device.run()
    ends = [device.tokens[client][0] for client in "abcd"]
    assert max(ends) - min(ends) < 0.25 * (max(ends) - device.tokens["stream"][40])
    assert device.gaps("stream")[-1] <= 8e-3 * 1.25


def test_without_decodes_a_step_is_as_large_as_ever():
    limit = StepLimit(8192, target_s=1e-3)
    found = limit.begin_step([], [])
    assert type(found) is StepBudget and found.most(100_000) == 8192 and found.encoder_tokens is None
    found = StepLimit(8192).begin_step([5, 6], [1, 3])
    assert type(found) is StepBudget and found.most(0) == 8188


def test_stages_share_the_time_between_tokens():
    """A token passes all of them before its row decodes again."""
    one, two = StepLimit(8192, 1, 20e-3), StepLimit(8192, 2, 20e-3)
    for limit in (one, two):
        for tokens in (0, 100, 1000, 4000) * 8:
            work = StepWork(decodes=4, context=400, tokens=tokens)
            limit.note_time(work, 2e-3 + 1e-5 * tokens)
    assert one.begin_step([100] * 4, [1] * 4).most(0) == pytest.approx(1800, rel=0.05)
    assert two.begin_step([100] * 4, [1] * 4).most(0) == pytest.approx(800, rel=0.05)


works = st.builds(
    StepWork, st.integers(0, 256), st.integers(0, 10**6), st.integers(0, 8192), st.floats(0, 1e9), st.floats(0, 4096)
)


@given(st.lists(st.tuples(works, st.floats(1e-5, 100.0)), max_size=60), works)
def test_whatever_was_measured_what_is_expected_is_a_time(notes: list[tuple[StepWork, float]], asked: StepWork):
    times, limit = StepTimes(), StepLimit(8192, target_s=5e-3)
    for work, seconds in notes:
        times.note(work, seconds)
        limit.note_time(work, seconds)
    assert 0.0 <= times.seconds(asked) < 1e12 and min(times.token_s, times.pair_s, times.encoded_s) >= 0.0
    budget = limit.begin_step([50] * 4, [1] * 4)
    assert LEAST_BESIDE <= budget.most(100_000) <= budget.most(0) <= 8188, "prompts always go on"


def test_costs_are_found_from_mixed_steps_alone():
    rng, times = random.Random(3), StepTimes()
    for _ in range(3000):
        tokens = rng.choice((0, 64, 200, 900, 2000))
        work = StepWork(
            rng.randrange(1, 65), rng.randrange(1000, 90_000), tokens, tokens * rng.uniform(10, 20_000),
            rng.choice((0.0, 0.0, 40.0, 300.0)),
        )
        times.note(work, 1e-3 + 1e-5 * work.decodes + 1e-8 * work.context + 1e-5 * tokens + 1e-9 * work.pairs
                   + 2e-5 * work.encoded)
    assert times.token_s == pytest.approx(1e-5, rel=0.1)
    assert times.pair_s == pytest.approx(1e-9, rel=0.1)
    assert times.encoded_s == pytest.approx(2e-5, rel=0.1)
    assert len(times._classes) <= MOST_CLASSES
    assert times.seconds(StepWork(30, 50_000, 500, 5e6, 100.0)) == pytest.approx(13.8e-3, rel=0.05)
