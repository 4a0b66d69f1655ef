"""The OpenAPI document against the application: schemathesis makes up requests and checks the answers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from headrace.serving.http.app import ENDPOINTS

CASES = Path(__file__).with_name("described_answers.py")


@pytest.fixture
async def document(http: httpx.AsyncClient) -> dict:
    return (await http.get("/openapi.json")).json()


@pytest.mark.timeout(900)  # 13,000 requests
def test_answers_conform(pytestconfig: pytest.Config):
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "--noconftest", str(CASES)]
    # requests looks through the environment for proxies each time
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
    ended = subprocess.run(command, cwd=pytestconfig.rootpath, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_every_route_is_described(document: dict):
    assert {p.replace(":path}", "}") for p in (e.path for e in ENDPOINTS)} == set(document["paths"])
    schema = document["components"]["schemas"]["ChatRequest"]
    assert schema["properties"]["top_p"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 1}
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize("name", ["ChatRequest", "CompletionRequest", "GenerateRequest"])
def test_documented_fields_are_decoded_ones(document: dict, name: str):
    records = {e.body.record.__name__: e.body.record for e in ENDPOINTS if e.body}
    assert set(document["components"]["schemas"][name]["properties"]) == set(records[name].__struct_fields__)
