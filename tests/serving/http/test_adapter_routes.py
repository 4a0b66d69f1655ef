"""LoRA adapters over HTTP: named as models on every route, listed beside the base, loaded and unloaded by the admin."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from fake_apps import http_for
from fake_client import FakeClient

from headrace.base.adapters import AdapterConfig, AdapterStats, LoadAdapter, LoRARequest, UnloadAdapter
from headrace.base.config import EngineConfig
from headrace.base.errors import AdapterError, ConfigError, Conflict
from headrace.base.messages import EngineStats
from headrace.base.pooling import PoolingFacts
from headrace.base.server_config import ServerConfig
from headrace.serving.http.app import create_app

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "lawyer").mkdir()
    return tmp_path


@pytest.fixture
def client(folder: Path) -> FakeClient:
    modules = "sql=/data/sql chat:v2=owner/chat"
    adapters = AdapterConfig(enable_lora=True, lora_modules=modules, lora_folders=str(folder))
    return FakeClient(config=replace(EngineConfig(), adapters=adapters))


@pytest.fixture
async def http(client: FakeClient) -> AsyncIterator[Any]:
    async with http_for(client) as http:
        yield http


ROUTES = [
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 2}),
    ("/v1/responses", {"input": "x", "max_output_tokens": 2}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 2}),
    ("/api/chat", {"messages": MESSAGES, "stream": False, "options": {"num_predict": 2}}),
    ("/api/generate", {"prompt": "x", "stream": False, "options": {"num_predict": 2}}),
]


@pytest.mark.parametrize(("route", "body"), ROUTES, ids=[route for route, _ in ROUTES])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_adapter_is_a_model(
    http: Any, client: FakeClient, route: str, body: dict[str, Any], is_streamed: bool
):
    names = ("sql", "fake-model:sql", "chat:v2", "fake-model", "default")
    for name in names:
        answer = await http.post(route, json={**body, "model": name, "stream": is_streamed})
        assert answer.status_code == 200, answer.text
        shown = {"fake-model:sql": "sql", "default": "fake-model"}.get(name, name)
        wanted = name if route.startswith("/api") else shown
        assert f'"model":"{wanted}"' in answer.text.replace('": "', '":"')
    assert client.adapters == ["sql", "sql", "chat:v2", "", ""]
    missing = await http.post(route, json={**body, "model": "fake-model:other"})
    assert missing.status_code == 404 and "sql" in missing.text and len(client.adapters) == len(names)


async def test_ollamas_tag_is_not_of_the_name(http: Any, client: FakeClient):
    await http.post("/api/generate", json={"model": "sql:latest", "prompt": "x", "stream": False})
    assert client.adapters == ["sql"]


async def test_sglangs_field(http: Any, client: FakeClient):
    body = {"text": "x", "sampling_params": {"max_new_tokens": 1}}
    assert (await http.post("/generate", json={**body, "lora_path": "sql"})).status_code == 200
    assert client.adapters == ["sql"]
    assert (await http.post("/generate", json={**body, "lora_path": "/etc"})).status_code == 404


async def test_sglangs_field_for_each_prompt_of_a_batch(http: Any, client: FakeClient):
    body = {"text": ["x", "y", "z"], "sampling_params": {"max_new_tokens": 1}}
    adapters = ["sql", None, "fake-model:chat:v2"]
    assert (await http.post("/generate", json={**body, "lora_path": adapters})).status_code == 200
    assert client.adapters == ["sql", "", "chat:v2"]
    for wrong, status in ((["sql"], 400), (["sql", None, "none"], 404), ([], 400), (["sql", None, 3], 400)):
        answer = await http.post("/generate", json={**body, "lora_path": wrong})
        assert answer.status_code == status and answer.json()["error"]["param"].startswith("lora_path")
    assert len(client.adapters) == 3


@pytest.mark.parametrize(("route", "body"), [
    ("/v1/embeddings", {"input": "x"}), ("/v1/score", {"text_1": "a", "text_2": "b"}),
    ("/v1/rerank", {"query": "a", "documents": ["b"]}), ("/api/embed", {"input": "x"}),
], ids=lambda value: value if isinstance(value, str) else "")
async def test_embeddings_of_an_adapter(client: FakeClient, route: str, body: dict[str, Any]):
    client = FakeClient(config=client.config, pooling=PoolingFacts("embed", 4))
    async with http_for(client) as http:
        answer = await http.post(route, json={**body, "model": "sql"})
        assert answer.status_code == 200 and set(client.adapters) == {"sql"}
        assert '"model":"sql"' in answer.text
        assert (await http.post(route, json={**body, "model": "none"})).status_code == 404


async def test_models_list_adapters_with_their_parent(http: Any):
    base, sql, chat = (await http.get("/v1/models")).json()["data"]
    assert base["id"] == "fake-model" and base["parent"] is None
    assert (sql["id"], sql["parent"], sql["root"]) == ("sql", "fake-model", "sql")
    assert sql["max_model_len"] == base["max_model_len"] and chat["id"] == "chat:v2"
    assert (await http.get("/v1/models/sql")).json() == sql
    assert (await http.get("/v1/models/fake-model:sql")).json() == sql
    assert (await http.get("/v1/models/other")).status_code == 404
    names = [model["name"] for model in (await http.get("/api/tags")).json()["models"]]
    assert names == ["fake-model", "sql", "chat:v2"]
    digests = {model["digest"] for model in (await http.get("/api/ps")).json()["models"]}
    assert len(digests) == 3
    assert (await http.post("/api/show", json={"model": "sql"})).status_code == 200


async def test_openais_client(client: FakeClient):
    openai = pytest.importorskip("openai")
    async with http_for(client) as http:
        api = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0)
        assert [model.id async for model in api.models.list()] == ["fake-model", "sql", "chat:v2"]
        answer = await api.chat.completions.create(model="sql", messages=MESSAGES, max_tokens=2)
        assert answer.model == "sql" and answer.choices[0].message.content
        with pytest.raises(openai.NotFoundError) as caught:
            await api.chat.completions.create(model="none", messages=MESSAGES)
        assert caught.value.code == "model_not_found"


async def test_load_and_unload(http: Any, client: FakeClient, folder: Path):
    body = {"lora_name": "law", "lora_path": "lawyer"}
    assert (await http.post("/v1/completions", json={"model": "law", "prompt": "x"})).status_code == 404
    answer = await http.post("/v1/load_lora_adapter", json=body)
    assert answer.status_code == 200 and answer.json()["adapter"]["rank"] == 8
    assert client.controls[-1] == LoadAdapter("law", str(folder / "lawyer"))
    assert (await http.post("/v1/completions", json={"model": "law", "prompt": "x"})).status_code == 200
    again = await http.post("/v1/load_lora_adapter", json=body)
    assert again.status_code == 409 and "load_inplace" in again.text
    replaced = await http.post("/v1/load_lora_adapter", json={**body, "load_inplace": True, "pinned": True})
    assert replaced.status_code == 200 and client.controls[-1].replaces and client.controls[-1].is_pinned
    assert (await http.post("/v1/unload_lora_adapter", json={"lora_name": "law"})).status_code == 200
    assert client.controls[-1] == UnloadAdapter("law")
    assert (await http.post("/v1/completions", json={"model": "law", "prompt": "x"})).status_code == 404
    assert (await http.post("/v1/unload_lora_adapter", json={"lora_name": "law"})).status_code == 404
    assert "law" not in (await http.get("/v1/models")).text
    assert (await http.post("/v1/unload_lora_adapter", json={"lora_name": "sql", "lora_int_id": 3})).status_code == 200


@pytest.mark.parametrize(("body", "status", "words"), [
    ({"lora_name": "a", "lora_path": "../.."}, 400, "--lora-folders"),
    ({"lora_name": "a", "lora_path": "/etc"}, 400, "--lora-folders"),
    ({"lora_name": "a", "lora_path": "none"}, 404, "none"),
    ({"lora_name": "a", "lora_path": "owner/name"}, 404, "owner/name"),
    ({"lora_name": "", "lora_path": "lawyer"}, 400, "lora_name"),
    ({"lora_name": "a\nb", "lora_path": "lawyer"}, 400, "printable"),
    ({"lora_name": "fake-model", "lora_path": "lawyer"}, 409, "own name"),
    ({"lora_name": "a"}, 400, "lora_path"), ({"lora_name": "a", "lora_path": "lawyer", "x": 1}, 400, "x"),
])
async def test_a_wrong_load_is_refused(http: Any, client: FakeClient, body: dict[str, Any], status: int, words: str):
    answer = await http.post("/v1/load_lora_adapter", json=body)
    assert answer.status_code == status and words in answer.text
    assert not client.controls


async def test_the_engines_refusal_is_the_answer(http: Any, client: FakeClient):
    body = {"lora_name": "law", "lora_path": "lawyer"}
    for refusal, status in ((AdapterError("rank 64"), 400), (Conflict("no slot"), 409)):
        client.refusal = refusal
        answer = await http.post("/v1/load_lora_adapter", json=body)
        assert answer.status_code == status and refusal.message in answer.text
    assert "law" not in (await http.get("/v1/models")).text


async def test_load_from_tensors(http: Any, client: FakeClient):
    body = {"lora_name": "rl", "tensors": base64.b64encode(b"\0\1").decode(), "config_dict": {"r": 8}}
    assert (await http.post("/v1/load_lora_adapter_from_tensors", json=body)).status_code == 200
    assert client.controls[-1] == LoadAdapter("rl", tensors=b"\0\1", config='{"r":8}')
    assert (await http.post("/v1/completions", json={"model": "rl", "prompt": "x"})).status_code == 200
    client.engine_pids = (2,)  # the engine was restarted
    assert (await http.post("/v1/completions", json={"model": "rl", "prompt": "x"})).status_code == 404


async def test_a_server_without_adapters(http: Any):
    async with http_for(FakeClient()) as plain:
        for route, body in (
            ("load_lora_adapter", {"lora_name": "a", "lora_path": "b"}), ("unload_lora_adapter", {"lora_name": "a"}),
        ):
            answer = await plain.post(f"/v1/{route}", json=body)
            assert answer.status_code == 400 and "--enable-lora" in answer.text
        assert len((await plain.get("/v1/models")).json()["data"]) == 1


@pytest.mark.parametrize("path", [
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/load_lora_adapter_from_tensors", "/load_lora_adapter",
])
async def test_loads_need_the_admin_key(client: FakeClient, path: str):
    body = {"lora_name": "a", "lora_path": "lawyer"}
    async with http_for(client, api_key="user", admin_api_key="admin") as http:
        assert (await http.post(path, json=body, headers={"Authorization": "Bearer user"})).status_code == 401
    async with http_for(client, host="0.0.0.0") as http:
        assert (await http.post(path, json=body)).status_code == 403
    assert not client.controls


async def test_metrics_of_adapters(http: Any, client: FakeClient, monkeypatch: pytest.MonkeyPatch):
    counted = AdapterStats(3, 2, 7, 4, {"sql": 5}, {"chat:v2": 1, "sql": 2})
    monkeypatch.setattr(client, "stats", AsyncMock(return_value=EngineStats(adapters=counted)))
    text = (await http.get("/metrics")).text
    assert 'running_lora_adapters="sql"' in text and 'waiting_lora_adapters="chat:v2,sql"' in text
    assert 'max_lora="8"' in text and "headrace_lora_loads_total 7.0" in text
    assert 'headrace_lora_requests{adapter="sql",state="waiting"} 2.0' in text
    assert "headrace_lora_pool_slots 8.0" in text and "headrace_lora_pool_slots_used 2.0" in text


class RestartedReplica:
    """Keeps what it is asked, and answers when it may, with an error if there is one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.may_answer, self.error = asyncio.Event(), error

    async def call(self, method: str, arguments: dict[str, Any], timeout_s: float) -> None:
        self.calls.append((method, arguments))
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error


