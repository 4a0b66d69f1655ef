"""The chat page: self-contained, locked down, and (where there is a browser) working."""

from __future__ import annotations

import asyncio
import re
import shutil

import pytest
from conftest import httpx, live_server
from fakes import FakeClient, expected_text

from headrace.base.config import ServerConfig
from headrace.serving.http.app import create_app
from headrace.serving.http.page import page_policy

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

# Appended to the page for the browser test: asks once, then leaves what the user sees in the title.
SCRIPT = """
<script>
addEventListener("load", async () => {
  document.getElementById("prompt").value = "hello <b>there</b>";
  document.getElementById("max_tokens").value = 24;
  document.getElementById("ask").requestSubmit();
  for (let i = 0; i < 400 && (!document.getElementById("stop").hidden || !document.querySelector(".note")?.textContent); i++)
    await new Promise((done) => setTimeout(done, 25));
  document.title = JSON.stringify({
    user: document.querySelector(".turn.user").textContent, bold: document.querySelectorAll(".turn b").length,
    answer: document.querySelector(".turn.assistant div").textContent, note: document.querySelector(".note").textContent,
    error: document.querySelector(".error")?.textContent ?? "",
  });
  document.body.append(Object.assign(document.createElement("pre"), { id: "result", textContent: document.title }));
});
</script>
"""


async def test_page_is_one_file_that_calls_nobody_else(http):
    answer = await http.get("/")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    html = answer.text
    assert not re.search(r"""(?:src|href|action)\s*=|https?://|@import|url\(""", html)
    for danger in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "onclick=", "style="):
        assert danger not in html, danger
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "unsafe" not in policy
    assert policy == page_policy(html) and policy.count("sha256-") == 2
    assert answer.headers["x-content-type-options"] == "nosniff"


async def test_page_sends_only_known_fields(http):
    """The body the page builds is one the server takes."""
    html = (await http.get("/")).text
    body = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}], "temperature": 0.7, "top_p": 0.95, "max_tokens": 5, "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    assert all(name in html for name in (*body, *body["stream_options"]))
    assert (await http.post("/v1/chat/completions", json=body)).status_code == 200


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
async def test_page_in_a_browser(monkeypatch, tmp_path):
    app = create_app(FakeClient(delay_s=0.005), ServerConfig())
    html = httpx.Response(200, text=await _page_text(app)).text.replace("</body>", SCRIPT + "</body>")
    app.router.routes = [r for r in app.router.routes if r.path != "/"]

    async def show(_request):
        from starlette.responses import HTMLResponse

        return HTMLResponse(html, headers={"Content-Security-Policy": page_policy(html)})

    app.add_route("/", show)
    async with live_server(app) as address:
        process = await asyncio.create_subprocess_exec(
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--virtual-time-budget=20000", "--dump-dom", address + "/",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )
        out, _ = await asyncio.wait_for(process.communicate(), 90)
    result = re.search(r'<pre id="result">(.*?)</pre>', out.decode(), re.DOTALL)
    assert result, out.decode()[-2000:]
    answer = expected_text("user: hello <b>there</b>\nassistant:", 24, bos=False)
    assert answer.strip() in result[1] and "tokens/s" in result[1] and '"bold":0' in result[1] and '"error":""' in result[1]


async def _page_text(app) -> str:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://x") as http:
        return (await http.get("/")).text
