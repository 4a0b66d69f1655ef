"""The chat page: strict about where its code comes from, and (where there is a browser) working at 1280 and 390
pixels."""

from __future__ import annotations

import asyncio
import json
import re
from importlib.resources import files

import pytest
from browser import Page, open_page
from fake_apps import live_server
from fake_client import FakeClient, expected_text

from headrace.base.adapters import AdapterConfig
from headrace.base.config import EngineConfig
from headrace.base.server_config import ServerConfig
from headrace.serving.http.app import create_app

WIDTHS = (1280, 390)
IDLE = "document.getElementById('stop').hidden && document.querySelectorAll('.turn.assistant').length"
NAMED = "document.getElementById('model')?.textContent === 'fake-model'"
SOURCES = {f.name: f.read_text(encoding="utf-8") for f in (files("headrace.serving.http") / "page").iterdir()}


async def test_files_of_the_page_come_from_this_server_alone(http):
    for path in ("/", *(f"/page/{name}" for name in SOURCES if not name.endswith(".html"))):
        answer = await http.get(path)
        assert answer.status_code == 200, path
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
        assert "require-trusted-types-for 'script'" in policy and "sha256" not in policy, "nothing is inline"
        assert answer.headers["x-content-type-options"] == "nosniff"
        same = await http.get(path, headers={"If-None-Match": answer.headers["etag"]})
        assert same.status_code == 304 and not same.content
    assert (await http.get("/page/")).status_code == (await http.get("/page/../app.py")).status_code == 404


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_no_file_makes_markup_of_text_or_calls_others(name):
    text = SOURCES[name].replace("http://www.w3.org/2000/svg", "")
    for danger in (
        "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", " style=", "@import",
        "setHTML",
    ):
        assert danger not in text, danger
    assert not re.search(r"\burl\(", text)
    if name.endswith(".html"):
        assert not re.search(r"""<script(?![^>]*\bsrc="page/)|<style|\bon\w+=|(?:src|href)="(?:https?:)?//""", text)
    assert text.count("\n") <= 500


@pytest.fixture
async def client() -> FakeClient:
    return FakeClient(delay_s=0.005)


@pytest.fixture(params=WIDTHS)
def width(request) -> int:
    return request.param


@pytest.fixture
async def page(client, tmp_path, width):
    app = create_app(client, ServerConfig(reasoning_parser="qwen3"))
    async with live_server(app) as address, open_page(address + "/", tmp_path, width=width) as page:
        await page.until(NAMED)
        yield page
        overflow = "document.documentElement.scrollWidth > innerWidth || document.body.scrollWidth > innerWidth"
        assert not await page.run(overflow), "the page scrolls sideways"


wide = pytest.mark.parametrize("width", [1280], indirect=True)
"""What does not depend on the width is tested at one."""


async def say(page: Page, text: str) -> None:
    await page.click("#prompt")
    await page.type(text)
    await page.press("Enter")


async def choose(page: Page, **values: object) -> None:
    """Set fields of the settings as a user's input does."""
    for name, value in values.items():
        await page.run(
            f"(() => {{ const field = document.getElementById({name!r}); field.value = {json.dumps(value)};"
            " field.dispatchEvent(new Event('input')) })()"
        )


async def test_tokens_a_step_are_shown_where_there_are_drafts(page, client, width):
    await choose(page, max_tokens=40)
    await say(page, "plain")
    await page.until(f"{IDLE} === 1")
    assert "tokens/step" not in await page.text(".turn.assistant .figures")
    client.drafts = 2
    await say(page, "drafted")
    await page.until(f"{IDLE} === 2")
    # one token, then thirteen steps of three
    assert re.search(r"40 tokens[\d.,]+ tokens/s2\.9 tokens/step", await page.text(".turn:last-child .figures"))
    client.drafts = 0
    await page.click(".turn:last-child [aria-label='Answer again']")
    await page.until(f"{IDLE} === 2 && document.querySelector('.turn:last-child .figures').textContent.includes('40')")
    assert "tokens/step" not in await page.text(".turn:last-child .figures")


