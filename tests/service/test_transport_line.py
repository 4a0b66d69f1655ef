"""The line between client and engine: messages arrive whole and in order, and nobody waits for a reader who does not
read."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from fakes import PATIENCE_S
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.config import engine_config
from headrace.base.errors import ConfigError, EngineUnavailable
from headrace.base.media import DIGEST_BYTES, MediaArray, MediaItem, MediaPlace
from headrace.base.messages import (
    Abort,
    Call,
    EngineRequest,
    FromEngine,
    Outputs,
    Reply,
    RequestOutput,
    ToEngine,
    WithData,
    decode_to_engine,
)
from headrace.base.sampling import SamplingSpec, StopSpec
from headrace.service import framing
from headrace.service.framing import Frames, RequestFrames, frame
from headrace.service.transport import MAX_CONFIG_BYTES, ClientChannel, EngineChannel

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, its = socket.socketpair()
    with ours, its:
        yield ours, its


async def until_heard(heard: list[FromEngine], count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while len(heard) < count:
            await asyncio.sleep(0.001)


@given(sizes=st.lists(st.integers(0, 2000), max_size=12), cuts=st.lists(st.integers(1, 3000), min_size=1, max_size=40))
def test_messages_come_out_whole_however_they_are_cut(sizes: list[int], cuts: list[int]):
    calls = [Call(i, "x" * size) for i, size in enumerate(sizes)]
    stream, frames, found = b"".join(map(frame, calls)), Frames(decode_to_engine), []
    while stream:
        cut = cuts[len(found) % len(cuts)]
        found += frames.feed(stream[:cut])
        stream = stream[cut:]
        cuts = cuts[1:] + cuts[:1]
    assert found == calls


def with_media(number: int, *sizes: int) -> EngineRequest:
    """A request whose items have so many bytes each, none alike."""
    items = []
    for index, size in enumerate(sizes):
        data = bytes((number + index + at) % 251 for at in range(min(size, 1000))) + bytes(max(0, size - 1000))
        place = MediaPlace("image", bytes([index]) * DIGEST_BYTES, [(index, 1)])
        items.append(MediaItem(place, {"pixel_values": MediaArray("uint8", (size,), data)}))
    return EngineRequest(f"r{number}", [1] * (1 + len(sizes)), SamplingSpec(), StopSpec(4), media=items)


def on_the_wire(message: ToEngine) -> bytes:
    if not isinstance(message, EngineRequest) or not message.media:
        return frame(message)
    bare, data = WithData.of(message)
    return b"".join((frame(bare), *data))


@given(
    sizes=st.lists(st.lists(st.integers(0, 600), max_size=3), max_size=6),
    cuts=st.lists(st.tuples(st.integers(1, 900), st.booleans()), min_size=1, max_size=30),
)
def test_requests_with_media_come_out_whole_however_they_are_cut(
    sizes: list[list[int]], cuts: list[tuple[int, bool]]
):
    """Bytes are fed, or, where a channel may, read to where they stay."""
    sent: list[ToEngine] = []
    for number, each in enumerate(sizes):
        sent += [with_media(number, *each), Abort(f"r{number}")]
    stream, frames, found = memoryview(b"".join(map(on_the_wire, sent))), RequestFrames(), []
    while len(stream):
        (cut, is_direct), *rest = cuts
        cuts = [*rest, cuts[0]]
        room = frames.room
        if room is not None and is_direct:
            cut = min(cut, len(room), len(stream))
            room[:cut] = stream[:cut]
            found += frames.advance(cut)
        else:
            found += frames.feed(bytes(stream[:cut]))
            cut = min(cut, len(stream))
        stream = stream[cut:]
    assert found == sent and frames.room is None


async def test_media_are_neither_encoded_nor_copied_at_the_engine(pair: Pair):
    client, engine = await ClientChannel.open(pair[0], lambda message: None), EngineChannel(pair[1])
    client.send(engine_config(model="somewhere"))
    await asyncio.sleep(0)
    engine.read_config()
    sent: list[ToEngine] = [
        with_media(0, 3_000_000, 0, 700), Abort("r0"), with_media(1), with_media(2, 5_000_000), Call(1, "ping")
    ]
    for message in sent:
        client.send(message)
    found: list[ToEngine] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(found) < len(sent):
            await asyncio.sleep(0)
            found += engine.receive(0)
    assert found == sent
    large = found[0].media[0].arrays["pixel_values"].data
    assert isinstance(large, memoryview) and large.readonly and len(large.obj) == 3_000_000


async def test_memory_of_media_is_freed_with_their_request(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    """Whether all of them came or their sender died before."""
    made: list[weakref.ref[Any]] = []
    allocate = framing._allocate

    def note(size: int) -> memoryview:
        view = allocate(size)
        made.append(weakref.ref(view.obj))
        return view

    monkeypatch.setattr(framing, "_allocate", note)
    client, engine = await ClientChannel.open(pair[0], lambda message: None), EngineChannel(pair[1])
    client.send(with_media(0, 2_000_000))
    client.send(with_media(1, 50_000_000))
    found: list[ToEngine] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(made) < 2:
            await asyncio.sleep(0)
            found += engine.receive(0)
    assert len(found) == 1 and made[0]() is not None
    found.clear()
    assert made[0]() is None, "the first is gone with its request"
    client.close()
    async with asyncio.timeout(PATIENCE_S):
        while engine.is_open:
            await asyncio.sleep(0)
            assert not engine.receive(0), "half a request"
    assert made[1]() is not None
    del engine
    gc.collect()
    assert made[1]() is None


async def test_a_client_keeps_nothing_for_an_engine_that_died(pair: Pair):
    client = await ClientChannel.open(pair[0], lambda message: None)
    data = bytearray(30_000_000)
    place = MediaPlace("image", bytes(DIGEST_BYTES), [(0, 1)])
    item = MediaItem(place, {"pixel_values": MediaArray("uint8", (len(data),), data)})
    client.send(EngineRequest("r", [1], SamplingSpec(), StopSpec(1), media=[item]))
    with pytest.raises(BufferError):
        data.clear()  # still to be sent
    pair[1].close()
    async with asyncio.timeout(PATIENCE_S):
        await client.ended
    await asyncio.sleep(0)
    data.clear()


async def test_both_ways(pair: Pair):
    heard: list[FromEngine] = []
    client, engine = await ClientChannel.open(pair[0], heard.append), EngineChannel(pair[1])
    config = engine_config(model="somewhere", seed=5)
    client.send(config)
    for i in range(300):
        client.send(Call(i, "ping"))
    await asyncio.sleep(0)
    assert engine.read_config() == config
    calls = []
    while len(calls) < 300:
        await asyncio.sleep(0.001)
        calls += engine.receive(0)
    assert [call.call_id for call in calls] == list(range(300))
    assert engine.receive(1) == [] and engine.is_open
    for call in calls:
        engine.send(Reply(call.call_id))
    await until_heard(heard, 300)
    assert heard == [Reply(i) for i in range(300)]
    client.close()
    await client.ended
    assert engine.receive(1000) == [] and not engine.is_open
    engine.send(Reply(0))  # to nobody; no error
    with pytest.raises(EngineUnavailable):
        client.send(Call(0, "ping"))


async def test_an_engine_does_not_wait_for_a_reader_and_loses_nothing(pair: Pair):
    engine = EngineChannel(pair[1])
    sent = [Reply(i, "x" * 100_000) for i in range(200)]
    for message in sent:  # 20 MB, of which the system takes a part; nobody reads yet
        engine.send(message)
    heard: list[FromEngine] = []
    await ClientChannel.open(pair[0], heard.append)
    await until_heard(heard, len(sent))
    assert heard == sent
    engine.flush()
    engine.send(Reply(-1))
    await until_heard(heard, len(sent) + 1)
    assert heard[-1] == Reply(-1)


async def test_a_reader_who_is_behind_gets_the_steps_as_one(pair: Pair):
    engine = EngineChannel(pair[1])
    for token in range(5):
        engine.send(Outputs([RequestOutput("r", [token]), RequestOutput("s", [token])]))
    heard: list[FromEngine] = []
    await ClientChannel.open(pair[0], heard.append)
    await until_heard(heard, 1)
    assert heard == [Outputs([RequestOutput("r", [0, 1, 2, 3, 4]), RequestOutput("s", [0, 1, 2, 3, 4])])]


@pytest.mark.parametrize("sent", [b"\x05\x00\x00\x00hello", frame(Call(1, "ping"))])
async def test_what_cannot_be_read_or_taken_is_told(pair: Pair, sent: bytes):
    def take(_: FromEngine) -> None:
        raise AssertionError("not reached")

    channel = await ClientChannel.open(pair[0], take)
    pair[1].sendall(sent)
    assert isinstance(await asyncio.wait_for(channel.failure, PATIENCE_S), ValueError)
    await asyncio.wait_for(channel.ended, PATIENCE_S)


async def test_the_last_words_come_before_the_end(pair: Pair):
    heard: list[FromEngine] = []
    pair[0].sendall(b"unread")
    channel = await ClientChannel.open(pair[0], heard.append)
    pair[1].sendall(frame(Reply(7)))
    pair[1].close()
    await asyncio.wait_for(channel.ended, PATIENCE_S)
    assert heard == [Reply(7)] and not channel.failure.done()


@pytest.mark.parametrize(
    "sent", [b"\x01", b"\x00\x00\x00\x00", (MAX_CONFIG_BYTES + 1).to_bytes(4, "little") + b"x", b"\x09\x00\x00\x00abc"]
)
def test_an_engine_without_a_configuration_says_so(pair: Pair, sent: bytes):
    pair[0].sendall(sent)
    pair[0].close()
    with pytest.raises(ConfigError, match="supervisor"):
        EngineChannel(pair[1]).read_config()


def test_an_engine_whose_parent_failed_first_has_nothing_to_say(pair: Pair):
    pair[0].close()
    assert EngineChannel(pair[1]).read_config() is None


def test_the_end_of_the_other_side_is_noticed_though_nothing_is_read(pair: Pair):
    engine = EngineChannel(pair[1])
    pair[0].sendall(frame(Call(1, "ping")))
    assert not engine.await_end(0.01)
    pair[0].close()
    assert engine.await_end(5)
