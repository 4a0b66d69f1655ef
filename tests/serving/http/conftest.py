"""Fixtures of the HTTP tests: a fake client and an application over it."""

from __future__ import annotations

from collections.abc import AsyncIterator

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
