"""The chat page: self-contained, locked down, and (where there is a browser) working."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from browser import CHROMIUM, open_page
from fake_apps import live_server
from fake_client import FakeClient, expected_text

from headrace.base.config import ServerConfig
from headrace.serving.http.app import create_app, page_policy


async def test_page_is_one_file_that_calls_nobody_else(http):
    answer = await http.get("/")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    html = answer.text
    assert not re.search(r"""(?:src|href|action)\s*=(?!"data:,"|"openapi\.json")|https?://|@import|url\(""", html)
    for danger in (
        "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "onclick=", "style="
    ):
        assert danger not in html, danger
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "unsafe" not in policy
    assert policy == page_policy(html) and policy.count("sha256-") == 2
    assert answer.headers["x-content-type-options"] == "nosniff"


async def test_page_sends_only_known_fields(http):
    """The body the page builds is one the server takes."""
    html = (await http.get("/")).text
    body = {
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}], "temperature": 0.7,
        "top_p": 0.95, "max_tokens": 5, "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True}
    }
    assert all(name in html for name in (*body, *body["stream_options"]))
    assert (await http.post("/v1/chat/completions", json=body)).status_code == 200


@pytest.fixture
async def client() -> FakeClient:
    return FakeClient(delay_s=0.005)


@pytest.fixture
async def page(client, tmp_path):
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here")
    async with live_server(create_app(client, ServerConfig())) as address, open_page(address + "/", tmp_path) as page:
        yield page


IDLE = "running === null && document.querySelector('.note')?.textContent.includes('tokens/s')"


async def say(page, text: str) -> None:
    await page.run(f"$('prompt').value = {json.dumps(text)}; $('ask').requestSubmit()")


async def test_a_conversation(page, client):
    await page.until("$('model').textContent === 'fake-model'")
    await page.run(
        "$('system').value = 'Be kind.'; $('max_tokens').value = 24; $('temperature').value = 0.5; $('top_p').value = "
        "0.5"
    )
    await say(page, "hello <b>there</b>")
    await page.until(IDLE)
    first = expected_text("system: Be kind.\nuser: hello <b>there</b>\nassistant:", 24, bos=False)
    assert await page.run("document.querySelector('.turn.assistant div').textContent") == first
    assert await page.run("document.querySelector('.turn.user').textContent") == "hello <b>there</b>"
    assert await page.run("document.querySelectorAll('.turn b').length") == 0
    assert re.match(
        r"24 tokens · [\d.]+ tokens/s · stopped", await page.run("document.querySelector('.note').textContent")
    )
    params = client.submitted[0][1]
    assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.5, 24)
    await say(page, "and?")
    await page.until("turns.length === 4 && running === null")
    second = expected_text(
        f"system: Be kind.\nuser: hello <b>there</b>\nassistant: {first}\nuser: and?\nassistant:", 24, bos=False
    )
    assert await page.run("turns[3].content") == second
    await page.run("$('fresh').click()")
    assert await page.run("turns.length") == 0 and await page.run("document.querySelectorAll('.turn').length") == 0
    assert not page.complaints


async def test_key_is_asked_for_and_kept_in_the_tab(client, tmp_path):
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here")
    app = create_app(client, ServerConfig(api_key="s3cret"))
    async with live_server(app) as address, open_page(address + "/", tmp_path) as page:
        await page.until("!$('settings').hidden && !$('enter').hidden && $('model').textContent.includes('API key')")
        await say(page, "hello")
        await page.until("document.querySelector('.error')?.textContent.includes('API key') && running === null")
        assert not client.submitted
        enter_key = "$('key').value = {!r}; $('key').dispatchEvent(new Event('change'))"
        await page.run(enter_key.format("s3cret"))
        await page.until("$('model').textContent === 'fake-model'")
        await page.run("$('max_tokens').value = 8")
        await say(page, "hello")
        await page.until(IDLE)
        assert len(client.submitted) == 1
        await page.call("Page.reload")
        await page.until("typeof turns !== 'undefined' && $('model').textContent === 'fake-model'")
        assert await page.run(
            "[$('key').value, sessionStorage.length, localStorage.length, document.cookie]"
        ) == ["s3cret", 1, 0, ""]


async def test_the_model_is_named_once_it_is_loaded(page, client):
    await page.until("$('model').textContent === 'fake-model'")
    facts, client.facts = client.facts, None
    await page.run("nameModel()")
    await page.until("$('model').textContent.includes('loading')")
    client.facts = facts
    await page.until("$('model').textContent === 'fake-model'")
    assert not [c for c in page.complaints if "503" not in c]


async def test_stop_keeps_what_has_come(page, client):
    await page.run("$('max_tokens').value = 3000")
    await say(page, "go")
    await page.until("!$('stop').hidden && turns[1]?.content.length > 10")
    await page.run("$('stop').click()")
    await page.until("running === null")
    assert (await page.run("document.querySelector('.note').textContent")).endswith("stopped")
    assert await page.run("turns.length") == 2
    async with asyncio.timeout(120):
        while client.children:
            await asyncio.sleep(0.01)
    assert client.aborted


async def test_errors_are_shown(page, client):
    await say(page, "FULL")
    await page.until("document.querySelector('.error')?.textContent === 'the queue is full'")
    await say(page, "BREAK5")
    await page.until("document.querySelectorAll('.error').length === 2")
    assert await page.run("document.querySelectorAll('.error')[1].textContent") == "the step failed"
    await page.until("running === null")
    client.state = "restarting"
    await say(page, "x")
    await page.until("document.querySelectorAll('.error').length === 3 && running === null")
    assert await page.run("turns.length") == 2, "unanswered turns are taken back"


async def test_answers_cannot_become_markup(page):
    answer = """# Title <script>alert(1)</script>
A **bold** and *slanted* `code <b>` & <img src=x onerror="window.hacked = 1">

- one
- two [x](javascript:alert(1))

3. three

```python
<b>print</b>("**not bold**")
```
tail"""
    await page.run(
        f"window.box = document.createElement('div'); log.append(box); writeBlocks(box, {json.dumps(answer)})"
    )
    html = await page.run("box.innerHTML")
    assert html == (
        "<h4>Title &lt;script&gt;alert(1)&lt;/script&gt;</h4>"
        '<p>A <strong>bold</strong> and <em>slanted</em> <code>code &lt;b&gt;</code> &amp; &lt;img src=x '
        'onerror="window.hacked = 1"&gt;</p>'
        "<ul><li>one</li><li>two [x](javascript:alert(1))</li></ul><ol start=\"3\"><li>three</li></ol>"
        '<pre><code>&lt;b&gt;print&lt;/b&gt;("**not bold**")</code></pre><p>tail</p>'
    )
    assert await page.run("window.hacked") is None and not page.complaints
