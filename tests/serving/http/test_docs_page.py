"""The page of the API at ``/docs``, and what the OpenAPI document says for it."""

from __future__ import annotations

import json
import shlex

import msgspec
import pytest
from browser import open_page
from fake_apps import httpx, live_server
from fake_client import FakeClient

from headrace.base.server_config import ServerConfig
from headrace.serving.http.app import ENDPOINTS, create_app
from headrace.serving.http.reference import EXAMPLES, TAGS

BODIES = {e.path: e.body for e in ENDPOINTS if e.body}
OPEN_ALL = "document.querySelectorAll('.route').forEach((route) => { route.open = true })"


def records_in(part: object, schemas: dict, found: set[str]) -> set[str]:
    """Names of the records that a part of the document refers to."""
    if isinstance(part, dict):
        name = str(part.get("$ref", "")).rpartition("/")[2]
        if name and name not in found:
            found.add(name)
            records_in(schemas[name], schemas, found)
        for value in part.values():
            records_in(value, schemas, found)
    elif isinstance(part, list):
        for value in part:
            records_in(value, schemas, found)
    return found


async def test_every_field_of_a_request_is_described(http):
    document = (await http.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    operations = [operation for methods in document["paths"].values() for operation in methods.values()]
    records = records_in([o.get("requestBody") for o in operations], schemas, set())
    fields = {f"{r}.{n}": f for r in records for n, f in schemas[r].get("properties", {}).items()}
    assert len(fields) > 200 and not {name for name, field in fields.items() if not field.get("description")}
    assert {o["tags"][0] for o in operations} <= set(TAGS) == {tag["name"] for tag in document["tags"]}


def test_every_body_has_an_example_that_is_taken():
    assert set(EXAMPLES) == set(BODIES)
    for path, example in EXAMPLES.items():
        BODIES[path].decode(msgspec.json.encode(example))


@pytest.fixture(params=[1280, 390])
async def page(request, tmp_path):
    app = create_app(FakeClient(script=b"Paris."), ServerConfig(api_key="k"))
    async with live_server(app) as address, open_page(address + "/docs", tmp_path, width=request.param) as page:
        await page.until("document.querySelector('.route')")
        page.address = address
        yield page
        assert not await page.run("document.documentElement.scrollWidth > innerWidth") and not page.complaints


async def test_all_routes_are_shown(page):
    await page.run(OPEN_ALL)
    await page.until("[...document.querySelectorAll('.route')].every((route) => route.querySelector('.route-body'))")
    shown = await page.run("[...document.querySelectorAll('.path, .aliases code')].map((path) => path.textContent)")
    assert set(shown) == {e.path.replace(":path}", "}") for e in ENDPOINTS}
    assert await page.count("h2") == len(TAGS) and "needs a key" in await page.text("#about")
    empty = "[...document.querySelectorAll('.type')].filter((type) => !type.textContent).length"
    assert await page.run(empty) == 0 and await page.count(".fields tr") > 300
    assert not await page.run("/undefined|\\[object/.test(document.body.textContent)")


async def test_a_route_is_found_and_unfolds(page):
    await page.click("#filter")
    await page.type("xtc_prob")
    paths = await page.run("[...document.querySelectorAll('.route')].filter((r) => !r.hidden).map((r) => r.id)")
    assert {"post-v1-chat-completions", "post-v1-completions", "post-generate"} <= set(paths) and len(paths) < 12
    await page.run("document.getElementById('filter').select()")
    await page.type("nothing like this")
    assert not await page.run("document.getElementById('none').hidden")
    await page.run("document.getElementById('filter').select()")
    await page.type("chat/completions")
    await page.click("#post-v1-chat-completions > summary")
    await page.until("document.querySelector('#post-v1-chat-completions .fields')")
    rows = await page.run("""Object.fromEntries([...document.querySelectorAll('#post-v1-chat-completions tr')].map(
        (row) => [row.querySelector('code').textContent, row.textContent]))""")
    assert next(iter(rows)) == "messages"
    assert "required" in rows["messages"] and "list of ChatMessage" in rows["messages"]
    assert "from 0 to 1" in rows["top_p"] and "most likely tokens" in rows["top_p"]
    await page.click("#post-v1-chat-completions .inner summary")
    await page.until("document.querySelector('#post-v1-chat-completions .inner .fields')")
    assert await page.run("location.hash") == "#post-v1-chat-completions"
    await page.reload()
    await page.until("document.getElementById('post-v1-chat-completions')?.open")


@pytest.mark.parametrize("page", [1280], indirect=True)
async def test_its_requests_are_answered(page):
    await page.run(OPEN_ALL)
    await page.until("document.querySelectorAll('.route-body').length === document.querySelectorAll('.route').length")
    lines = await page.run("[...document.querySelectorAll('.route-body > .code pre')].map((pre) => pre.innerText)")
    answered = set()
    async with httpx.AsyncClient(timeout=120) as http:
        for line in lines:
            words = shlex.split(line.replace("\\\n", " "))
            method = words[words.index("-X") + 1] if "-X" in words else "GET"
            address = next(word for word in words if word.startswith("http"))
            headers = dict(
                words[i + 1].replace("KEY", "k").split(": ", 1) for i, word in enumerate(words) if word == "-H"
            )
            body = words[words.index("-d") + 1] if "-d" in words else None
            if "{" in address or "/admin" in address or "-F" in words:  # a form with a file that is not there
                continue
            answer = await http.request(method, address, headers=headers, content=body)
            assert answer.status_code not in (401, 404, 405, 415), line
            if answer.status_code == 200:
                answered.add(address.removeprefix(page.address))
            else:  # this model makes no embeddings, and has no folder for profiles
                assert answer.status_code in (400, 409, 503), (line, answer.text)
    assert {
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate", "/api/chat",
        "/tokenize", "/v1/models", "/health", "/server_info",
    } <= answered, json.dumps(sorted(answered))


async def test_it_says_when_the_description_is_missing(tmp_path):
    app = create_app(FakeClient(), ServerConfig())
    app.router.routes = [route for route in app.router.routes if getattr(route, "path", "") != "/openapi.json"]
    async with live_server(app) as address, open_page(address + "/docs", tmp_path) as page:
        await page.until("document.querySelector('.failure')")
        assert "could not be read: status 404" in await page.text(".failure")
