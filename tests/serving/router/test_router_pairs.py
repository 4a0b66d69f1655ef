"""Prefill and decode workers behind a router: both get each request, with one room."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from workers import Asked, Running, Worker, chunk, events, reply, routing

from headrace.base.errors import ConfigError
from headrace.serving.router.options import RouterOptions, WorkerOptions
from headrace.serving.router.pairing import name_room
from headrace.serving.router.server import serve_router

BODY = {"model": "m", "prompt": "The mill wheel", "max_tokens": 3}


def answer(text: str):
    return lambda asked: reply(200, {"text": text})


@asynccontextmanager
async def pairing(prefill: Worker, *decodes: Worker) -> AsyncIterator[Running]:
    async with routing(*decodes, prefill=[prefill]) as router:
        yield router


def fields(worker: Worker, at: int = -1) -> dict:
    found = json.loads([a.body for a in worker.asked if a.method == "POST"][at])
    return {name: value for name, value in found.items() if value is not None}


async def test_both_workers_get_the_request_with_one_room():
    prefill, decode = Worker("prefill", answer=answer("p")), Worker("decode", answer=answer("d"))
    async with pairing(prefill, decode) as router:
        responses = [await router.client.send("POST", "/v1/completions", json.dumps(BODY).encode()) for _ in range(2)]
        await router.until(lambda: len([a for a in prefill.asked if a.method == "POST"]) == 2)
    assert [json.loads(response.body)["text"] for response in responses] == ["d", "d"]
    rooms = set()
    for at in range(2):
        sent, got = fields(prefill, at), fields(decode, at)
        assert sent == got and {name: got[name] for name in BODY} == BODY
        assert got["bootstrap_host"] == "127.0.0.1" and got["bootstrap_port"] == 8998
        rooms.add(got["bootstrap_room"])
    assert len(rooms) == 2


@pytest.mark.parametrize(("status", "port"), [(200, 9001), (401, 8998), (404, 8998)])
async def test_a_prefill_worker_is_asked_for_its_port_until_it_answers(
    status: int, port: int, caplog: pytest.LogCaptureFixture
):
    lost: list[None] = [None] * 2

    def tell(asked: Asked) -> bytes | None:
        return lost.pop() if lost else reply(status, {"disaggregation_bootstrap_port": 9001})

    async with pairing(Worker("prefill", answer=tell), Worker("decode")) as router:
        worker = router.router.all_workers()[0]
        await router.until(lambda: worker.bootstrap_port == port)
    assert not lost and ("give --worker-api-key" in caplog.text) == (status == 401)


async def test_streams_come_from_the_decode_worker():
    prefill = Worker("prefill", answer=lambda asked: events("first"))
    decode = Worker("decode", answer=lambda asked: events("a", "b"))
    async with pairing(prefill, decode) as router:
        response = await router.client.send("POST", "/generate", b'{"text": "x", "stream": true}')
    assert b"data: a" in response.body and b"first" not in response.body


async def test_other_routes_are_answered_by_decode_workers_alone():
    prefill, decode = Worker("prefill", answer=answer("p")), Worker("decode", answer=answer("d"))
    async with pairing(prefill, decode) as router:
        await router.client.send("POST", "/v1/embeddings", b'{"input": "x"}')
    assert not [a for a in prefill.asked if a.method == "POST"]
    assert fields(decode) == {"input": "x"}


async def test_without_a_prefill_worker_decode_workers_compute_the_prompt():
    prefill, decode = Worker("prefill", status=503), Worker("decode", answer=answer("d"))
    async with pairing(prefill, decode) as router:
        response = await router.client.send("POST", "/v1/completions", json.dumps(BODY).encode())
    assert response.status == 200 and fields(decode) == BODY


@pytest.mark.parametrize("awaits_prefill", [False, True])
async def test_ready_waits_once_for_a_prefill_worker_that_is_on_its_way(awaits_prefill: bool):
    prefill, decode = Worker("prefill", status=503), Worker("decode", answer=answer("d"))
    async with routing(decode, prefill=[prefill], awaits_prefill=awaits_prefill) as router:
        async def status() -> int:
            return (await router.client.send("GET", "/ready")).status

        assert await status() == (503 if awaits_prefill else 200)
        assert (await router.client.send("POST", "/v1/completions", json.dumps(BODY).encode())).status == 200
        for prefill.status in (200, 503):
            (own,) = (worker for worker in router.router.all_workers() if worker.is_prefill)
            await router.until(lambda: own.takes_requests == (prefill.status == 200))  # noqa: B023
            assert await status() == 200


@pytest.mark.parametrize("status", [200, 503])
async def test_clients_cannot_say_where_pages_come_from(status: int):
    own = {"bootstrap_host": "evil", "bootstrap_port": 1, "bootstrap_room": 2}
    own |= {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "evil", "remote_request_id": "3"}}
    prefill, decode = Worker("prefill", status=status, answer=answer("p")), Worker("decode", answer=answer("d"))
    async with pairing(prefill, decode) as router:
        response = await router.client.send("POST", "/v1/completions", json.dumps(BODY | own).encode())
    assert response.status == 200 and "kv_transfer_params" not in fields(decode)
    assert fields(decode).get("bootstrap_host") == ("127.0.0.1" if status == 200 else None)
    assert ("bootstrap_room" in fields(decode)) == (status == 200)


async def test_a_prefill_worker_that_breaks_off_costs_nothing():
    prefill, decode = Worker("prefill", answer=lambda asked: None), Worker("decode", answer=answer("d"))
    async with pairing(prefill, decode) as router:
        response = await router.client.send("POST", "/v1/completions", json.dumps(BODY).encode())
        assert response.status == 200
        await router.until(lambda: not any(worker.relays for worker in router.router.all_workers()))


async def test_a_client_that_leaves_ends_both_requests():
    hold = asyncio.Event()
    prefill = Worker("prefill", answer=lambda asked: [hold])
    decode = Worker("decode", answer=lambda asked: [hold, chunk(b"x")])
    async with pairing(prefill, decode) as router:
        with pytest.raises(TimeoutError):
            await router.client.send("POST", "/v1/completions", json.dumps(BODY).encode(), timeout_s=0.5)
        await router.until(lambda: not any(worker.relays for worker in router.router.all_workers()))
        hold.set()


async def test_a_prompt_whose_decode_worker_refuses_is_given_up():
    hold = asyncio.Event()
    prefill = Worker("prefill", answer=lambda asked: [hold])
    decode = Worker("decode", answer=lambda asked: reply(429, {}))
    async with pairing(prefill, decode) as router:
        response = await router.client.send("POST", "/v1/completions", json.dumps(BODY).encode())
        assert response.status == 429
        await router.until(lambda: not any(worker.relays for worker in router.router.all_workers()))
        hold.set()


async def test_an_abort_goes_to_prefill_workers_too():
    prefill, decode = Worker("prefill"), Worker("decode")
    async with pairing(prefill, decode) as router:
        await router.client.send("POST", "/abort_request", b'{"rid": "1"}')
    assert fields(prefill) == fields(decode) == {"rid": "1"}


async def test_workers_are_listed_with_their_roles_and_counted():
    prefill, decode = Worker("prefill", answer=answer("p")), Worker("decode", answer=answer("d"))
    async with pairing(prefill, decode) as router:
        listed = json.loads((await router.client.send("GET", "/workers")).body)["workers"]
        assert [(worker["role"], worker["url"]) for worker in listed] == [
            ("prefill", prefill.url), ("decode", decode.url)
        ]
        metrics = (await router.client.send("GET", "/metrics")).body.decode()
        assert f'headrace_router_worker_up{{worker="{prefill.url}"}} 1.0' in metrics


def test_rooms_are_added_to_any_object():
    for body in (b"{}", b' { "a" : 1 } \n', b'{"a":{}}'):
        found = json.loads(name_room(body, "h", 5))
        assert found["bootstrap_host"] == "h" and found["bootstrap_port"] == 5 and found["bootstrap_room"] >= 0
        assert {k: v for k, v in found.items() if not k.startswith("bootstrap")} == json.loads(body)


@pytest.mark.parametrize("workers", [{"prefill": ["http://a"]}, {"decode": ["http://a"]}])
def test_one_role_alone_is_refused(workers):
    with pytest.raises(ConfigError, match="a server of each mode"):
        serve_router([], RouterOptions(port=0), WorkerOptions(**workers))
