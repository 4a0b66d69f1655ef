"""Who counts as one client: API keys, addresses, and what trusted proxies say."""

from __future__ import annotations

import pytest
from fake_apps import http_for, httpx
from fake_client import FakeClient

from headrace.base.errors import ConfigError
from headrace.base.server_config import ServerConfig
from headrace.serving.http.app import create_app

BODY = {"prompt": [1, 2], "max_tokens": 1}


async def origins(client: FakeClient, *headers: dict[str, str], address: str = "10.1.2.3", **options) -> list[tuple]:
    """The origins of one request with each of the headers, without the last part, which is the request's own."""
    app = create_app(client, ServerConfig(**options))
    transport = httpx.ASGITransport(app=app, client=(address, 4321))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        for each in headers:
            assert (await http.post("/v1/completions", json=BODY, headers=each)).status_code == 200
    return [origin[:-1] for origin in client.origins]


async def test_prompts_of_one_body_are_one_request_of_one_client(client: FakeClient):
    async with http_for(client) as http:
        await http.post("/v1/completions", json={"prompt": [[1], [2]], "max_tokens": 1})
        await http.post("/v1/completions", json=BODY)
    first, second, third = client.origins
    assert first == second and first[:-1] == third[:-1] and first[-1] != third[-1]


async def test_a_key_that_is_checked_is_the_client_wherever_it_comes_from(client: FakeClient):
    key = {"authorization": "Bearer secret"}
    first = await origins(client, key, {"x-api-key": "secret"}, api_key="secret")
    second = await origins(client, key, address="10.9.9.9", api_key="secret")
    assert len(set(first + second)) == 1 and "secret" not in str(client.origins)


async def test_keys_that_nobody_checks_share_what_their_address_gets(client: FakeClient):
    plain, one, two = await origins(client, {}, {"authorization": "Bearer one"}, {"x-api-key": "two"})
    assert plain == ("10.1.2.3",) and one[0] == two[0] == "10.1.2.3" and len({plain, one, two}) == 3


@pytest.mark.parametrize(("address", "client_id"), [
    ("192.0.2.7", "192.0.2.7"), ("::ffff:192.0.2.7", "192.0.2.7"), ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
])
async def test_addresses_that_one_machine_may_use_are_one_client(client: FakeClient, address: str, client_id: str):
    assert await origins(client, {}, address=address) == [(client_id,)]


@pytest.mark.parametrize(("proxies", "address", "forwarded", "client_id"), [
    ("", "127.0.0.1", "192.0.2.1", "127.0.0.1"),
    ("127.0.0.1", "127.0.0.1", "192.0.2.1", "192.0.2.1"),
    ("127.0.0.1", "127.0.0.1", "6.6.6.6, 192.0.2.1", "192.0.2.1"),
    ("10.0.0.0/8, 127.0.0.1", "127.0.0.1", "6.6.6.6, 192.0.2.1, 10.3.3.3", "192.0.2.1"),
    ("10.0.0.0/8", "192.0.2.9", "6.6.6.6", "192.0.2.9"),
])
async def test_only_trusted_proxies_name_the_client(client: FakeClient, proxies, address, forwarded, client_id):
    found = await origins(client, {"x-forwarded-for": forwarded}, address=address, trusted_proxies=proxies)
    assert found == [(client_id,)]


def test_a_proxy_that_is_no_address_is_named(client: FakeClient):
    with pytest.raises(ConfigError, match=r"trusted_proxies must be addresses .*'proxy\.local'"):
        create_app(client, ServerConfig(trusted_proxies="10.0.0.1, proxy.local"))
