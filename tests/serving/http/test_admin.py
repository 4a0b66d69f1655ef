"""Admin routes: what they do, and to whom they are closed."""

from __future__ import annotations

import asyncio

import pytest
from fake_apps import http_for
from fake_client import FakeClient

from headrace.base.errors import ConfigError
from headrace.base.server_config import ServerConfig
from headrace.serving.http.app import ENDPOINTS, create_app
from headrace.serving.http.transport.access import is_loopback

ADMIN = sorted(e.path for e in ENDPOINTS if e.is_admin)
DONE = {path: 400 if path.endswith("_profile") or "lora_adapter" in path else 200 for path in ADMIN}
"""The status of one that is let in; profiles have no folder here, and no adapters are served."""


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_they_are_told_to_the_engine(http, client):
    for path in ("/pause_generation", "/continue_generation", "/freeze_gc"):
        answer = await http.post(path)
        assert answer.status_code == 200 and answer.json()["success"] is True
    assert client.controls == ["pause", "continue", "freeze_gc"]
    assert (await http.post("/reset_prefix_cache")).json()["success"] is True


@pytest.mark.parametrize(("mode", "num_ended"), [("abort", 1), (None, 1), ("in_place", 0)])
async def test_a_pause_ends_what_runs_unless_told_otherwise(http, client, mode, num_ended):
    asking = asyncio.create_task(http.post("/v1/completions", json={"prompt": "HOLD"}))
    while not http.app.state.context.running:
        await asyncio.sleep(0.01)
    answer = await http.post("/pause_generation", json={"mode": mode})
    assert f"; {num_ended} running" in answer.json()["message"]
    assert len(client.aborted) == num_ended
    for running in list(http.app.state.context.running):
        http.app.state.context.abort(running)
    await asking


async def test_wrong_pauses(http, client):
    for body in ({"mode": "retract"}, {"mode": 1}, {"x": 1}, []):
        assert (await http.post("/pause_generation", json=body)).status_code == 400
    assert (await http.get("/pause_generation")).status_code == 405
    client.state = "restarting"
    assert (await http.post("/pause_generation")).status_code == 503


async def test_loads(http):
    loads = (await http.get("/v1/loads")).json()
    (load,) = loads["loads"]
    assert (
        loads["dp_rank_count"] == 1 and load["num_total_reqs"] == load["num_running_reqs"] + load["num_waiting_reqs"]
        and 0 <= load["token_usage"] <= 1
    )


@pytest.mark.parametrize("path", ADMIN)
async def test_they_are_closed_where_others_can_reach_them(path):
    fake = FakeClient()
    async with http_for(fake, host="0.0.0.0", api_key="k") as http:
        answer = await http.post(path, headers=bearer("k"))
        assert answer.status_code == 403 and "--admin-api-key" in answer.json()["error"]["message"]
        assert (await http.get("/v1/models", headers=bearer("k"))).status_code == 200
    async with http_for(fake, host="0.0.0.0", api_key="k", admin_api_key="a") as http:
        for headers in ({}, bearer("k"), bearer("a "[:1] + "b"), bearer("")):
            assert (await http.post(path, headers=headers)).status_code == 401
        assert (await http.post(path, headers=bearer("a"))).status_code == DONE[path]
        assert (await http.get("/v1/models", headers=bearer("a"))).status_code == 401, (
            "the admin key opens nothing else"
        )
    async with http_for(fake, api_key="k") as http:
        assert (await http.post(path)).status_code == 401
        assert (await http.post(path, headers=bearer("k"))).status_code == DONE[path]


@pytest.mark.parametrize("path", ADMIN)
async def test_pages_of_other_sites_stay_outside(http, path):
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", DONE[path]), ("none", DONE[path])):
        assert (await http.post(path, headers={"Sec-Fetch-Site": site})).status_code == status


HERE = "localhost:8000"


