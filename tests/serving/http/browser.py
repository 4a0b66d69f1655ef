"""A page in headless Chromium, driven over its DevTools socket."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import websockets
from fake_apps import httpx

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--remote-debugging-port=0", "--window-size=1000,720"
)


class Page:
    """One tab. ``complaints`` are console errors, refused loads among them."""

    def __init__(self, socket: websockets.ClientConnection):
        self._socket = socket
        self._ids = itertools.count(1)
        self.complaints: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A DevTools method; events that come meanwhile are noted."""
        call_id = next(self._ids)
        await self._socket.send(json.dumps({"id": call_id, "method": method, "params": params}))
        while True:
            message = json.loads(await asyncio.wait_for(self._socket.recv(), 120))
            if message.get("method") == "Log.entryAdded":
                self.complaints.append(message["params"]["entry"]["text"])
            if message.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(str(message["params"]["exceptionDetails"]))
            if message.get("id") == call_id:
                assert "error" not in message, message["error"]
                return message["result"]

    async def run(self, script: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        result = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, condition: str, seconds: float = 120) -> None:
        """Wait until a JavaScript condition holds."""
        async with asyncio.timeout(seconds):
            while not await self.run(condition):
                await asyncio.sleep(0.05)

    async def picture(self, path: Path) -> None:
        """A screenshot."""
        path.write_bytes(base64.b64decode((await self.call("Page.captureScreenshot"))["data"]))


@asynccontextmanager
async def open_page(address: str, folder: Path) -> AsyncIterator[Page]:
    """A tab at ``address`` in a browser of its own, with its profile in ``folder``."""
    browser = await asyncio.create_subprocess_exec(
        str(CHROMIUM), *OPTIONS, f"--user-data-dir={folder}", "about:blank", stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        found = None
        while found is None:
            line = await asyncio.wait_for(browser.stderr.readline(), 120)
            assert line, "the browser ended"
            found = re.search(rb"ws://([\d.:]+)/", line)
        async with httpx.AsyncClient(timeout=120) as http:
            tabs = (await http.get(f"http://{found[1].decode()}/json/list")).json()
        url = next(t["webSocketDebuggerUrl"] for t in tabs if t["type"] == "page")
        async with websockets.connect(url, max_size=None) as socket:
            page = Page(socket)
            for domain in ("Log", "Runtime", "Page"):
                await page.call(f"{domain}.enable")
            await page.call("Page.navigate", url=address)
            await page.until(f"location.href.startsWith({address!r}) && document.readyState === 'complete'")
            yield page
    finally:
        browser.kill()
        await browser.wait()
