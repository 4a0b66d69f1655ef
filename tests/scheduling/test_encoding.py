"""Which media steps encode: budget of a step, room for outputs, hits, and items that are computed whole."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from headrace.base.errors import RequestError
from headrace.base.media import MediaArray, MediaItem, MediaPlace, digest_of, find_runs
from headrace.base.media_facts import ImagePixels, MediaFacts, PatchPixels, PixelLayout, SizedPixels, check_media
from headrace.base.messages import EngineRequest
from headrace.base.sampling import SamplingSpec, StopSpec
from headrace.base.step import Encode, MediaPlan
from headrace.scheduling import encoding
from headrace.scheduling.encoding import EncoderAccount, EncoderLimits
from headrace.scheduling.held_media import HeldMedia
from headrace.scheduling.request import Request

TOKEN = 99
FACTS = MediaFacts({"image": TOKEN}, {"image": "<image>"}, 4)


def make_item(offset: int, count: int, content: str) -> MediaItem:
    place = MediaPlace("image", digest_of("image", "", [content.encode()]), [(offset, count)])
    return MediaItem(place, {"pixel_values": MediaArray("float32", (1,), bytes(4))})


def make_request(*parts: int | tuple[int, str], name: str = "r", namespace: str = "") -> Request:
    """``parts``: so many tokens of text, or so many placeholders of an image."""
    ids: list[int] = []
    items = []
    for part in parts:
        if isinstance(part, int):
            ids += range(1, part + 1)
        else:
            items.append(make_item(len(ids), *part))
            ids += [TOKEN] * part[0]
    ask = EngineRequest(name, ids, SamplingSpec(), StopSpec(4), namespace=namespace, media=items)
    return Request(ask, seq=0, max_model_len=4096, deadline=None)


def make_account(
    *, step: int = 10, cache: int = 20, model: int = 100, is_whole: bool = False, pieces: int = 1
) -> EncoderAccount:
    facts = MediaFacts(FACTS.token_ids, FACTS.texts, 4, is_whole=is_whole, num_pieces=pieces)
    return EncoderAccount(facts, EncoderLimits(step, cache, model))


def plan(
    account: EncoderAccount, request: Request, begin: int, end: int, *, hard_end: int = 0
) -> tuple[int, MediaPlan]:
    account.begin_step()
    end = account.limit(request, begin, end, hard_end=hard_end or end)
    if end > begin:
        account.take(request, begin, end)
    account.audit({request})
    return end, account.take_plan()


def test_a_chunk_ends_before_the_image_that_the_budget_does_not_cover():
    account, request = make_account(step=10), make_request(3, (6, "a"), 2, (6, "b"), 1)
    end, first = plan(account, request, 0, 18)
    assert end == 11 and [use.index for use in first.uses] == [0]
    end, second = plan(account, request, 11, 18)
    assert end == 18 and [use.index for use in second.uses] == [1]
    assert [encode.item.place.num_tokens for encode in first.encodes + second.encodes] == [6, 6]


def test_an_image_in_several_chunks_is_encoded_once_and_kept_meanwhile():
    account, request = make_account(step=10, cache=8), make_request(1, (8, "a"), 1)
    end, first = plan(account, request, 0, 4)
    assert end == 4 and len(first.encodes) == 1
    other = make_request((8, "b"), name="other")
    account.begin_step()
    assert account.limit(other, 0, 8, hard_end=8) == 0  # no room beside the pinned output
    end, second = plan(account, request, 4, 10)
    assert not second.encodes and second.uses[0].key == first.encodes[0].key
    end, third = plan(account, other, 0, 8)
    assert end == 8 and third.drops == [first.encodes[0].key]


def step(account: EncoderAccount, *running: Request, is_beside: bool = True) -> MediaPlan:
    """The media of a step that computes as much as it can of each prompt."""
    account.begin_step(running, is_beside=is_beside)
    for request in running:
        begin = request.planned_len
        end = account.limit(request, begin, request.prompt_len, hard_end=request.prompt_len)
        if end > begin:
            account.take(request, begin, end)
            request.planned_len = end
    account.audit(set(running))
    return account.take_plan()


def test_beside_streams_a_large_image_is_encoded_in_pieces():
    account, request = make_account(step=2000, cache=2000, pieces=20), make_request(3, (1000, "a"), 2)
    plans = [step(account, request) for _ in range(11)]
    # of 50 tokens each, and 128 a step, but half as many in the one that sends the pixels
    assert [plan.num_pieces for plan in plans] == [1, *[2] * 9, 1]
    assert [len(plan.begun) for plan in plans] == [1, *[0] * 10] and not any(plan.encodes for plan in plans)
    assert [len(plan.uses) for plan in plans] == [*[0] * 10, 1] and request.planned_len == 1005


def test_without_streams_nothing_is_divided():
    account, first, then = (
        make_account(step=2000, cache=4000, pieces=10), make_request(3, (1000, "a")), make_request((900, "b"), name="s")
    )
    assert step(account, first).num_pieces == 1
    found = step(account, first, then, is_beside=False)  # and what is under way is finished
    assert found.num_pieces == 9 and len(found.encodes) == 1 and len(found.uses) == 2
    assert step(account, first, then).num_pieces == 0


def test_many_images_are_encoded_as_fast_as_without_streams():
    account = make_account(step=2000, cache=20_000, pieces=10)
    waiting = [make_request((1000, f"image {i}"), name=str(i)) for i in range(12)]
    taken = []
    while any(request.planned_len < request.prompt_len for request in waiting):
        taken.append(step(account, *waiting))
    assert sum(len(each.encodes) + len(each.begun) for each in taken) == 12
    assert len(taken[0].encodes) == 1 and len(taken[0].begun) == 1  # of twelve times 128 tokens
    assert [len(each.uses) for each in taken[:3]] == [1, 1, 1]
    assert len(taken) <= 25, "one alone takes ten steps"


def test_small_images_need_not_wait_for_large_ones():
    account = make_account(step=2000, cache=20_000, pieces=10)
    large = [make_request((1900, f"large {i}"), name=f"l{i}") for i in range(20)]
    running = [large.pop()]
    for number in range(30):
        small = make_request((100, f"small {number}"), name=f"s{number}")
        running = [request for request in running if request.planned_len < request.prompt_len] or [large.pop()]
        step(account, *running, small)
        assert small.planned_len == 100, number


def test_what_is_under_way_is_neither_dropped_nor_begun_again():
    account, gone = make_account(step=2000, cache=1500, pieces=10), make_request((1000, "a"))
    (encode,) = step(account, gone).begun
    account.leave(gone)  # aborted, while the batch is under way
    other, again = make_request((800, "b"), name="other"), make_request((1000, "a"), name="again")
    plans = [step(account, other, again)]
    while not plans[-1].uses:
        plans.append(step(account, other, again))
    assert sum(plan.num_pieces for plan in plans) == 9 and not any(plan.drops or plan.begun for plan in plans)
    assert plans[-1].uses[0].key == encode.key and again.planned_len == 1000
    account.leave(again)
    while other.planned_len < 800:
        plans.append(step(account, other))
    assert encode.key in [key for plan in plans for key in plan.drops]


def test_what_nobody_waits_for_any_more_is_given_up():
    account, gone = make_account(step=2000, cache=1500, pieces=10), make_request((1000, "a"))
    (encode,) = step(account, gone).begun
    account.leave(gone)
    other = make_request((1400, "b"), name="other")
    plan = step(account, other)
    assert plan.drops == [encode.key] and len(plan.begun) == 1, "and what it kept out is begun"
    account.leave(other)
    plan = step(account, is_beside=False)
    assert plan.drops and not plan.num_pieces
    assert not any(each.drops or each.num_pieces for each in (step(account), step(account, is_beside=False)))


def test_the_same_image_is_encoded_once_for_all():
    account = make_account(step=100, cache=100)
    first, again = make_request(2, (5, "a")), make_request(4, (5, "a"), (5, "c"), name="again")
    _, one = plan(account, first, 0, 7)
    account.leave(first)
    _, two = plan(account, again, 0, 14)
    assert [use.key for use in two.uses] == [one.encodes[0].key, two.encodes[0].key]
    assert len(two.encodes) == 1 and account.num_hits == 1


def test_an_image_beyond_the_budget_is_encoded_alone():
    account, request = make_account(step=4, cache=50), make_request((9, "a"), (3, "b"))
    end, first = plan(account, request, 0, 12)
    assert end == 9 and len(first.encodes) == 1


def test_whole_images_are_never_divided_and_may_take_more_than_a_share():
    account, request = make_account(step=50, cache=50, is_whole=True), make_request(3, (6, "a"), 4)
    assert plan(account, request, 0, 7)[0] == 3
    assert plan(account, request, 3, 5, hard_end=8)[0] == 3  # not even the whole step has room
    assert plan(account, request, 3, 5, hard_end=20)[0] == 9


@pytest.mark.parametrize("limits", [{"cache": 5}, {"model": 5, "is_whole": True}])
def test_what_never_fits_is_refused(limits: dict[str, int]):
    account = make_account(**limits)
    with pytest.raises(RequestError, match="larger than the 5"):
        account.check(make_request((6, "a")))
    account.check(make_request((5, "a")))


def test_media_that_do_not_belong_to_the_prompt_are_refused():
    account, good = make_account(), make_request(2, (3, "a"))
    for ids, items in (
        (good.tokens, []), (good.tokens, [make_item(1, 3, "a")]),
        (good.tokens, [make_item(2, 4, "a")]), (good.tokens, [make_item(2, 2, "a")]),
    ):
        bad = Request(
            EngineRequest("bad", ids, SamplingSpec(), StopSpec(4), media=items), seq=0, max_model_len=64, deadline=None
        )
        with pytest.raises(RequestError):
            account.check(bad)
    with pytest.raises(RequestError, match="text alone"):
        EncoderAccount(None, EncoderLimits(1, 1, 1)).check(good)


def test_outputs_are_not_shared_between_salts():
    account, encoded = make_account(), []
    for salt in ("a", "a", "b"):
        request = make_request(2, (3, "same"), namespace=salt)
        account.begin_step()
        account.take(request, 0, 5)
        encoded.append(len(account.take_plan().encodes))
    assert encoded == [1, 0, 1]


def test_equal_media_are_held_once_and_within_bytes():
    held, first = HeldMedia(8), make_request((2, "a"), (2, "b"))
    assert held.has_room(first)
    held.enter(first)
    assert held.num_bytes == 8
    ask = EngineRequest("r", [], SamplingSpec(), StopSpec(1), media=[make_item(0, 2, "a")])
    assert held.share(ask).media[0].arrays is first.media[0].arrays
    again, other = make_request((2, "a"), name="s"), make_request((2, "c"), name="t")
    assert held.has_room(again) and not held.has_room(other)
    held.enter(again)
    held.leave(first)
    assert held.num_bytes == 4 and held.has_room(other)
    with pytest.raises(RequestError, match=r"send fewer.*"):
        held.has_room(make_request((2, "a"), (2, "b"), (2, "c")))


def test_further_choices_have_the_arrays_of_the_first():
    held, item = HeldMedia(8), make_item(0, 2, "a")
    bare = EngineRequest("r/1", [], SamplingSpec(), StopSpec(1), media=[msgspec.structs.replace(item, arrays={})])
    assert held.share(bare).media[0].arrays == {}
    first = msgspec.structs.replace(bare, media=[msgspec.structs.replace(item, num_followers=2)])
    assert held.share(first).media == [item]
    assert held.share(bare).media == [item] and held.share(bare).media == [item]
    assert held.share(bare).media[0].arrays == {} and not held._latest, "nothing is kept for who does not come"
    held.share(first)
    held.share(msgspec.structs.replace(bare, media=[item]))
    assert not held._latest


PATCHES, IMAGES, SIZED = PatchPixels(5, 2), ImagePixels(3, 8, 4), SizedPixels(3, 4, 2)


@pytest.mark.parametrize("pixels, shape, grid, runs, is_right", [
    (PATCHES, (24, 5), (1, 4, 6), [6], True),
    (PATCHES, (72, 5), (3, 4, 6), [6, 12], True),
    (PATCHES, (72, 5), (3, 4, 6), [7, 11], False),  # a frame in two runs
    (PATCHES, (24, 5), (1, 6, 6), [6], False),
    (PATCHES, (24, 5), (1, 3, 8), [6], False),  # rows that cannot be merged
    (PATCHES, (24, 6), (1, 4, 6), [6], False),
    (PATCHES, (24, 5), (1, 4, 6), [5], False),
    (PATCHES, (24, 5), (), [6], False),
    (PATCHES, (0, 5), (0, 4, 6), [6], False),
    (IMAGES, (2, 3, 8, 8), (), [4, 4], True),
    (IMAGES, (2, 3, 8, 8), (), [4], False),
    (IMAGES, (1, 3, 8, 6), (), [4], False),
    (SIZED, (1, 3, 24, 16), (16, 16), [2, 2], True),
    (SIZED, (1, 3, 24, 16), (16, 24), [6], False),  # more than there is
    (SIZED, (1, 3, 24, 16), (16, 16), [3], False),
    (None, (7,), (1, 2, 3), [3], True),
])
def test_pixels_grid_and_placeholders_belong_together(
    pixels: PixelLayout | None, shape: tuple[int, ...], grid: tuple[int, ...], runs: list[int], is_right: bool
):
    ids, places = [1], []
    for count in runs:
        places.append((len(ids), count))
        ids += [*[TOKEN] * count, 1]
    place = MediaPlace("image", bytes(32), places, grid)
    item = MediaItem(place, {"pixel_values": MediaArray("uint8", shape, bytes(math.prod(shape)))})
    facts = MediaFacts(FACTS.token_ids, FACTS.texts, 4, pixels=pixels)
    if is_right:
        check_media([item], ids, facts)
        return
    with pytest.raises(RequestError, match="same checkpoint"):
        check_media([item], ids, facts)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1.0, 1e9])
def test_numbers_that_no_position_can_be_computed_from_are_refused(number: float):
    place = MediaPlace("image", bytes(32), [(0, 1)], (), {"second_per_grid_ts": number})
    with pytest.raises(RequestError, match="numbers of media"):
        check_media([MediaItem(place, {})], [TOKEN], FACTS)


def test_keys_tell_images_apart_and_positions_in_them():
    first, same, other = (make_request(3, (12, content), 2) for content in "aab")
    assert first.key_bytes(0, 17) == same.key_bytes(0, 17)
    assert first.key_bytes(0, 12) == other.key_bytes(0, 3) + first.key_bytes(3, 12)
    assert first.key_bytes(3, 15) != other.key_bytes(3, 15)
    whole = first.key_bytes(0, 17)
    for begin in range(17):
        assert first.key_bytes(begin, 17) == whole[4 * begin :]


def test_runs_are_found_between_other_tokens():
    ids = [1, TOKEN, TOKEN, 2, TOKEN, 3, TOKEN, TOKEN]
    assert find_runs(ids, TOKEN, [3, 2]) == [[(1, 2), (4, 1)], [(6, 2)]]
    with pytest.raises(RequestError, match="placeholders"):
        find_runs(ids, TOKEN, [3])


@pytest.mark.parametrize("pieces", [1, 5])
def test_any_order_of_chunks_ends_and_keeps_the_account(pieces: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(encoding, "BESIDE_TOKENS", 2)
    found = [run_any_order(pieces, random.Random(seed)) for seed in range(10)]
    for count in map(sum, zip(*found, strict=True)):
        assert bool(count) == (pieces > 1)


def run_any_order(pieces: int, rng: random.Random) -> tuple[int, int]:
    """How often a batch was begun, and how often one was given up."""
    account = make_account(step=6, cache=12, pieces=pieces)
    under_way: list[Encode] = []
    num_left = num_divided = num_given_up = 0
    sizes = {content: rng.randint(1, 12) for content in "abcdefg"}
    waiting = []
    for i in range(60):
        first, second = rng.choice("abcd"), rng.choice("efg")
        items = (sizes[first], first), 2, (sizes[second], second)
        waiting.append(make_request(rng.randint(1, 4), *items, name=f"r{i}"))
    on_device: dict[int, int] = {}
    running: dict[Request, int] = {}
    for _ in range(5000):
        while waiting and len(running) < 4:
            running[waiting.pop()] = 0
        if not running:
            break
        for request, begin in running.items():
            request.planned_len = begin
        account.begin_step(running, is_beside=rng.random() < 0.9)
        encoded = 0
        for request, begin in list(running.items()):
            if rng.random() < 0.05:
                account.leave(request)
                del running[request]
                waiting.insert(0, request)
                continue
            end = account.limit(
                request, begin, min(begin + rng.randint(1, 9), request.prompt_len), hard_end=request.prompt_len
            )
            if end > begin:
                account.take(request, begin, end)
                running[request] = end
            if end == request.prompt_len:
                account.leave(request)
                del running[request]
        step = account.take_plan()
        given_up = {each.key for each in under_way}.intersection(step.drops)
        if given_up and (step.begun or not step.num_pieces):
            assert len(given_up) == len(under_way)
            under_way, num_left = [], 0
            num_given_up += 1
        else:
            given_up = set()
        if step.begun:
            assert not under_way and not any(item.key in on_device for item in step.begun)
            under_way, num_left, num_divided = step.begun, pieces, num_divided + 1
        num_left -= step.num_pieces
        assert num_left >= 0
        held = sum(encode.item.place.num_tokens for encode in under_way)
        if not num_left:
            on_device |= {encode.key: encode.item.place.num_tokens for encode in under_way}
            under_way, held = [], 0
        for encode in step.encodes:
            on_device[encode.key] = encode.item.place.num_tokens
            encoded += encode.item.place.num_tokens
        assert all(use.key in on_device for use in step.uses)
        for key in step.drops:
            if key not in given_up:
                del on_device[key]
        assert sum(on_device.values()) + held <= 12
        assert encoded <= 6 or len(step.encodes) == 1
        account.audit(set(running))
    assert not waiting and not running
    return num_divided, num_given_up
