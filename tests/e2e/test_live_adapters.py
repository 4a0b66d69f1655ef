"""``headrace serve`` with LoRA adapters: some from the start, others loaded and unloaded under load; and after a crash.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live import LiveServer, running_server

sys.path.insert(0, str(Path(__file__).parents[1] / "service"))

from adapter_rig import merge, write_adapter
from tiny_checkpoint import write_tiny_checkpoint

from headrace import LLM, SamplingParams

PROMPT = [3, 5, 8, 13, 21]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    base = write_tiny_checkpoint(folder / "base", 5)
    for i, name in enumerate(("a", "b")):
        write_adapter(base, folder / "adapters" / name, i + 1, rank=3 + i)
        merge(base, folder / "adapters" / name, folder / f"{name}-merged")
    return folder


@pytest.fixture(scope="module")
def wanted(folder: Path) -> dict[str, list[int]]:
    options: dict[str, Any] = {"skip_tokenizer": True, "dtype": "float32", "kv_pages": 64, "threads": 1}
    found = {}
    for name, model in (("base", "base"), ("a", "a-merged"), ("b", "b-merged")):
        with LLM(folder / model, **options) as llm:
            found[name] = list(llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids)
    return found


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    arguments = [
        "--model", str(folder / "base"), "--skip-tokenizer", "--dtype", "float32", "--kv-pages", "256", "--enable-lora",
        "--lora-modules", f"a={folder / 'adapters' / 'a'}", "--lora-folders", str(folder / "adapters"),
        "--max-loras", "2",
    ]
    with running_server(folder, *arguments) as server:
        yield server


def complete(server: LiveServer, model: str, max_tokens: int = 8) -> Any:
    body = {"model": model, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return server.post("/v1/completions", {**body, "return_token_ids": True})


def ids_of(server: LiveServer, model: str) -> list[int]:
    answer = complete(server, model)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def test_loaded_at_the_start_and_while_it_runs(server: LiveServer, wanted: dict[str, list[int]]):
    assert ids_of(server, "base") == wanted["base"] and ids_of(server, "base:a") == wanted["a"]
    assert complete(server, "b").status_code == 404
    loaded = server.post("/v1/load_lora_adapter", {"lora_name": "b", "lora_path": "b"})
    assert loaded.status_code == 200 and loaded.json()["adapter"]["rank"] == 4
    assert ids_of(server, "b") == wanted["b"] and ids_of(server, "a") == wanted["a"]
    assert [model["id"] for model in server.get("/v1/models").json()["data"]] == ["base", "a", "b"]
    listed = server.get("/v1/lora_adapters").json()["adapters"]
    assert [(one["name"], one["is_resident"]) for one in listed] == [("a", True), ("b", True)]
    metrics = server.get("/metrics").text
    assert "headrace_lora_adapters_loaded 2.0" in metrics and "headrace_lora_pool_slots_used 2.0" in metrics


def test_reload_in_place_and_unload_under_load(server: LiveServer, wanted: dict[str, list[int]]):
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda name=name: answers.append(complete(server, name, 100)))
        for name in ("a", "base", "b", "a")
    ]
    for thread in threads:
        thread.start()
    replaced = server.post("/v1/load_lora_adapter", {"lora_name": "b", "lora_path": "a", "load_inplace": True})
    assert replaced.status_code == 200, replaced.text
    assert ids_of(server, "b") == wanted["a"]
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "b"}).status_code == 200
    assert complete(server, "b").status_code == 404
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in answers] == [200] * 4
    assert server.post("/v1/load_lora_adapter", {"lora_name": "b", "lora_path": "b"}).status_code == 200
    assert ids_of(server, "b") == wanted["b"]


def test_a_wrong_adapter_costs_nobody_anything(server: LiveServer, folder: Path, wanted: dict[str, list[int]]):
    wrong = folder / "adapters" / "wrong"
    wrong.mkdir()
    (wrong / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 8, "use_qalora": true}')
    (wrong / "adapter_model.safetensors").write_bytes(b"\0" * 64)
    answer = server.post("/v1/load_lora_adapter", {"lora_name": "w", "lora_path": "wrong"})
    assert answer.status_code == 400 and "use_qalora" in answer.text
    (wrong / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 8}')
    answer = server.post("/v1/load_lora_adapter", {"lora_name": "w", "lora_path": "wrong"})
    assert answer.status_code == 400 and "safetensors" in answer.text and str(folder) not in answer.text
    assert ids_of(server, "a") == wanted["a"]


def test_a_restarted_engine_has_them_again(server: LiveServer, wanted: dict[str, list[int]]):
    pid = server.engine_pid()
    os.kill(pid, signal.SIGKILL)
    server.wait_replaced(pid)
    server.wait_until(lambda: complete(server, "b").status_code == 200, "the adapter that was loaded while it ran")
    assert ids_of(server, "a") == wanted["a"] and ids_of(server, "b") == wanted["b"]