async def test_a_conversation(page, client, width):
    assert await page.run(f"document.getElementById('model').getBoundingClientRect().right <= {width}")
    await choose(page, max_tokens=40, system="Be kind.")
    await page.click("#prompt")
    await page.type("hello <b>there</b>")
    await page.press("Enter", has_shift=True)
    await page.type("you")
    await page.press("Enter")
    await page.until("document.querySelector('.words p')?.textContent.length > 3")
    assert not await page.run("document.getElementById('stop').hidden")
    early = await page.text(".turn.assistant .words")
    await page.until(IDLE)
    first = expected_text("system: Be kind.\nuser: hello <b>there</b>\nyou\nassistant:", 40, bos=False)
    whole = await page.text(".turn.assistant .words")
    assert whole == first.strip() and len(early) < len(whole) and whole.startswith(early), "it streams"
    assert await page.text(".turn.user .bubble") == "hello <b>there</b>\nyou" and not await page.count(".turn b")
    figures = await page.text(".turn.assistant .figures")
    assert re.fullmatch(
        r"40 tokens\d[\d.,]* tokens/sfirst token \d\.\d\d s\d+ cachedcontext 9\d of 4,096 \(2 %\)"
        r"stopped at the longest answer", figures
    ), figures
    await say(page, "and?")
    await page.until(f"{IDLE} === 2")
    second = expected_text(
        f"system: Be kind.\nuser: hello <b>there</b>\nyou\nassistant: {first}\nuser: and?\nassistant:", 40, bos=False
    )
    assert await page.text(".turn.assistant .words") == second.strip()
    assert not page.complaints


@pytest.mark.parametrize("text", ["", "one\ntwo\nthree\nfour"])
async def test_the_button_is_aligned_with_its_box(page, text):
    await page.click("#prompt")
    await page.type(text)
    box, button, prompt = await page.run(
        "['box', 'send', 'prompt'].map((id) => document.getElementById(id).getBoundingClientRect().toJSON())"
    )
    gaps = box["bottom"] - button["bottom"], box["right"] - button["right"], prompt["bottom"] - button["bottom"]
    assert abs(gaps[0] - gaps[1]) < 1 and abs(gaps[2]) < 1, gaps
    assert button["top"] >= box["top"] and box["height"] < 200


MARKDOWN = """<think>**Hm.**</think>First paragraph.

| a | b |
|---|--:|
| 1 | `x` |

- one
  - two [link](https://example.com/)

> quote

```python
print("<b>")
```

Last *paragraph*."""


async def test_markdown_grows_without_being_made_anew(page, client):
    client.script, client.delay_s = MARKDOWN.encode(), 0.02  # slow enough to be painted on a busy machine
    # it folds as soon as the answer begins, so an observer watches: a look now and then might miss it
    await page.run("""new MutationObserver(() => {
        const reasoning = document.querySelector('.reasoning');
        window.sawReasoning ||= Boolean(reasoning?.open && reasoning.querySelector('strong'));
    }).observe(document.body, {subtree: true, childList: true, attributes: true, characterData: true})""")
    await say(page, "go")
    await page.until("document.querySelector('.turn > .words table')")
    await page.run("document.querySelector('.turn > .words p').isFirst = true")
    await page.until(IDLE)
    assert await page.run("window.sawReasoning"), "reasoning is open while it is written"
    assert await page.run("document.querySelector('.turn > .words p').isFirst"), "final blocks stay as they are"
    for selector in ("td.align-right code", "ul ul a[rel~=noopener]", "blockquote p", ".code pre code", "p em"):
        assert await page.count(f".turn > .words {selector}") == 1, selector
    assert await page.text(".words pre") == 'print("<b>")'
    assert not await page.run("document.querySelector('.reasoning').open"), "reasoning folds once the answer begins"
    await page.click(".reasoning summary")
    assert await page.run("document.querySelector('.reasoning').open")
    assert await page.text(".reasoning .words") == "Hm."
    place = "document.querySelector('.reasoning').compareDocumentPosition(document.querySelector('.turn > .words'))"
    assert await page.run(f"{place} & Node.DOCUMENT_POSITION_FOLLOWING"), "above its answer"


async def test_chats_and_drafts_survive_a_reload(page, client, width):
    client.script = b"Answer one."
    await say(page, "first question")
    await page.until(IDLE)
    await page.click("#fresh" if width > 600 else "#fresh-narrow")
    client.script = b"<think>Why?</think>Answer two."
    await say(page, "second question")
    await page.until(IDLE)
    await page.type("a draft")
    await choose(page, temperature="0.35")
    await asyncio.sleep(0.7)
    await page.reload()
    await page.until(NAMED)
    assert await page.run("document.getElementById('prompt').value") == "a draft"
    assert await page.text(".turn.assistant > .words") == "Answer two."
    assert await page.text(".reasoning .words") == "Why?" and "tokens/s" in await page.text(".figures")
    assert await page.run("document.getElementById('temperature').value") == "0.35"
    assert await page.run("[...document.querySelectorAll('#list .title')].map((t) => t.textContent)") == [
        "second question", "first question"
    ]
    if width < 600:
        await page.click("#open-chats")
    await page.click("#list li:nth-child(2) .title")
    assert await page.text(".turn.assistant > .words") == "Answer one."
    assert await page.run("document.getElementById('prompt').value") == "", "each chat has its own draft"


