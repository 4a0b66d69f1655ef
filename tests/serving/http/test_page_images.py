"""Images on the chat page: by the button, by drop and by paste; shown, removed, sent, edited and kept."""

from __future__ import annotations

import pytest
from browser import Page, open_page
from fake_apps import live_server
from fake_client import FakeClient
from media_desk import FACTS, Desk

from headrace.base.server_config import ServerConfig
from headrace.serving.http.app import create_app

NAMED = "document.getElementById('model')?.textContent === 'fake-model'"
IDLE = "document.getElementById('stop').hidden && document.querySelectorAll('.turn.assistant').length"
TRAY = "#tray .picture"
MAKE = """async (count, side, type = 'image/png') => {
  const transfer = new DataTransfer();
  for (let i = 0; i < count; i++) {
    const canvas = document.createElement('canvas');
    canvas.width = side; canvas.height = side / 2;
    const brush = canvas.getContext('2d');
    brush.fillStyle = `rgb(${i * 40}, 90, 160)`;
    brush.fillRect(0, 0, side, side);
    const blob = await new Promise((resolve) => canvas.toBlob(resolve));
    transfer.items.add(new File([type === 'image/png' ? blob : 'junk'], `${i}`, { type }));
  }
  return transfer;
}"""
PASTE = """async (...given) => {
  const event = new ClipboardEvent('paste', { clipboardData: await make(...given), bubbles: true, cancelable: true });
  document.getElementById('prompt').dispatchEvent(event);
}"""
DROP = """async (...given) => {
  const event = new DragEvent('drop', { dataTransfer: await make(...given), bubbles: true, cancelable: true });
  return document.querySelector('main').dispatchEvent(event);
}"""
CHOOSE = """async (...given) => {
  const field = document.getElementById('files');
  field.files = (await make(...given)).files;
  field.dispatchEvent(new Event('change'));
}"""


async def put(page: Page, way: str, *given: object) -> object:
    return await page.run(f"(() => {{ const make = {MAKE}; return ({way})({', '.join(map(repr, given))}) }})()")


@pytest.fixture
async def client() -> FakeClient:
    return FakeClient(takes_media=FACTS, script=b"A picture.")


@pytest.fixture(params=[1280, 390])
def width(request) -> int:
    return request.param


@pytest.fixture
async def page(client, tmp_path, width):
    app = create_app(client, ServerConfig())
    app.state.context.media = Desk(client.config)
    async with live_server(app) as address, open_page(address + "/", tmp_path, width=width) as page:
        await page.until(NAMED)
        yield page
        overflow = "document.documentElement.scrollWidth > innerWidth || document.body.scrollWidth > innerWidth"
        assert not await page.run(overflow), "the page scrolls sideways"
        assert not page.complaints


async def test_images_come_in_three_ways_and_are_sent(page, client):
    await page.until("!document.getElementById('attach').hidden")
    await put(page, PASTE, 1, 64)
    await page.until(f"document.querySelectorAll('{TRAY}').length === 1")
    assert await put(page, DROP, 1, 64) is False, "the browser must not open the file"
    await page.until(f"document.querySelectorAll('{TRAY}').length === 2")
    await put(page, CHOOSE, 2, 3000)
    await page.until(f"document.querySelectorAll('{TRAY}').length === 4")
    await page.click("#tray [aria-label='Remove image 2']")
    assert await page.count(TRAY) == 3
    await page.click("#prompt")
    await page.type("what?")
    await page.press("Enter")
    await page.until(f"{IDLE} === 1")
    assert len(client.media[-1]) == 3 and await page.count(TRAY) == 0
    assert await page.count(".turn.user .picture img") == 3
    sizes = "[...document.querySelectorAll('.turn.user .picture img')].map((image) => image.naturalWidth)"
    assert await page.run(sizes) == [64, 1024, 1024], "large images are shrunk before they are kept and sent"
    await page.click("[aria-label='Edit message']")
    await page.press("Enter")
    await page.until("document.querySelectorAll('.editor').length === 0")
    await page.until(f"{IDLE} === 1")
    assert len(client.media[-1]) == 3, "an edited message keeps its images"


async def test_images_alone_are_a_message_and_survive_a_reload(page, client):
    await put(page, PASTE, 1, 64)
    await page.until(f"document.querySelectorAll('{TRAY}').length === 1")
    await page.click("#send")
    await page.until(f"{IDLE} === 1")
    await put(page, PASTE, 2, 64)
    await page.until(f"document.querySelectorAll('{TRAY}').length === 2")
    stored = "localStorage.getItem(Object.keys(localStorage).find((name) => name.includes('chat.')))"
    await page.until(f"{stored}.split('data:').length > 3")
    await page.reload()
    await page.until(NAMED)
    assert await page.count(".turn.user .picture img") == 1 and await page.count(TRAY) == 2
    assert await page.run("document.title") == "Image · Headrace"
    await page.click("#prompt")
    await page.type("and these?")
    await page.press("Enter")
    await page.until(f"{IDLE} === 2")
    assert len(client.media[-1]) == 3, "the whole conversation is sent"


async def test_too_many_and_broken_images_are_said(page):
    await put(page, PASTE, 9, 32)
    await page.until(f"document.querySelectorAll('{TRAY}').length === 8")
    assert "8 images at most" in await page.text("#toast")
    await page.click("#toast button")
    await page.click("#tray [aria-label='Remove image 1']")
    await put(page, PASTE, 1, 32, "image/broken")
    await page.until("document.getElementById('toast').textContent.includes('cannot show')")
    assert await page.count(TRAY) == 7


async def test_a_model_of_text_takes_none(client, tmp_path):
    client = FakeClient()
    async with live_server(create_app(client, ServerConfig())) as address, open_page(address + "/", tmp_path) as page:
        await page.until(NAMED)
        assert await page.run("document.getElementById('attach').hidden")
        await put(page, PASTE, 1, 64)
        assert await put(page, DROP, 1, 64) is False
        assert await page.count(TRAY) == 0