@pytest.mark.parametrize(
    ("headers", "is_open"),
    [
        ({"Host": HERE, "Origin": f"http://{HERE}"}, True),
        ({"Host": "127.0.0.1:8000", "Origin": "http://127.0.0.1:8000"}, True),
        ({"Host": "[::1]:8000", "Origin": "http://[::1]:8000"}, True),
        ({"Host": "127.0.0.1:8000"}, True),
        ({"Host": "LOCALHOST"}, True),
        ({"Host": HERE, "Origin": "https://evil.example"}, False),
        ({"Host": HERE, "Origin": "http://localhost:3000"}, False),
        ({"Host": HERE, "Origin": "http://localhost:8000.evil.example"}, False),
        ({"Host": HERE, "Origin": "null"}, False),
        ({"Host": HERE, "Origin": ""}, False),
        ({"Host": HERE, "Origin": "https://evil.example", "Sec-Fetch-Site": "same-origin"}, False),
        # DNS rebinding: to the browser this is one site
        ({"Host": "evil.example:8000", "Origin": "http://evil.example:8000", "Sec-Fetch-Site": "same-origin"}, False),
        ({"Host": "evil.example"}, False),
        ({"Host": "localhost.evil.example:8000"}, False),
        ({"Host": "127.0.0.1.evil.example"}, False),
        ({"Host": "localhost@evil.example"}, False),
        ({"Host": "[::1"}, False),
        ({"Host": "192.168.0.9:8000"}, False),
    ],
)
async def test_only_pages_of_this_server_get_in(headers, is_open):
    async with http_for(FakeClient(), port=8000) as http:
        for path in ("/pause_generation", "/flush_cache"):
            answer = await http.post(path, headers=headers)
            assert answer.status_code == (200 if is_open else 403), answer.text
        answer = await http.get("/v1/models", headers=headers)
        assert answer.status_code == (403 if "." in headers.get("Host", "").strip("0123456789.:") else 200)
    async with http_for(FakeClient(), admin_api_key="a") as http:  # a page does not know the key
        assert (await http.post("/pause_generation", headers=headers | bearer("a"))).status_code == 200


async def test_a_proxy_names_the_server():
    proxied = {"Host": "llm.example", "Origin": "https://llm.example", "Sec-Fetch-Site": "same-origin"}
    async with http_for(FakeClient()) as http:
        refused = await http.post("/pause_generation", headers=proxied)
        assert refused.status_code == 403 and "--allowed-hosts" in refused.json()["error"]["message"]
    async with http_for(FakeClient(), allowed_hosts="other.example, LLM.example") as http:
        assert (await http.post("/pause_generation", headers=proxied)).status_code == 200
        # it may replace Host by the address that it calls
        assert (await http.post("/pause_generation", headers={**proxied, "Host": "127.0.0.1:8000"})).status_code == 200
        assert (await http.post("/pause_generation", headers={**proxied, "Host": "evil.example"})).status_code == 403
        assert (await http.post("/pause_generation", headers={**proxied, "Origin": "null"})).status_code == 403
    async with http_for(FakeClient(), host="127.0.0.2") as http:
        assert (await http.post("/pause_generation", headers={"Host": "127.0.0.2:8000"})).status_code == 200


@pytest.mark.parametrize("path", ADMIN)
async def test_bodies_are_declared_as_json(http, path):
    for declared in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", None):
        headers = {} if declared is None else {"Content-Type": declared}
        answer = await http.post(path, content=b"{}", headers=headers)
        assert answer.status_code == 415 and "application/json" in answer.json()["error"]["message"]
    assert (await http.post(path, headers={"Content-Type": "text/plain"})).status_code == 415
    for declared in ("application/json", "Application/JSON; charset=utf-8"):
        assert (await http.post(path, content=b"{}", headers={"Content-Type": declared})).status_code == DONE[path]


async def test_chunked_bodies_are_declared_as_json(http):
    async def pieces():
        yield b"{}"

    assert (await http.post("/pause_generation", content=pieces())).status_code == 415


async def test_the_admin_key_is_no_secret_told():
    async with http_for(FakeClient(), admin_api_key="hidden") as http:
        assert "hidden" not in (await http.get("/server_info")).text
        assert (await http.post("/root/../pause_generation", headers={})).status_code in (401, 404)
    with pytest.raises(ConfigError, match="must not be empty"):
        await _use(ServerConfig(admin_api_key=" "))


async def _use(config: ServerConfig) -> None:
    app = create_app(FakeClient(), config)
    app.build_middleware_stack()


def test_which_addresses_are_this_machine():
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.0.1", "example.com", "", "localhost.example.com")))


@pytest.mark.parametrize(("host", "options", "status"), [
    ("evil.example", {}, 403), ("evil.example:8000", {}, 403), ("localhost.evil.example", {}, 403),
    ("127.0.0.1:8000", {}, 200), ("[::1]:8000", {}, 200), ("llm", {}, 200), ("172.17.0.1", {}, 200),
    ("llm.example", {"allowed_hosts": "llm.example"}, 200), ("evil.example", {"allowed_hosts": "llm.example"}, 403),
    ("any.example", {"allowed_hosts": "*"}, 200), ("any.example", {"host": "0.0.0.0"}, 200),
    ("any.example", {"api_key": "secret"}, 200),
])
async def test_no_route_on_loopback_without_keys_is_reached_by_rebinding(host: str, options: dict, status: int):
    headers = {"host": host, "authorization": "Bearer secret"}
    async with http_for(FakeClient(), **options) as http:
        for method, path in (("GET", "/v1/models"), ("GET", "/"), ("POST", "/v1/completions"), ("GET", "/metrics")):
            body = {"prompt": "a"} if method == "POST" else None
            answer = await http.request(method, path, headers=headers, json=body)
            assert answer.status_code == status, path
            assert status == 200 or "--allowed-hosts" in answer.json()["error"]["message"]