async def test_chats_are_renamed_and_deleted(page, client, width):
    client.script = b"Yes."
    await say(page, "question")
    await page.until(IDLE)
    if width < 600:
        await page.click("#open-chats")
    await page.click("#list [aria-label^=Rename]")
    await page.type("Mills")
    await page.press("Enter")
    assert await page.text("#list .title") == "Mills" and await page.run("document.title") == "Mills · Headrace"
    await page.click("#list [aria-label^=Delete]")
    assert not await page.count("#list .title") and not await page.count(".turn")
    assert not await page.run("Object.keys(localStorage).some((name) => name.startsWith('headrace.chat.'))")
    await page.click("#toast button")
    assert await page.text("#list .title") == "Mills" and await page.text(".words") == "Yes."
    await page.reload()
    await page.until(NAMED)
    assert await page.text("#list .title") == "Mills" and await page.text(".words") == "Yes."


@wide
async def test_edit_answer_again_and_copy(page, client):
    await page.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    client.script = b"One.\n\n```sh\nls -l\n```"
    await say(page, "question")
    await page.until(IDLE)
    for selector, copied in (
        (".turn.user .copy", "question"), (".code .copy", "ls -l"), (".foot .copy", client.script.decode())
    ):
        await page.click(selector)
        await page.until(f"document.querySelector({selector!r}).title === 'Copied'")
        assert await page.run("navigator.clipboard.readText()") == copied
    client.script = b"Two."
    await page.click(".turn.assistant [aria-label='Answer again']")
    await page.until(f"{IDLE} && document.querySelector('.turn > .words').textContent === 'Two.'")
    assert client.prompts[-1] == "user: question\nassistant:" and await page.count(".turn") == 2
    await say(page, "more")
    await page.until(f"{IDLE} === 2")
    await page.click(".turn.user [aria-label='Edit message']")
    await page.press("Escape")
    assert await page.count(".turn") == 4 and not await page.count(".editor")
    await page.click(".turn.user [aria-label='Edit message']")
    await page.run("document.querySelector('.editor textarea').select()")
    await page.type("better question")
    await page.press("Enter")
    await page.until(f"{IDLE} === 1 && document.querySelector('.turn > .words').textContent === 'Two.'")
    assert client.prompts[-1] == "user: better question\nassistant:" and await page.text(".bubble") == "better question"
    await page.click("#toast button")
    written = await page.run("[...document.querySelectorAll('.bubble, .turn > .words')].map((n) => n.textContent)")
    assert written == ["question", "Two.", "more", "Two."], "nothing is lost by an edit"


@wide
@pytest.mark.parametrize("way", ["button", "key"])
async def test_stop_keeps_what_has_come(page, client, way):
    await say(page, "go")
    await page.until("document.querySelector('.words p')?.textContent.length > 10")
    if way == "button":
        await page.click("#stop")
    else:
        await page.press("Escape")
    await page.until(IDLE)
    kept = await page.text(".words")
    assert len(kept) > 10 and (await page.text(".figures")).endswith("stopped")
    async with asyncio.timeout(120):
        while client.children:
            await asyncio.sleep(0.01)
    assert client.aborted
    client.script = b" and on."
    await page.click("[aria-label='Continue this answer']")
    await page.until(f"{IDLE} === 1 && document.querySelector('.turn > .words').textContent.endsWith('and on.')")
    assert (await page.text(".words")).startswith(kept.strip()) and client.prompts[-1].endswith(kept.strip())