async def test_a_restarted_engine_gets_what_was_changed_since_the_start(http: Any, client: FakeClient, folder: Path):
    """It has loaded ``lora_modules``: one of these that was replaced must not be served with its first weights."""
    body = {"lora_name": "sql", "lora_path": "lawyer", "load_inplace": True, "pinned": True}
    assert (await http.post("/v1/load_lora_adapter", json=body)).status_code == 200
    assert (await http.post("/v1/unload_lora_adapter", json={"lora_name": "chat:v2"})).status_code == 200
    replica = RestartedReplica()
    client.on_restart(replica)
    catalog = http.app.state.context.adapters
    asked = [
        asyncio.create_task(http.post("/v1/completions", json={"model": name, "prompt": "x", "max_tokens": 1}))
        for name in ("sql", "default")
    ]
    assert (await asked[1]).status_code == 200 and not asked[0].done(), "others do not wait"
    assert client.adapters == [""] and catalog.is_reloading(["", "sql"]) and not catalog.is_reloading([""])
    replica.may_answer.set()
    assert (await asked[0]).status_code == 200 and client.adapters == ["", "sql"]
    assert [(method, call["name"]) for method, call in replica.calls] == [
        ("load_adapter", "sql"), ("unload_adapter", "chat:v2"),
    ]
    loaded = replica.calls[0][1]
    assert loaded["path"] == str(folder / "lawyer") and loaded["replaces"] and loaded["is_pinned"]


