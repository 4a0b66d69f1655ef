"""Fixtures of the HTTP tests: a fake client and an application over it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from fake_apps import http_for, httpx
from fake_client import FakeClient


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
async def http(client: FakeClient) -> AsyncIterator[httpx.AsyncClient]:
    async with http_for(client) as http:
        yield http


@pytest.fixture
async def server(client: FakeClient) -> AsyncIterator[httpx.AsyncClient]:
    """An application that tells reasoning from the rest, for the libraries of others."""
    async with http_for(client, reasoning_parser="qwen3") as http:
        yield http


@pytest.fixture
async def api(server: httpx.AsyncClient) -> Any:
    """OpenAI's own client of it."""
    openai = pytest.importorskip("openai")
    return openai.AsyncOpenAI(base_url="http://server/v1", api_key="none", http_client=server, max_retries=0)