async def test_settings_start_from_the_model(tmp_path):
    client = FakeClient(default_sampling={"temperature": 0.2, "top_p": 0.9, "top_k": 7})
    client.script = b"Yes."
    app = create_app(client, ServerConfig())
    async with live_server(app) as address, open_page(address + "/", tmp_path) as page:
        await page.until(NAMED)
        assert await page.run("document.getElementById('temperature').value") == "0.2"
        assert await page.run("document.getElementById('top_k').placeholder") == "7 (the model's)"
        await say(page, "a")
        await page.until(IDLE)
        params = client.submitted[-1][1]
        assert (params.temperature, params.top_p, params.top_k) == (0.2, 0.9, 7)
        await page.click("#tune")
        await choose(page, temperature="1.5", seed="3", max_tokens="9", top_k="-4")
        await say(page, "b")
        await page.until(f"{IDLE} === 2")
        params = client.submitted[-1][1]
        assert (params.temperature, params.seed, params.max_tokens, params.top_k) == (1.5, 3, 9, 7)
        await page.click("[aria-label^='Reset Temperature']")
        await say(page, "c")
        await page.until(f"{IDLE} === 3")
        assert client.submitted[-1][1].temperature == 0.2
        assert not page.complaints


async def test_a_server_that_hides_its_settings_still_chats(tmp_path):
    app = create_app(FakeClient(script=b"Yes."), ServerConfig())
    app.router.routes = [route for route in app.router.routes if route.path != "/server_info"]
    async with live_server(app) as address, open_page(address + "/", tmp_path) as page:
        await page.until(NAMED)
        assert await page.run("document.getElementById('temperature').value") == "1"
        await say(page, "a")
        await page.until(f"{IDLE} && document.querySelector('.turn > .words').textContent === 'Yes.'")


@pytest.mark.parametrize("width", [390], indirect=True)
async def test_panels_of_a_phone_open_and_close(page):
    def is_open(name: str) -> str:
        return f"!document.getElementById({name!r}).hidden"

    for opener, panel, closer in (("#tune", "settings", "#close-settings"), ("#open-chats", "chats", "#close-chats")):
        for leave in (lambda closer=closer: page.click(closer), lambda: page.press("Escape")):
            assert not await page.run(is_open(panel))
            await page.click(opener)
            assert await page.run(is_open(panel))
            assert await page.run(f"document.getElementById({panel!r}).contains(document.activeElement)")
            assert await page.run("document.querySelector('main').inert"), "nothing below it can be reached"
            assert await page.run(f"document.getElementById({panel!r}).getBoundingClientRect().right <= innerWidth")
            await leave()
            assert not await page.run(is_open(panel)) and not await page.run("document.querySelector('main').inert")
            assert await page.run(f"document.activeElement === document.querySelector({opener!r})"), "the focus returns"
    await page.click("#tune")
    await page.call("Emulation.setDeviceMetricsOverride", width=1280, height=800, deviceScaleFactor=1, mobile=False)
    await page.until("!document.querySelector('main').inert && document.getElementById('backdrop').hidden")


async def test_dark_and_light(page):
    ground = "getComputedStyle(document.body).backgroundColor"
    light = await page.run(ground)
    await page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    dark = await page.run(ground)
    assert dark != light
    await page.click("#theme")
    assert await page.run(ground) == light
    assert await page.run("document.getElementById('theme').title") == "Theme: light"
    await page.reload()
    assert await page.run(ground) == light
    await page.click("#theme")
    assert await page.run(ground) == dark


@wide
async def test_everything_has_a_name(page, client):
    client.script = MARKDOWN.encode()
    await say(page, "go")
    await page.until(IDLE)
    await page.click("#tune")
    await page.run("document.querySelector('#sampling details').open = true")
    nodes = (await page.call("Accessibility.getFullAXTree"))["nodes"]
    roles = {"button", "textbox", "slider", "spinbutton", "link", "checkbox", "navigation", "complementary"}
    seen = [
        (n["role"]["value"], n.get("name", {}).get("value")) for n in nodes
        if not n["ignored"] and n["role"]["value"] in roles
    ]
    assert len(seen) > 20 and all(name for _, name in seen), seen


@wide
async def test_an_adapter_is_chosen_where_the_server_has_some(tmp_path, width):
    adapters = AdapterConfig(enable_lora=True, lora_modules="sql=/data/sql law=/data/law")
    client = FakeClient(config=EngineConfig(adapters=adapters))
    app = create_app(client, ServerConfig())
    async with live_server(app) as address, open_page(address + "/", tmp_path, width=width) as page:
        await page.until("document.getElementById('adapter').options.length === 3")
        await say(page, "first")
        await page.until(IDLE)
        await page.run("document.getElementById('adapter').value = 'law'")
        await say(page, "second")
        await page.until(f"{IDLE} === 2")
    assert client.adapters == ["", "law"]