async def test_who_waits_for_an_adapter_whose_files_have_gone_is_told(http: Any, client: FakeClient):
    assert (await http.post("/v1/load_lora_adapter", json={"lora_name": "law", "lora_path": "lawyer"})).is_success
    replica = RestartedReplica(AdapterError("there is no adapter", param="lora_path"))
    client.on_restart(replica)
    body = {"model": "law", "messages": MESSAGES, "max_tokens": 1}
    asked = asyncio.create_task(http.post("/v1/chat/completions", json=body))
    while not replica.calls:
        await asyncio.sleep(0.001)
    replica.may_answer.set()
    answer = await asked
    assert answer.status_code == 404 and "'law'" in answer.text and client.adapters == []
    assert (await http.post("/v1/chat/completions", json=body)).json()["error"]["code"] == "model_not_found"


async def test_an_unchanged_server_reloads_nothing(http: Any, client: FakeClient):
    replica = RestartedReplica()
    client.on_restart(replica)
    assert not http.app.state.context.adapters._reloading and not replica.calls


async def test_a_reload_waits_for_a_load_that_is_under_way(http: Any, client: FakeClient):
    """Or it would put the old weights in place of the new."""
    catalog, replica = http.app.state.context.adapters, RestartedReplica()
    await catalog.load("law", "/first", is_trusted=True)
    async with catalog._turn:
        client.on_restart(replica)
        await asyncio.sleep(0.01)
        assert not replica.calls
        catalog._known["law"] = LoRARequest("law", "/second")
    replica.may_answer.set()
    while catalog._reloading:
        await asyncio.sleep(0.001)
    assert [call["path"] for _, call in replica.calls] == ["/second"]


