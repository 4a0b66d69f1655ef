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

import httpx
import pytest
import websockets

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--remote-debugging-port=0", "--window-size=1280,800"
)
NARROW = 600
"""Widths below are those of phones, which have fingers instead of mice."""
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9}
SHIFT = 8
VISIBLE = """(selector) => {
  const node = document.querySelector(selector);
  if (!node) return `there is no ${selector}`;
  node.scrollIntoView({block: "nearest", inline: "nearest"});
  const box = node.getBoundingClientRect(), x = box.x + box.width / 2, y = box.y + box.height / 2;
  const hit = document.elementFromPoint(x, y);
  return hit && (node.contains(hit) || hit.contains(node)) ? [x, y] : `${selector} is not where it can be clicked`;
}"""


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
            while not await self.run(f"Boolean({condition})"):
                await asyncio.sleep(0.05)

    async def reload(self) -> None:
        """Load the page again; what it keeps in the browser stays."""
        await self.run("window.isOld = true")
        await self.call("Page.reload")
        await self.until("!window.isOld && document.readyState === 'complete'")

    async def resize(self, width: int, height: int = 800, *, is_dark: bool = False) -> None:
        """A screen of so many CSS pixels, in the system's light or dark."""
        is_phone = width < NARROW
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )
        await self.call("Emulation.setTouchEmulationEnabled", enabled=is_phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        calm = {"name": "prefers-reduced-motion", "value": "reduce"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme, calm])

    async def click(self, selector: str) -> None:
        """A click of the mouse on the middle of an element, which must be visible there."""
        found = await self.run(f"({VISIBLE})({json.dumps(selector)})")
        assert isinstance(found, list), found
        for kind in ("mousePressed", "mouseReleased"):
            await self.call(
                "Input.dispatchMouseEvent", type=kind, x=found[0], y=found[1], button="left", clickCount=1
            )

    async def press(self, key: str, *, has_shift: bool = False) -> None:
        """A key, where the focus is."""
        fields: dict[str, Any] = {
            "key": key, "code": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": SHIFT if has_shift else 0
        }
        text = {"text": "\r"} if key == "Enter" else {}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **fields, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **fields)

    async def type(self, text: str) -> None:
        """Text, where the focus is."""
        await self.call("Input.insertText", text=text)

    async def text(self, selector: str) -> str | None:
        """The text of the last element of a selector, or None."""
        return await self.run(f"[...document.querySelectorAll({json.dumps(selector)})].at(-1)?.textContent ?? null")

    async def count(self, selector: str) -> int:
        """How many elements a selector finds."""
        return await self.run(f"document.querySelectorAll({json.dumps(selector)}).length")

    async def picture(self, path: Path) -> None:
        """A screenshot."""
        path.write_bytes(base64.b64decode((await self.call("Page.captureScreenshot"))["data"]))


def require_browser() -> None:
    """Skip the test without a browser."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here")


@asynccontextmanager
async def open_page(address: str, folder: Path, *, width: int = 1280) -> AsyncIterator[Page]:
    """A tab at ``address`` in a browser of its own, with its profile in ``folder``; skips without one."""
    require_browser()
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
            await page.call("Emulation.setFocusEmulationEnabled", enabled=True)
            await page.resize(width)
            await page.call("Page.navigate", url=address)
            await page.until(f"location.href.startsWith({address!r}) && document.readyState === 'complete'")
            yield page
    finally:
        browser.kill()
        await browser.wait()
