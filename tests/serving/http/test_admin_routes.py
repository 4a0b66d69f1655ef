"""Memory, weights, pauses and profiles over HTTP: what is asked of the engine, and what requests meet meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fake_apps import http_for
from fake_client import FakeClient

from headrace.base.admin import DEVICE_PARTS, AcquireMemory, ReleaseMemory, ReplaceWeights, StartProfile, StopProfile
from headrace.base.errors import Conflict, EngineAsleep, WeightError
from headrace.base.server_config import OperationsConfig


async def start_held(http) -> asyncio.Task:
    """A request that runs until it is aborted."""
    asking = asyncio.create_task(http.post("/v1/completions", json={"prompt": "HOLD"}))
    while not http.app.state.context.running:
        await asyncio.sleep(0.01)
    return asking


async def test_sleep_and_wake_in_vllms_words(http, client):
    assert (await http.get("/is_sleeping")).json() == {"is_sleeping": False}
    assert (await http.post("/sleep?level=2")).json() == {"success": True, "message": "the engine sleeps"}
    assert client.controls == [ReleaseMemory(list(DEVICE_PARTS), discards_weights=True)]
    assert (await http.get("/is_sleeping")).json() == {"is_sleeping": True}
    assert (await http.post("/wake_up?tags=weights")).json()["message"] == "the engine sleeps", (
        "the cache is still away"
    )
    assert (await http.post("/wake_up?tags=kv_cache")).json()["message"] == "the engine is awake"
    assert [control.parts for control in client.controls[1:]] == [
        ["cuda_graph", "weights"], ["cuda_graph", "kv_cache"]
    ], "graphs come with the last part, or steps stayed slow"
    assert (await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})).status_code == 200
    assert (await http.post("/sleep")).status_code == 200 and client.controls[-1].discards_weights is False


async def test_memory_in_sglangs_words(http, client):
    assert (await http.post("/release_memory_occupation", json={"tags": ["kv_cache"]})).status_code == 200
    assert client.controls == [ReleaseMemory(["kv_cache"])] and client.state == "asleep"
    assert (await http.post("/resume_memory_occupation", json={})).status_code == 200
    assert client.controls[-1] == AcquireMemory(list(DEVICE_PARTS)) and client.state == "ready"
    assert (
        await http.post("/release_memory_occupation", json={"tags": ["cuda_graph"]})
    ).json()["message"] == "the engine is awake"
    assert client.state == "ready", "slower, but at work"


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ("/generate", {"text": "x"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "model": "fake-model"}),
    ("/health_generate", None),
    ("/pause_generation", {}), ("/start_profile", {}),
])
async def test_nobody_is_served_by_a_sleeping_engine(client, path, body):
    async with http_for(client, operations=OperationsConfig(profile_folder="p")) as http:
        await http.post("/sleep")
        answer = await (http.get(path) if body is None else http.post(path, json=body))
        assert answer.status_code == 503 and int(answer.headers["Retry-After"]) >= 1 and "sleeps" in answer.text
        assert (
            (await http.get("/ready")).status_code == 503 and (await http.get("/health")).json()["engine"] == "asleep"
        )
        assert (await http.get("/metrics")).status_code == (await http.get("/get_model_info")).status_code == 200


async def test_requests_stand_in_the_way_of_sleep(http, client):
    asking = await start_held(http)
    for path in ("/sleep", "/release_memory_occupation"):
        answer = await http.post(path)
        assert answer.status_code == 409 and "1 requests are running" in answer.json()["error"]["message"]
    assert client.controls == [] and client.state == "ready"
    assert (await http.post("/sleep?mode=abort")).status_code == 200
    assert (await asking).json()["choices"][0]["finish_reason"] == "abort" and client.state == "asleep"


async def test_sleep_can_wait_for_requests(http, client):
    asking = await start_held(http)
    falling = asyncio.create_task(http.post("/sleep?mode=wait"))
    while client.state == "ready":
        await asyncio.sleep(0.01)
    assert not falling.done() and (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 503
    await client.abort(None)
    assert (await falling).status_code == 200 and (await asking).status_code == 200


async def test_an_engine_that_refuses_to_sleep_or_wake(http, client):
    client.refusal = Conflict("2 requests are running or waiting")
    assert (await http.post("/sleep")).status_code == 409 and client.state == "ready"
    client.refusal = None
    await http.post("/sleep")
    client.refusal = EngineAsleep("the device has no room", retry_after=5)
    answer = await http.post("/wake_up")
    assert answer.status_code == 503 and answer.headers["Retry-After"] == "5" and client.state == "asleep"
    assert (await http.post("/update_weights_from_disk")).status_code == 503 and client.state == "asleep"


@pytest.mark.parametrize(("path", "body"), [
    ("/sleep?level=0", None), ("/sleep?level=x", None), ("/sleep?mode=keep", None), ("/wake_up?tags=brain", None),
    ("/pause?mode=wait", None),
    ("/release_memory_occupation", {"tags": ["brain"]}), ("/release_memory_occupation", {"tags": "weights"}),
    ("/resume_memory_occupation", {"x": 1}),
    ("/update_weights_from_disk", {"flush_cache": False}), ("/update_weights_from_disk", {"load_format": "pickle"}),
    ("/start_profile", {"output_dir": "/tmp"}), ("/start_profile", {"num_steps": 0}), ("/start_profile", {}),
    ("/stop_profile", {}),
])
async def test_wrong_asks(http, client, path, body):
    answer = await http.post(path, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["message"]
    assert client.controls == []


async def test_pause_in_vllms_words(http, client):
    asking = await start_held(http)
    assert (await http.post("/pause?mode=keep")).status_code == 200 and not asking.done()
    assert (await http.get("/is_paused")).json() == {"is_paused": True}
    client.engine_pids = (2,)
    assert (await http.get("/is_paused")).json() == {"is_paused": False}, "a new engine is not paused"
    assert (
        (await http.post("/pause")).status_code == 200
        and (await asking).json()["choices"][0]["finish_reason"] == "abort"
    )
    assert (
        (await http.post("/resume")).status_code == 200
        and (await http.get("/is_paused")).json() == {"is_paused": False}
    )
    assert client.controls == ["pause", "pause", "continue"]


async def test_weights_are_read_from_the_configured_folder_alone(client, tmp_path: Path):
    served = client.config.model.model
    root = tmp_path / "models"
    (root / "step-1").mkdir(parents=True)
    (root / "out").symlink_to(tmp_path)
    async with http_for(client, operations=OperationsConfig(weights_root=str(root))) as http:
        for path in ("step-1", str(root / "step-1"), "./x/../step-1"):
            answer = await http.post("/update_weights_from_disk", json={"model_path": path, "weight_version": "1"})
            assert answer.json() == {"success": True, "message": "the weights were replaced", "num_paused_requests": 0}
            assert client.controls.pop() == ReplaceWeights(str(root / "step-1"))
        assert (
            (await http.get("/model_info")).json()["weight_version"] == "1"
            and client.config.model.model == str(root / "step-1")
        )
        asking = await start_held(http)
        answer = await http.post("/update_weights_from_disk", json={"model_path": "step-1", "abort_all_requests": True})
        assert (
            answer.json()["num_paused_requests"] == 0
            and (await asking).json()["choices"][0]["finish_reason"] == "abort"
        )
        client.controls.clear()
        for path in ("../x", "/etc", "out/x", "step-1/../../x", "a\0b", "org/name/../../.."):
            answer = await http.post("/update_weights_from_disk", json={"model_path": path})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "model_path", path
        assert not client.controls
    async with http_for(FakeClient()) as http:
        assert (
            await http.post("/update_weights_from_disk", json={"model_path": str(root / "step-1")})
        ).status_code == 400
        assert (await http.post("/update_weights_from_disk", json={"model_path": served})).status_code == 200


async def test_weights_that_do_not_fit(http, client):
    client.refusal = WeightError("the checkpoint does not fit the model: tensors missing (1): a.weight")
    answer = await http.post("/update_weights_from_disk")
    assert (
        answer.status_code == 400 and "were not replaced" in answer.json()["error"]["message"]
        and client.state == "ready"
    )
    assert (await http.get("/model_info")).json()["weight_version"] == "default"


async def test_profiles(client, tmp_path: Path):
    async with http_for(client, operations=OperationsConfig(profile_folder=str(tmp_path))) as http:
        assert (
            await http.post("/start_profile", json={"num_steps": 3, "with_stack": True, "activities": ["CPU", "GPU"]})
        ).status_code == 200
        assert "a.trace.json" in (await http.post("/stop_profile")).json()["message"]
        assert (await http.post("/start_profile", json={"activities": ["CPU"]})).status_code == 200
    assert client.controls == [
        StartProfile(str(tmp_path), 3, has_stacks=True), StopProfile(), StartProfile(str(tmp_path), has_device=False)
    ]
