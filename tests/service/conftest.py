"""Fixtures: a client over a real engine process that runs fakes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from fakes import BUILDER, PATIENCE_S

from headrace.base.config import engine_config
from headrace.service.client.client import EngineClient
from headrace.service.client.replica import Supervision


@pytest.fixture
def config_only(tmp_path: Path) -> Path:
    """A model folder of which the fakes read nothing."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Fake"]}))
    return tmp_path


@pytest.fixture
async def start_client(config_only: Path) -> AsyncIterator[Callable]:
    """Starts clients over fake engines, waits until they are ready, and closes them after the test."""
    clients: list[EngineClient] = []

    async def start(
        *, max_restarts: int = 5, builder: str = BUILDER, stall_timeout_s: float = 300.0, **options: object
    ) -> EngineClient:
        config = engine_config(model=str(config_only), skip_tokenizer=True, **options)
        client = EngineClient(config, supervision=Supervision(max_restarts, stall_timeout_s, builder))
        clients.append(client)
        await client.start()
        await asyncio.wait_for(client.wait_ready(), PATIENCE_S)
        return client

    yield start
    for client in clients:
        await client.close()
