"""Connections of the load generator against servers that write bytes by hand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.serving.bench.connection import split_events
from headrace.serving.bench.wire import HttpSession


@contextlib.asynccontextmanager
async def answering(*answers: bytes, closes: bool = False) -> AsyncIterator[tuple[HttpSession, list[int]]]:
    """A session with a server that gives these answers, one a request; the number of requests on each connection."""
    left, counts = list(answers), []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        place = len(counts)
        counts.append(0)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while left:
                await reader.readuntil(b"\r\n\r\n")
                counts[place] += 1
                for byte in left.pop(0):
                    writer.write(bytes([byte]))
                await writer.drain()
                if closes:
                    break
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    session = HttpSession(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout_s=5)
    async with server:
        yield session, counts
        session.close()


async def test_connections_are_kept():
    sized, chunked = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\none", b"HTTP/1.1 404 No\r\nTransfer-Encoding: chunked\r\n\r\n3\r\ntwo\r\n1\r\n!\r\n0\r\n\r\n"
    async with answering(sized, chunked, sized) as (session, counts):
        answers = [await session.request("GET", "/") for _ in range(3)]
        assert [(a.status, a.body) for a in answers] == [(200, b"one"), (404, b"two!"), (200, b"one")]
        assert counts == [3]
        assert all(earlier <= later for a in answers for (earlier, _), (later, _) in zip(a.pieces, a.pieces[1:], strict=False))


async def test_a_body_may_end_with_the_connection():
    answer = b"HTTP/1.1 200 OK\r\n\r\nuntil the end"
    async with answering(answer, answer, closes=True) as (session, counts):
        for _ in range(2):
            assert (await session.request("GET", "/")).body == b"until the end"
        assert counts == [1, 1]


async def test_a_connection_that_was_closed_meanwhile_is_replaced():
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx"
    async with answering(answer, answer, answer, closes=True) as (session, counts):
        for _ in range(3):
            assert (await session.request("POST", "/", b"{}")).body == b"x"
        assert counts == [1, 1, 1]


async def test_connections_that_are_announced_closed_are_not_used_again():
    answer = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx"
    async with answering(answer, answer) as (session, counts):
        for _ in range(2):
            assert (await session.request("GET", "/")).body == b"x"
        assert counts == [1, 1]


@pytest.mark.parametrize(("answer", "error"), [
    (b"HTTP/1.1 200 OK\r\nContent-Length: 30\r\n\r\ncut", ConnectionError),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\ncut", ConnectionError),
    (b"", ConnectionError),
    (b"220 mail.example ESMTP\r\n\r\n", ValueError),
])
async def test_answers_that_are_none(answer: bytes, error: type[Exception]):
    async with answering(answer, closes=True) as (session, _):
        with pytest.raises(error):
            await session.request("GET", "/")


async def test_a_silent_server_takes_no_more_than_the_time_allowed():
    async with answering(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx", b"never") as (session, _):
        session._timeout_s = 0.05
        with pytest.raises(TimeoutError):
            await session.request("GET", "/")


@given(st.lists(st.binary(max_size=8).filter(lambda b: b"\n" not in b), max_size=8), st.data())
def test_events_are_whole_however_they_were_cut(datas: list[bytes], data: st.DataObject):
    stream = b"".join(b": comment\ndata: " + d + b"\n\n" for d in datas)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    pieces = [(float(end), stream[start:end]) for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    events = list(split_events(pieces))
    assert [e for _, e in events] == [d.strip() for d in datas]
    for (arrived, _), position in zip(events, (i for i, b in enumerate(stream) if b == 10 and stream[max(0, i - 1)] != 10 and stream[: i].rsplit(b"\n", 1)[-1].startswith(b"data:")), strict=True):
        assert arrived == min(end for end in (*cuts, len(stream)) if end > position)
