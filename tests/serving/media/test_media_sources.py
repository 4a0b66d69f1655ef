"""Media from data URIs, files and http: what comes back, what is refused, and within which bounds."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from urllib.parse import quote

import pytest

from headrace.base.errors import MediaError, QueueFull
from headrace.base.media_config import MediaConfig
from headrace.serving.media.sources import MediaReader

LOCAL = "127.0.0.0/8"
WHERE = "messages[0].content[1].image_url.url"
Answer = Callable[[str, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[str]:
    """A server of raw HTTP; ``answer`` gets the path."""
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        try:
            await answer(head.split()[1].decode(), writer)
            await writer.drain()
        except ConnectionError:
            return  # the client had enough
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def whole(body: bytes, head: str = "200 OK", *lines: str) -> bytes:
    text = "\r\n".join([f"HTTP/1.1 {head}", f"Content-Length: {len(body)}", *lines, "", ""])
    return text.encode() + body


def reader(**options) -> MediaReader:
    return MediaReader(MediaConfig(allowed_media_domains=LOCAL, **options))


@pytest.mark.parametrize("data", [b"a", b"ab", b"abc", bytes(range(256)) * 9000])
async def test_data_uris_in_every_form(data):
    text = base64.b64encode(data).decode()
    forms = (
        "data:image/png;base64," + text, "DATA:;BASE64," + text, "data:image/png;base64," + text.rstrip("="),
        "data:image/svg+xml;charset=x;base64," + "\n".join(text[i : i + 76] for i in range(0, len(text), 76)),
        "data:;base64," + base64.urlsafe_b64encode(data).decode(), "data:;base64," + quote(text, safe=""),
    )
    for uri in forms:
        found = await reader().read_url(uri, WHERE)
        assert found.is_base64 and found.sha256 == hashlib.sha256(found.data).digest()
        job = found.job("image", {}).decoded()
        assert (job.data, job.sha256, job.is_base64) == (data, hashlib.sha256(data).digest(), False)
    assert (await reader().read_url("data:,a%20b", WHERE)).data == b"a b"


@pytest.mark.parametrize("uri", [
    "data:image/png;base64,", "data:image/png;base64,!!!!", "data:image/png;base64,a", "data:image/png;base64,YQ==YQ==",
    "data:image/png", "data:image/png;base64,\u00e4", "data:" + "x" * 300 + ",a",
])
async def test_broken_data_uris_are_typed_errors(uri):
    with pytest.raises(MediaError) as caught:
        (await reader().read_url(uri, WHERE)).job("image", {}).decoded()
    assert caught.value.param == WHERE and WHERE in caught.value.message


async def test_bare_base64_is_told_how_it_is_written():
    with pytest.raises(MediaError, match="written as data:;base64,DATA"):
        await reader().read_url("iVBORw0KGgo" * 1000, WHERE)


async def test_data_beyond_the_limit_are_refused_before_they_are_decoded():
    with pytest.raises(MediaError, match="larger than 1 MiB"):
        await reader(media_max_mib=1).read_url("data:;base64," + "A" * (2 << 20), WHERE)


async def test_a_body_and_redirects_to_it():
    async def answer(path, writer):
        places = {"/a": "/b", "/b": "c?x=1", "/loop": "/loop"}
        if path in places:
            writer.write(whole(b"moved", "302 Found", f"Location: {places[path]}"))
        else:
            writer.write(whole(path.encode()))

    async with serving(answer) as address:
        assert (await reader().read_url(address + "/a", WHERE)).data == b"/c?x=1"
        with pytest.raises(MediaError, match="more than 4 redirects"):
            await reader().read_url(address + "/loop", WHERE)


@pytest.mark.parametrize("target", [
    "http://10.0.0.1/secret", "http://169.254.169.254/latest", "file:///etc/passwd", "http://[::1]:1/", "data:,x",
    "//192.168.0.1/x", "http://[::1", "//[x/",
])
async def test_a_redirect_leads_nowhere_that_the_first_address_could_not(target):
    async def answer(path, writer):
        writer.write(whole(b"", "307 Temporary Redirect", f"Location: {target}"))

    async with serving(answer) as address:
        with pytest.raises(MediaError):
            await reader(allowed_local_media_path="/").read_url(address, WHERE)


async def test_the_checked_address_is_the_one_that_is_connected_to(monkeypatch):
    """The name server's second answer is another one: it is never asked for."""
    async def answer(path, writer):
        writer.write(whole(b"first"))

    async with serving(answer) as address:
        port, asked = address.rpartition(":")[2], []
        loop = asyncio.get_running_loop()
        original = type(loop).getaddrinfo

        async def resolve(self, host, *rest, **options):
            if host != "rebind.test":
                return await original(self, host, *rest, **options)
            asked.append(host)
            return await original(self, "127.0.0.1" if len(asked) == 1 else "127.0.0.2", *rest, **options)

        monkeypatch.setattr(type(loop), "getaddrinfo", resolve)
        found = await reader().read_url(f"http://rebind.test:{port}/", WHERE)
    assert found.data == b"first" and len(asked) == 1


