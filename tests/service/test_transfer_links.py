"""Parts of transfer agents, without their processes."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from headrace.base.errors import TransferFailed
from headrace.base.sampling import TransferSpec
from headrace.base.token_ids import pack_ids
from headrace.base.transfer import (
    Alive,
    Completed,
    Fetch,
    Filled,
    FirstTokens,
    FromAgent,
    Hello,
    Lost,
    Offer,
    PeerFacts,
    Reclaim,
    Refusal,
    Released,
    Want,
    decode_from_decode,
    decode_from_prefill,
    digest_prompt,
)
from headrace.memory.transfer.contract import Copy, Region
from headrace.service.framing import frame
from headrace.service.transfer import fetching, offering
from headrace.service.transfer.fetching import Fetches
from headrace.service.transfer.offering import Offers
from headrace.service.transfer.wire import LENGTH, PeerLine


@pytest.fixture(autouse=True)
def _networks_that_bring_nothing_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "DRAIN_S", 0.05)


async def test_a_message_that_comes_in_two_parts_survives_a_time_limit_between_them():
    reader, data = asyncio.StreamReader(), frame(Alive(1.5))
    line = PeerLine(reader, cast(Any, None), "a peer")
    for end in (LENGTH.size, len(data) - 1):
        reader.feed_data(data[:end])
        with pytest.raises(TimeoutError):
            await line.receive(decode_from_prefill, 0.01)
        reader.feed_data(data[end:])
        assert await line.receive(decode_from_prefill, 1.0) == Alive(1.5)


def test_whatever_a_backend_raises_fails_the_transfer():
    def write(copies: object) -> None:
        raise RuntimeError("unplugged")

    region = Region.create(4096)
    offers = Offers(Hello(PeerFacts("m", 16, []), 1, "other", b""), region, cast(Any, None), print, lambda: 0.0)
    room, destination = SimpleNamespace(offer=Offer(1, "7", b"p", 0, 64)), SimpleNamespace(write=write)
    with pytest.raises(TransferFailed, match="RuntimeError: unplugged"):
        offers.write(cast(Any, room), cast(Any, destination), Want(1, "7", b"p", 0, 64), [(0, 64)])
    region.close()


async def test_a_backend_that_cannot_connect_or_close_costs_its_peer_alone(caplog: pytest.LogCaptureFixture):
    class Backend:
        def connect(self, handle: bytes) -> Any:
            if handle == b"unknown":
                raise KeyError("no such link")
            return self

        def close(self) -> None:
            raise OSError("unplugged")

    async def greet(handle: bytes) -> tuple[PeerLine, object]:
        line = PeerLine(*await asyncio.open_connection("127.0.0.1", port), "prefill agent")
        line.send(msgspec.structs.replace(HELLO, handle=handle))
        return line, await line.receive(decode_from_prefill, 5.0)

    region = Region.create(4096)
    offers = Offers(HELLO, region, cast(Any, Backend()), lambda message: None, lambda: 0.0)
    server = await asyncio.start_server(offers.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    refused, answer = await greet(b"unknown")
    assert answer == Refusal("the transfer backend failed: KeyError: 'no such link'")
    first, answer = await greet(b"known")
    second, again = await greet(b"known")  # of the same epoch: the first has to end before
    assert isinstance(answer, Hello) and isinstance(again, Hello)
    assert "the transfer backend failed: OSError: unplugged" in caplog.text
    for line in (refused, first, second):
        line.close()
    server.close()
    region.close()


def test_prompts_of_other_adapters_and_salts_are_others():
    adapter = "f" * 64
    names = ["", "salt", f"{adapter}/", f"{adapter}/one", f"{adapter}/two", "x" * 200, "x" * 200 + "y"]
    assert len({digest_prompt(pack_ids([1, 2]), name) for name in names}) == len(names)


def test_prompts_are_named_alike_by_all_versions():
    ids = [0, 1, 128_000, 2**31 - 1, -1]
    packed, key = b"".join(each.to_bytes(4, "little", signed=True) for each in ids), blake2b(b"salt").digest()
    assert digest_prompt(pack_ids(ids), "salt") == blake2b(packed, digest_size=16, key=key).digest()


HELLO = Hello(PeerFacts("m", 16, []), 1, "other", b"")
RESET = struct.pack("ii", 1, 0)


@pytest.mark.parametrize("end", ["resets", "closes"])
async def test_a_lease_behind_a_broken_line_is_released_when_the_peer_has_answered(
    end: str, monkeypatch: pytest.MonkeyPatch
):
    """A reset says nothing of the peer, which may still write; the orderly end of a line does."""
    monkeypatch.setattr(fetching, "FENCE_S", 0.01)
    heard: list[FromAgent] = []
    greeted: list[int] = []
    may_answer, broken = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = PeerLine(reader, writer, "decode agent")
        hello = await line.receive(decode_from_decode, 5.0)
        assert isinstance(hello, Hello)
        greeted.append(hello.epoch)
        if len(greeted) == 1:
            line.send(HELLO)
            await line.receive(decode_from_decode, 5.0)
            if end == "resets":
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            broken.set()
        else:
            await may_answer.wait()
            line.send(HELLO)
        line.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    region = Region.create(4096)
    fetches = Fetches(Hello(HELLO.facts, 7, "other", b""), region, heard.append)
    port = server.sockets[0].getsockname()[1]
    fetches.fetch(Fetch(3, TransferSpec("7", "127.0.0.1", port), b"p", 0, 64))
    async with asyncio.timeout(10):
        await broken.wait()
        while not heard or (end == "resets" and len(greeted) < 2):
            await asyncio.sleep(0.005)
        assert isinstance(heard[0], Lost)
        if end == "resets":
            assert len(heard) == 1, "the peer has not answered: it may write"
            may_answer.set()
        while len(heard) < 2:
            await asyncio.sleep(0.005)
    assert heard[1] == Released(3) and greeted == ([7, 7] if end == "resets" else [7])
    server.close()
    region.close()


async def test_a_peer_that_is_never_heard_of_again_keeps_no_lease_for_ever(monkeypatch: pytest.MonkeyPatch):
    """As one whose host is off. While another peer sends pages it may keep its own for longer."""
    monkeypatch.setattr(fetching, "SILENCE_S", 0.2)
    heard: list[FromAgent] = []
    is_silent = True

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = PeerLine(reader, writer, "decode agent")
        await line.receive(decode_from_decode, 5.0)
        line.send(HELLO)
        while not is_silent:
            line.send(Alive(0.0))
            await asyncio.sleep(0.02)
        await asyncio.sleep(60)

    region = Region.create(4096)
    servers = [await asyncio.start_server(serve, "127.0.0.1", 0) for _ in range(2)]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    fetches = Fetches(HELLO, region, heard.append)
    fetches.fetch(Fetch(3, TransferSpec("7", "127.0.0.1", ports[0]), b"p", 0, 64))
    fetches.check_held()
    async with asyncio.timeout(10):
        while not heard:
            await asyncio.sleep(0.005)
        assert heard == [Lost(3, heard[0].reason)]
        fetches.check_held()
        monkeypatch.setattr(fetching, "HELD_S", 0.05)
        await asyncio.sleep(0.06)
        with pytest.raises(TransferFailed, match=f"prefill agent 127.0.0.1:{ports[0]} did not say"):
            fetches.check_held()
        is_silent = False
        fetches.fetch(Fetch(4, TransferSpec("8", "127.0.0.1", ports[1]), b"p", 64, 64))
        await asyncio.sleep(0.1)
        fetches.check_held()
        monkeypatch.setattr(fetching, "LONGEST_HELD_S", 0.1)
        with pytest.raises(TransferFailed, match="memory that it may write to is given up"):
            fetches.check_held()
    assert heard == [Lost(3, heard[0].reason)]
    for server in servers:
        server.close()
    region.close()


async def test_a_lease_behind_a_broken_line_is_released_when_nobody_listens_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fetching, "FENCE_S", 0.01)
    heard: list[FromAgent] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = PeerLine(reader, writer, "decode agent")
        await line.receive(decode_from_decode, 5.0)
        line.send(HELLO)
        await line.receive(decode_from_decode, 5.0)
        server.close()
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        line.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    region = Region.create(4096)
    fetches = Fetches(HELLO, region, heard.append)
    fetches.fetch(Fetch(3, TransferSpec("7", "127.0.0.1", server.sockets[0].getsockname()[1]), b"p", 0, 64))
    async with asyncio.timeout(10):
        while len(heard) < 2:
            await asyncio.sleep(0.005)
    assert isinstance(heard[0], Lost) and heard[1] == Released(3)
    region.close()


async def test_pages_that_nobody_wants_make_way_for_others(monkeypatch: pytest.MonkeyPatch):
    """As where a decode engine has died: only for requests that lack memory, and not at once."""
    now, said = [100.0], []
    monkeypatch.setattr(offering, "time", SimpleNamespace(monotonic=lambda: now[0]))
    region = Region.create(4096)
    offers = Offers(HELLO, region, cast(Any, None), said.append, lambda: 0.0)
    for ticket in (1, 2, 3):
        offers.take(Offer(ticket, f"{ticket}", b"p", 0, 64))
    for ticket in (1, 2):
        offers.take(Filled(ticket, [(0, 64)]))
        offers.take(Completed(ticket, FirstTokens([1])))
    offers._rooms["2"].is_taken = True
    offers.take(Reclaim())
    now[0] += offering.UNWANTED_S
    assert not said
    offers.take(Reclaim())
    assert [(message.ticket, "others need" in message.reason) for message in said] == [(1, True)]
    assert list(offers._rooms) == ["2", "3"], "one is being fetched, one is not complete"
    region.close()


async def test_a_greeting_is_answered_when_the_writes_of_the_same_epoch_have_ended():
    writing, may_end = threading.Event(), threading.Event()

    class Backend:
        def connect(self, handle: bytes) -> Any:
            return self

        def write(self, copies: list[Copy]) -> None:
            writing.set()
            assert may_end.wait(10)

        def close(self) -> None:
            pass

    async def greet(port: int) -> PeerLine:
        line = PeerLine(*await asyncio.open_connection("127.0.0.1", port), "prefill agent")
        line.send(HELLO)
        return line

    region = Region.create(4096)
    offers = Offers(HELLO, region, cast(Any, Backend()), lambda message: None, lambda: 0.0)
    server = await asyncio.start_server(offers.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    first = await greet(port)
    assert isinstance(await first.receive(decode_from_prefill, 5.0), Hello)
    offers.take(Offer(1, "7", b"p", 0, 64))
    offers.take(Filled(1, [(0, 64)]))
    first.send(Want(3, "7", b"p", 0, 64))
    assert await asyncio.to_thread(writing.wait, 10)
    second = await greet(port)
    for line in (second, first):  # the end of a line says that nothing is written any more
        with pytest.raises(TimeoutError):
            while True:
                assert isinstance(await line.receive(decode_from_prefill, 0.05), Alive)
    may_end.set()
    assert isinstance(await second.receive(decode_from_prefill, 5.0), Hello)
    first.close()
    second.close()
    server.close()
    region.close()


async def test_a_later_link_that_was_greeted_fences_an_earlier_one_and_stays(monkeypatch: pytest.MonkeyPatch):
    """Another greeting would end the later link, with all that is fetched over it."""
    monkeypatch.setattr(fetching, "FENCE_S", 0.3)
    monkeypatch.setattr(fetching, "BREAK_S", 0.0)
    heard: list[FromAgent] = []
    lines: list[PeerLine] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = PeerLine(reader, writer, "decode agent")
        await line.receive(decode_from_decode, 5.0)
        lines.append(line)
        if len(lines) == 2:  # the first greeting of the fence: the network again
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            line.close()
            return
        line.send(HELLO)
        await line.receive(decode_from_decode, 5.0)
        if len(lines) == 1:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            line.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    region = Region.create(4096)
    fetches = Fetches(HELLO, region, heard.append)
    spec = TransferSpec("7", "127.0.0.1", server.sockets[0].getsockname()[1])
    fetches.fetch(Fetch(3, spec, b"p", 0, 64))
    async with asyncio.timeout(10):
        while len(lines) < 2:
            await asyncio.sleep(0.005)
        fetches.fetch(Fetch(4, spec, b"p", 64, 64))
        while len(heard) < 2:
            await asyncio.sleep(0.005)
    assert isinstance(heard[0], Lost) and heard[1] == Released(3)
    assert len(lines) == 3 and len(heard) == 2, "the second fetch goes on"
    for line in lines:
        line.close()
    server.close()
    region.close()


async def test_a_write_that_stands_still_costs_its_link_and_keeps_its_lease_until_it_has_ended(
    monkeypatch: pytest.MonkeyPatch
):
    """The second write of a transfer, in an agent that says all the while that it is alive. The first is not alone in
    its message: each write takes a part of a chunk."""
    monkeypatch.setattr(fetching, "SILENCE_S", 0.5)
    monkeypatch.setattr(offering, "BEAT_S", 0.05)
    monkeypatch.setattr(offering, "WRITE_BYTES", offering.PIECE_BYTES)
    may_end, written = threading.Event(), list[Copy]()

    class Destination:
        def write(self, copies: list[Copy]) -> None:
            written.extend(copies)
            assert len(written) < 2 or may_end.wait(10)

        def close(self) -> None:
            pass

    size = offering.PIECE_BYTES + 64
    region, heard = Region.create(2 * size), list[FromAgent]()
    backend = SimpleNamespace(connect=lambda handle: Destination())
    offers = Offers(HELLO, region, cast(Any, backend), heard.append, lambda: 0.0)
    fetches = Fetches(HELLO, region, heard.append)
    server = await asyncio.start_server(offers.serve, "127.0.0.1", 0)
    spec = TransferSpec("7", "127.0.0.1", server.sockets[0].getsockname()[1])
    offers.take(Offer(1, "7", b"p", 0, size))
    offers.take(Filled(1, [(0, size)]))
    fetches.fetch(Fetch(3, spec, b"p", size, size))
    async with asyncio.timeout(10):
        while not heard:
            await asyncio.sleep(0.01)
        assert isinstance(heard[0], Lost) and "its write of pages hangs" in heard[0].reason
        await asyncio.sleep(0.2)
        assert len(heard) == 1 and len(written) == 2, "it may still be written"
        offers.check_writes()
        fetches.check_held()
        monkeypatch.setattr(offering, "WRITE_S", 0.1)
        with pytest.raises(TransferFailed, match="a write has not ended within"):
            offers.check_writes()
        monkeypatch.setattr(fetching, "HELD_S", 0.1)
        with pytest.raises(TransferFailed, match="did not say that nothing is written any more"):
            fetches.check_held()
        may_end.set()
        while len(heard) < 3:
            await asyncio.sleep(0.01)
    assert {(type(message), message.ticket) for message in heard[1:]} == {(Released, 1), (Released, 3)}
    offers.check_writes()
    fetches.check_held()
    server.close()
    region.close()


@pytest.mark.parametrize("whose", ["prefill", "decode"])
async def test_a_shortage_of_threads_fails_what_needs_one(whose: str, monkeypatch: pytest.MonkeyPatch):
    class Destination:
        def write(self, copies: list[Copy]) -> None:
            pass

        def close(self) -> None:
            pass

    async def refuse(call: Any, *arguments: Any) -> Any:
        if call.__name__ == ("write" if whose == "prefill" else "_compare"):
            raise RuntimeError("can't start new thread")
        return call(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", refuse)
    region, heard = Region.create(4096), list[FromAgent]()
    backend = SimpleNamespace(connect=lambda handle: Destination())
    offers = Offers(HELLO, region, cast(Any, backend), heard.append, lambda: 0.0)
    fetches = Fetches(HELLO, region, heard.append)
    server = await asyncio.start_server(offers.serve, "127.0.0.1", 0)
    spec = TransferSpec("7", "127.0.0.1", server.sockets[0].getsockname()[1])
    offers.take(Offer(1, "7", b"p", 0, 64))
    offers.take(Filled(1, [(0, 64)]))
    fetches.fetch(Fetch(3, spec, b"p", 64, 64))
    async with asyncio.timeout(10):
        while not {3, 1} <= {message.ticket for message in heard if isinstance(message, Released)}:
            await asyncio.sleep(0.005)
    assert [m.reason for m in heard if isinstance(m, Lost)] == ["the transfer agent: can't start new thread"]
    server.close()
    region.close()
