"""A live server of a tiny vision-language model: answers equal to the offline engine's, hostile files, dead workers,
and text streams beside large images."""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import os
import re
import signal
import statistics
import sys
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from live import LiveServer, running_server

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "service"))
from tiny_vision import write_qwen

pillow = pytest.importorskip("PIL.Image")


def uri(image=None, data: bytes = b"", kind: str = "PNG") -> str:
    if image is not None:
        buffer = io.BytesIO()
        image.save(buffer, kind)
        data = buffer.getvalue()
    return "data:image/png;base64," + base64.b64encode(data).decode()


def noise(width: int, height: int, seed: int = 0):
    return pillow.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def chat(*urls: str, words: str = "what?", **fields) -> dict:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls] + [{"type": "text", "text": words}]
    return {
        "model": "default", "messages": [{"role": "user", "content": parts}], "temperature": 0, "max_tokens": 6,
        "ignore_eos": True, "return_token_ids": True, **fields
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_qwen(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    options = (
        "--model", str(folder), "--dtype", "float32", "--kv-pages", "256", "--media-workers", "1",
        "--media-timeout-s", "15", "--media-max-megapixels", "16"
    )
    with running_server(tmp_path_factory.mktemp("live"), *options) as server:
        yield server


def ask(server: LiveServer, body: dict) -> list[int]:
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def workers(server: LiveServer) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(server.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie among them, which has no command line
            found += [child] * ("headrace.service.media.worker" in child.cmdline())
    return found


def test_answers_are_those_of_the_offline_engine(server, folder):
    from headrace import LLM, SamplingParams

    cases = [[noise(90, 60)], [noise(200, 130, 1), noise(90, 60)], [noise(90, 60)]]
    ours = [ask(server, chat(*map(uri, images))) for images in cases]
    with LLM(str(folder), device="cpu", dtype="float32", threads=1, kv_pages=128) as llm:
        conversations = [
            [{"role": "user", "content": [{"type": "image", "image": i} for i in images]
              + [{"type": "text", "text": "what?"}]}]
            for images in cases
        ]
        outputs = llm.chat(conversations, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    assert ours == [output.outputs[0].token_ids for output in outputs]


def test_usage_and_streams(server):
    body = chat(uri(noise(90, 60)), stream=True, stream_options={"include_usage": True})
    with httpx.stream("POST", server.url + "/v1/chat/completions", json=body, timeout=60) as answer:
        text = "".join(answer.iter_text())
    assert '"image_tokens":6' in text and text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("url, message", [
    (uri(data=b"junk"), "no image"), (uri(noise(64, 64))[:200], "broken|no image|base64"),
    (uri(pillow.new("L", (4500, 4500))), "16 million pixels"), (uri(pillow.new("1", (60_000, 1))), "200 times"),
    ("http://169.254.169.254/latest/meta-data", "not public"), ("file:///etc/passwd", "--allowed-local-media-path"),
])
def test_hostile_images(server, url, message):
    answer = server.post("/v1/chat/completions", chat(uri(noise(90, 60)), url))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert re.search(message, error["message"]) and error["param"] == "messages[0].content[1].image_url.url"
    assert ask(server, chat(uri(noise(90, 60))))


def test_a_dead_worker_is_replaced(server):
    before = ask(server, chat(uri(noise(90, 60, 7))))
    (worker,) = workers(server)
    os.kill(worker.pid, signal.SIGKILL)
    server.wait_until(lambda: not workers(server), "the worker's end")
    assert ask(server, chat(uri(noise(90, 62, 8))))
    assert workers(server)[0].pid != worker.pid
    assert ask(server, chat(uri(noise(90, 60, 7)))) == before


def test_texts_go_on_beside_large_images(server):
    """Reported for a CPU, where the model itself takes the cores: no gap may be as long as decoding an image."""
    image = uri(noise(1700, 1600))  # about 8 MB
    assert len(image) > 8_000_000
    stop, sent = threading.Event(), []

    def send_images() -> None:
        while not stop.is_set():
            sent.append(server.post("/v1/chat/completions", chat(image, max_tokens=1)).status_code)

    def gaps() -> list[float]:
        body = {"prompt": "a", "max_tokens": 60, "ignore_eos": True, "stream": True, "model": "default"}
        times = []
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=120) as answer:
            for piece in answer.iter_raw():
                times += [time.perf_counter()] * bool(piece)
        return [after - before for before, after in itertools.pairwise(times)]

    alone = gaps()
    thread = threading.Thread(target=send_images)
    thread.start()
    try:
        beside = gaps() + gaps()
    finally:
        stop.set()
        thread.join()
    assert sent and set(sent) == {200}
    print(f"gaps of a text stream in ms: alone {1e3 * statistics.median(alone):.1f}, p99 {1e3 * max(alone):.1f}; "
          f"beside 8 MB images {1e3 * statistics.median(beside):.1f}, largest {1e3 * max(beside):.1f}")
    assert max(beside) < 5


def test_workers_end_with_the_server(folder, tmp_path):
    with running_server(tmp_path, "--model", str(folder), "--dtype", "float32", "--kv-pages", "64") as server:
        found = workers(server)
        assert found, "they load the processor before the first request"
    _, alive = psutil.wait_procs(found, timeout=10)
    assert not alive