async def test_slow_endless_and_broken_answers_end_in_time():
    async def answer(path, writer):
        if path == "/404":
            writer.write(whole(b"no", "404 Not Found"))
        elif path == "/declared":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\nabc")
            await asyncio.sleep(5)
        elif path == "/endless":
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                writer.write(bytes(1 << 16))
                await writer.drain()
        elif path == "/slow":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n")
            for _ in range(100):
                writer.write(b"x")
                await asyncio.sleep(0.1)
        elif path == "/zip":
            writer.write(whole(b"abc", "200 OK", "Content-Encoding: gzip"))
        elif path == "/short":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc")
        else:
            writer.write(b"this is not http\r\n\r\n")

    expected = {
        "/404": "status 404", "/declared": "larger than", "/endless": "larger than", "/slow": "more than 0.5 seconds",
        "/zip": "compressed", "/short": "cannot be reached", "/junk": "cannot be reached",
    }
    async with serving(answer) as address:
        media = reader(media_timeout_s=0.5, media_max_mib=1)
        for path, message in expected.items():
            began = time.monotonic()
            with pytest.raises(MediaError, match=message):
                await media.read_url(address + path, WHERE)
            assert time.monotonic() - began < 3


async def test_who_had_no_turn_may_try_again(monkeypatch):
    monkeypatch.setattr("headrace.serving.media.fetching.MOST_AT_ONCE", 1)

    async def answer(path, writer):
        await asyncio.sleep(2)

    async with serving(answer) as address:
        media = reader(media_timeout_s=0.5)
        first = asyncio.create_task(media.read_url(address, WHERE))
        await asyncio.sleep(0.02)  # it has the only turn
        patient = media._fetcher._config
        monkeypatch.setattr(media._fetcher, "_config", replace(patient, media_timeout_s=0.1))
        with pytest.raises(QueueFull) as caught:
            await media.read_url(address, WHERE)
        assert caught.value.retry_after
        with pytest.raises(MediaError, match=r"more than 0\.5 seconds"):
            await first


async def test_nobody_listens():
    async with serving(lambda path, writer: asyncio.sleep(0)) as address:
        gone = address
    with pytest.raises(MediaError, match="cannot be reached"):
        await reader().read_url(gone, WHERE)


async def test_files_below_one_folder(tmp_path):
    folder, outside = tmp_path / "media", tmp_path / "secret.png"
    (folder / "inner").mkdir(parents=True)
    outside.write_bytes(b"secret")
    (folder / "inner" / "a b.png").write_bytes(b"picture")
    (folder / "link.png").symlink_to(outside)
    (folder / "inside.png").symlink_to(folder / "inner" / "a b.png")
    os.mkfifo(folder / "pipe")
    (folder / "large").write_bytes(bytes((1 << 20) + 1))
    media = reader(allowed_local_media_path=str(folder), media_max_mib=1)
    for url in (f"file://{folder}/inner/a%20b.png", f"file://localhost{folder}/inside.png"):
        assert (await media.read_url(url, WHERE)).data == b"picture"
    for path, message in {
        "/../secret.png": "no such file", "/link.png": "no such file", "/none.png": "no such file",
        "/inner": "no such file|regular", "/pipe": "regular", "/large": "larger than", "/%00": "no such file",
        "/../media_evil": "no such file",
    }.items():
        with pytest.raises(MediaError, match=message):
            await media.read_url(f"file://{folder}{path}", WHERE)
    for url in (f"file://elsewhere{folder}/inside.png", "file://[/inside.png"):
        with pytest.raises(MediaError, match="file of this host"):
            await media.read_url(url, WHERE)
    with pytest.raises(MediaError, match="--allowed-local-media-path"):
        await reader().read_url(f"file://{folder}/inside.png", WHERE)
