"""The chat page while the server is away, loading, busy, failing or asking for a key: nothing written is lost, and it
says what happens in a user's words."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from browser import open_page
from fake_apps import http_for, httpx, live_server
from fake_client import FakeClient
from test_page import IDLE, NAMED, WIDTHS, say

from headrace.base.server_config import ServerConfig
from headrace.serving.http.app import create_app

NOTICE = "document.querySelector('.notice:not([hidden])')"
BANNER = "document.getElementById('banner').hidden ? '' : document.getElementById('banner').textContent"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@asynccontextmanager
async def server_at(port: int, delay_s: float = 0.0) -> AsyncIterator[asyncio.subprocess.Process]:
    """A server process at a port, once it is ready."""
    script = Path(__file__).with_name("server_process.py")
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), str(delay_s), "1", "fine", str(port), stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL, env=dict(os.environ)
    )
    try:
        async with asyncio.timeout(120), httpx.AsyncClient() as http:
            while True:
                try:
                    if (await http.get(f"http://127.0.0.1:{port}/ready")).status_code == 200:
                        break
                except httpx.TransportError:
                    await asyncio.sleep(0.05)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize("width", WIDTHS)
async def test_a_dead_server_costs_neither_message_nor_draft(tmp_path, width):
    port = free_port()
    async with server_at(port) as server, open_page(f"http://127.0.0.1:{port}/", tmp_path, width=width) as page:
        await page.until(NAMED)
        await page.run("document.getElementById('max_tokens').value = 9")
        await page.run("document.getElementById('max_tokens').dispatchEvent(new Event('input'))")
        server.send_signal(signal.SIGKILL)
        await server.wait()
        await say(page, "are you there?")
        await page.until(f"{NOTICE}?.textContent.startsWith('The server is not reachable. Retrying in ')")
        await page.until(f"({BANNER}).includes('The server is not reachable, retrying')")
        await page.type("my draft")
        assert not await page.run("document.getElementById('stop').hidden"), "waiting can be stopped"
        async with server_at(port):
            await page.until(f"{IDLE} && document.querySelector('.figures').textContent.includes('9 tokens')")
            await page.until(f"!({BANNER}) && !{NOTICE}")
            assert await page.run("document.getElementById('prompt').value") == "my draft"
            await page.reload()
            await page.until(NAMED)
            assert await page.text(".bubble") == "are you there?" and len(await page.text(".turn > .words")) > 5
            assert await page.run("document.getElementById('prompt').value") == "my draft"
        assert not await page.run("document.documentElement.scrollWidth > innerWidth")


async def test_waiting_for_a_dead_server_is_stopped_and_retried(tmp_path):
    port = free_port()
    async with server_at(port) as server, open_page(f"http://127.0.0.1:{port}/", tmp_path) as page:
        await page.until(NAMED)
        server.kill()
        await server.wait()
        await say(page, "hello")
        await page.until(f"{NOTICE}?.textContent.includes('Retrying')")
        await page.press("Escape")
        await page.until(IDLE)
        assert await page.text(".bubble") == "hello" and await page.text(".figures") == "stopped"
        async with server_at(port):
            await page.click("[aria-label='Answer again']")
            await page.until("document.querySelector('.turn > .words')?.textContent.length > 5")


async def test_an_answer_that_breaks_off_is_kept_and_retried(tmp_path):
    port = free_port()
    async with server_at(port, delay_s=0.02) as server, open_page(f"http://127.0.0.1:{port}/", tmp_path) as page:
        await page.until(NAMED)
        await say(page, "go")
        await page.until("document.querySelector('.turn > .words p')?.textContent.length > 10")
        server.kill()
        await server.wait()
        await page.until(IDLE)
        assert "The connection was lost while the server answered." in await page.text(".notice")
        kept = await page.text(".turn > .words")
        assert len(kept) > 10
        async with server_at(port):
            await page.reload()
            await page.until(NAMED)
            assert await page.text(".turn > .words") == kept and "connection was lost" in await page.text(".notice")
            await page.click(".notice .retry")
            await page.until(f"{IDLE} && !{NOTICE}")
            assert len(await page.text(".turn > .words")) > 1000
            assert await page.count(".turn") == 2


@pytest.mark.parametrize("width", WIDTHS)
async def test_key_is_asked_for_and_kept_in_the_tab(tmp_path, width):
    client = FakeClient(script=b"Open.")
    app = create_app(client, ServerConfig(api_key="s3cret"))
    async with live_server(app) as address, open_page(address + "/", tmp_path, width=width) as page:
        await page.until("document.getElementById('key-dialog').open")
        assert "needs an API key" in await page.text("#key-text")
        await page.press("Escape")
        assert not await page.run("document.getElementById('key-dialog').open")
        await say(page, "hello")
        await page.until("document.getElementById('key-dialog').open")
        await page.type("wrong")
        await page.press("Enter")
        await page.until("document.getElementById('key-text').textContent.includes('did not accept')")
        await page.until("document.getElementById('key-dialog').open")
        assert not client.submitted
        await page.run("document.getElementById('key').select()")
        await page.type("s3cret")
        await page.press("Enter")
        await page.until(NAMED)
        await page.until(f"{IDLE} && document.querySelector('.turn > .words').textContent === 'Open.'")
        assert len(client.submitted) == 1, "what was refused is asked again"
        await page.reload()
        await page.until(NAMED)
        assert not await page.run("document.getElementById('key-dialog').open")
        assert not await page.run("JSON.stringify(localStorage).includes('s3cret') || document.cookie")
        await say(page, "again")
        await page.until(f"{IDLE} === 2")


async def test_a_model_that_loads_is_waited_for(tmp_path):
    client = FakeClient(script=b"Ready.")
    facts, client.facts, client.state = client.facts, None, "starting"
    app = create_app(client, ServerConfig())
    async with live_server(app) as address, open_page(address + "/", tmp_path) as page:
        await page.until(f"({BANNER}).includes('The model is loading: loading weights (50 %)')")
        await say(page, "hello")
        await page.until(f"{NOTICE}?.textContent.includes('the model is still loading')")
        client.facts, client.state = facts, "ready"
        await page.until(f"{IDLE} && document.querySelector('.turn > .words').textContent === 'Ready.' && {NAMED}")
        assert not await page.run(BANNER) and not [c for c in page.complaints if "503" not in c]


async def test_errors_are_told_in_words(tmp_path):
    client = FakeClient()
    app = create_app(client, ServerConfig())
    async with live_server(app) as address, open_page(address + "/", tmp_path) as page:
        await page.until(NAMED)
        await say(page, "FULL")
        await page.until(f"{NOTICE}?.textContent.startsWith('The server is busy. Retrying in ')")
        await page.click("#stop")
        await page.until(IDLE)
        await page.click("#fresh")
        await say(page, "BREAK5")
        await page.until(f"{NOTICE}?.textContent.includes('The server failed while it answered.')")
        assert "the step failed" in await page.text(".notice .detail") and await page.count(".retry") == 1
        await page.click("#fresh")
        await say(page, "x" * 5000)
        await page.until(f"{NOTICE}?.textContent.includes('This chat no longer fits into the model')")
        assert await page.text(".bubble") == "x" * 5000
        client.script = b"Fine."
        await page.click("[aria-label='Edit message']")
        await page.run("document.querySelector('.editor textarea').select()")
        await page.type("short")
        await page.press("Enter")
        await page.until(f"{IDLE} && document.querySelector('.turn > .words').textContent === 'Fine.'")


async def test_unanswered_messages_are_sent_as_one(tmp_path):
    """Chat templates want the roles to alternate."""
    client = FakeClient()
    app = create_app(client, ServerConfig())
    async with live_server(app) as address, open_page(address + "/", tmp_path) as page:
        await page.until(NAMED)
        await say(page, "BREAK0")
        await page.until(f"{NOTICE}?.textContent.includes('The server failed')")
        await say(page, "more")
        await page.until(f"{IDLE} === 2")
        assert client.prompts[-1] == "user: BREAK0\n\nmore\nassistant:"


async def test_a_browser_without_storage_still_chats(tmp_path):
    client = FakeClient(script=b"Yes.")
    app = create_app(client, ServerConfig())
    async with live_server(app) as address, open_page("about:blank", tmp_path) as page:
        await page.call("Page.addScriptToEvaluateOnNewDocument", source="""
            for (const name of ["localStorage", "sessionStorage"])
              Object.defineProperty(window, name, {get() { throw new DOMException("denied", "SecurityError"); }});""")
        await page.call("Page.navigate", url=address)
        await page.until(NAMED)
        await say(page, "hello")
        await page.until(f"{IDLE} && document.querySelector('.turn > .words').textContent === 'Yes.'")
        assert not await page.run("document.getElementById('unkept').hidden") and not page.complaints


async def test_pages_are_open_and_the_rest_is_not(client):
    async with http_for(client, api_key="k") as http:
        for path in ("/", "/page/chat.js", "/page/base.css"):
            assert (await http.get(path)).status_code == 200
        for path in ("/page", "/page/", "/page/nothing.js", "/page/index.html"):
            assert (await http.get(path)).status_code == 401