async def test_what_an_engine_has_of_a_load_that_nobody_waited_for_is_replaced(http: Any, client: FakeClient):
    control = client.control

    async def refuse_first(method: Any, **options: Any) -> Any:
        if isinstance(method, LoadAdapter) and not method.replaces:
            raise Conflict("loaded already")
        return await control(method, **options)

    client.control = refuse_first
    answer = await http.post("/v1/load_lora_adapter", json={"lora_name": "law", "lora_path": "lawyer"})
    assert answer.status_code == 200, answer.text
    again = await http.post("/v1/load_lora_adapter", json={"lora_name": "law", "lora_path": "lawyer"})
    assert again.status_code == 409


async def test_default_is_the_base_model(http: Any, client: FakeClient):
    answer = await http.post("/v1/load_lora_adapter", json={"lora_name": "default", "lora_path": "lawyer"})
    assert answer.status_code == 409 and "own name" in answer.text and not client.controls


async def test_a_name_stands_for_one_path(http: Any):
    catalog = http.app.state.context.adapters
    assert await catalog.make_ready(LoRARequest("law", "/first")) == "law"
    assert await catalog.make_ready(LoRARequest("law")) == "law"
    with pytest.raises(Conflict, match="/first, not from /second"):
        await catalog.make_ready(LoRARequest("law", "/second"))


@pytest.mark.parametrize("name", ["default", "mine"])
def test_a_module_with_the_models_own_name_is_refused_at_the_start(name: str):
    """Requests for it would be answered by the base model."""
    adapters = AdapterConfig(enable_lora=True, lora_modules=f"sql=/data/sql {name}=/data/other")
    client = FakeClient(config=replace(EngineConfig(), adapters=adapters))
    with pytest.raises(ConfigError, match=f"'{name}', the served model's own name"):
        create_app(client, ServerConfig(served_model_name="mine"))


async def test_each_name_of_the_model_goes_before_an_adapter(client: FakeClient):
    async with http_for(client, served_model_name="one,two") as http:
        for name in ("one:sql", "two:sql", "sql"):
            answer = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, "model": name})
            assert answer.status_code == 200 and answer.json()["model"] == "sql"
        assert (await http.get("/v1/models/two:sql")).json()["parent"] == "one"
        assert (await http.get("/v1/models/three:sql")).status_code == 404
