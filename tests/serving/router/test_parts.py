"""Discovery, limits and the view of prompts, without sockets."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from serving.router.workers import Worker

from headrace.base.errors import ConfigError
from headrace.service.balancing import ReplicaState, RoutedRequest, create_policy
from headrace.serving.ray.gateway import Gateway
from headrace.serving.router import workers
from headrace.serving.router.discovery import WorkersFile, read_workers, split_name, watch_file, watch_name
from headrace.serving.router.fleet import Fleet
from headrace.serving.router.limits import MAX_CLIENTS, RateLimit, RateLimited
from headrace.serving.router.options import RouterOptions, WorkerOptions
from headrace.serving.router.prompt_view import EMPTY, pack_hint, text_of, view_prompt
from headrace.serving.router.server import serve_router
from headrace.serving.router.workers import Worker as FleetWorker


class NoEngines:
    """The handle of engines that are asked for nothing."""

    def options(self, **_: Any) -> NoEngines:
        return self


@pytest.mark.parametrize("end, status", [({"type": "http.disconnect"}, None), ({"body": b"x" * 999}, 413)])
async def test_rays_gateway_passes_no_incomplete_body_on(end: dict[str, Any], status: int | None):
    messages = [{"type": "http.request", "body": b'{"prompt": ', "more_body": True}, {"type": "http.request", **end}]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    await Gateway(NoEngines(), max_body_bytes=500).forward(scope, receive, send)
    assert [message["status"] for message in sent if "status" in message] == [status] * (status is not None)


def test_prompts_that_begin_alike_have_hints_that_do():
    turns = [{"role": "user", "content": "a question " * 20}]
    first = view_prompt(json.dumps({"model": "m", "temperature": 0.5, "messages": turns}).encode())
    turns += [{"role": "assistant", "content": "an answer"}, {"role": "user", "content": "more"}]
    second = view_prompt(json.dumps({"max_tokens": 3, "messages": turns, "model": "m", "user": "u"}).encode())
    shorter, longer = first.hint, second.hint
    assert longer.startswith(shorter[:-1]) and pack_hint(longer)[:40] == pack_hint(shorter)[:40]
    assert text_of(first.model) == "m" and text_of(first.prompt_cache_key) == ""


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b'"x"', b"\xff", b"[" * 100_000, b'{"model": 3, "prompt": {}}'])
def test_bodies_that_are_not_requests_are_passed_on(body: bytes):
    view = view_prompt(body)
    assert text_of(view.model) == "" and (view is EMPTY or view.hint == b"{}")


def test_a_bucket_fills_again():
    now = 0.0
    limit = RateLimit(2.0, 3, 0, clock=lambda: now)
    for _ in range(3):
        with limit.admit(("a",)):
            pass
    with pytest.raises(RateLimited) as refused, limit.admit(("a",)):
        pass
    assert refused.value.retry_after == pytest.approx(0.5)
    with limit.admit(("b",)):
        pass
    now = 0.5
    with limit.admit(("a",)):
        pass
    with pytest.raises(RateLimited), limit.admit(("a",)):
        pass


def test_clients_are_forgotten_but_not_their_running_requests():
    limit = RateLimit(0.0, 0, 1)
    with limit.admit(("running",)):
        for number in range(MAX_CLIENTS + 10):
            with limit.admit((str(number),)):
                pass
        assert len(limit._clients) <= MAX_CLIENTS + 1
        with pytest.raises(RateLimited), limit.admit(("running",)):
            pass


def test_few_conversations_move_when_a_worker_goes():
    policy = create_policy("consistent-hash")
    workers = [ReplicaState(i, name=f"http://w{i}:8000") for i in range(5)]
    requests = [RoutedRequest([], affinity=f"session {i}") for i in range(500)]
    before = [policy.choose(request, workers).replica for request in requests]
    after = [policy.choose(request, workers[:2] + workers[3:]).replica for request in requests]
    moved = [(b, a) for b, a in zip(before, after, strict=True) if a != b]
    assert moved and all(b == 2 for b, _ in moved)
    assert all(60 < before.count(worker.index) < 150 for worker in workers)
    again = [create_policy("consistent-hash").choose(request, workers[::-1]).replica for request in requests]
    assert again == before, "any router chooses alike, in any order"
    prompts = [RoutedRequest(list(range(i, i + 64))) for i in (0, 0, 7)]
    chosen = [policy.choose(prompt, workers).replica for prompt in prompts]
    assert chosen[0] == chosen[1]


async def test_a_file_of_workers_may_change(tmp_path: Path):
    file = tmp_path / "workers.txt"
    file.write_text("# the first\nhttp://127.0.0.1:1\n\n127.0.0.1:2/\n")
    assert read_workers(file) == ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    fleet = Fleet(WorkerOptions(), "round-robin")
    fleet.add("http://127.0.0.1:9")  # given by hand: stays
    watching = asyncio.create_task(watch_file(file, fleet))

    async def until(*ports: int) -> None:
        async with asyncio.timeout(10):
            while {worker.url for worker in fleet} != {f"http://127.0.0.1:{port}" for port in ports}:
                await asyncio.sleep(0.01)

    try:
        await until(1, 2, 9)
        changed = tmp_path / "new"
        changed.write_text("http://127.0.0.1:2\nhttp://127.0.0.1:3\nnot a url://\n")
        os.replace(changed, file)
        await until(2, 3, 9)
        file.unlink()  # while it is replaced: nothing changes
        await asyncio.sleep(1.2)
        await until(2, 3, 9)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await fleet.close()


def refuse(*_: object) -> None:
    raise OSError(errno.EMFILE, "Too many open files")


async def test_a_file_that_is_being_written_drains_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, fleet = tmp_path / "workers.txt", Fleet(WorkerOptions(), "round-robin")
    file, urls = WorkersFile(path, fleet), [f"http://127.0.0.1:{port}" for port in (1, 2, 3)]

    def write(*names: str) -> set[str]:
        path.write_text("".join(f"{name}\n" for name in names))
        file.poll()
        return {worker.url for worker in fleet}

    try:
        assert write(*urls[:2]) == set(urls[:2])
        assert write() == set(urls[:2]), "truncated"
        assert write(urls[0]) == set(urls[:2])
        assert write(urls[0], urls[2]) == set(urls)
        file.poll()
        assert {worker.url for worker in fleet} == {urls[0], urls[2]}
        write()
        file.poll()
        assert not len(fleet)
        with monkeypatch.context() as shortage:  # of descriptors, for the certificates of one with https
            shortage.setattr(fleet, "replace", refuse)
            write(urls[0])
        file.poll()
        assert len(fleet) == 1
    finally:
        await fleet.close()


async def test_a_worker_has_one_name():
    fleet = Fleet(WorkerOptions(), "round-robin")
    try:
        first = fleet.add("127.0.0.1:1")
        assert fleet.add(" http://127.0.0.1:1/ ") is first and len(fleet) == 1
        assert fleet.drain("127.0.0.1:1/") and len(fleet) == 0
        with pytest.raises(ConfigError, match="worker-api-key") as refused:  # `/ready` would tell it to anybody
            fleet.add("http://me:secret@127.0.0.1:1")
        assert "secret" not in refused.value.message
    finally:
        await fleet.close()


async def test_a_worker_drained_by_hand_stays_away_while_it_is_found():
    url, fleet = "http://127.0.0.1:1", Fleet(WorkerOptions(), "round-robin")
    try:
        fleet.replace([url], [])
        assert fleet.drain(url) and len(fleet) == 0
        fleet.replace([url], [url])
        assert len(fleet) == 0
        fleet.replace([], [url])
        fleet.replace([url], [])
        assert len(fleet) == 1, "it has gone and come again"
    finally:
        await fleet.close()


class Aborted:
    """Something that runs on a worker, and has ended when it is given up."""

    def __init__(self, fleet: Fleet, worker: FleetWorker):
        self._fleet, self._worker = fleet, worker
        worker.relays.add(self)

    def abort(self) -> None:
        self._worker.relays.discard(self)
        self._fleet.drop_if_drained(self._worker)


async def test_a_fleet_closes_while_workers_are_drained():
    fleet = Fleet(WorkerOptions(), "round-robin")
    added = [fleet.add(f"http://127.0.0.1:{port}") for port in (1, 2)]
    for worker in added:
        Aborted(fleet, worker)
        fleet.drain(worker.url)
    await fleet.close()
    assert not len(fleet) and not any(worker.relays for worker in added)


async def test_a_fleet_closes_in_the_moment_in_which_a_worker_is_lost():
    worker, fleet = Worker(), Fleet(WorkerOptions(), "round-robin")
    await worker.start()
    added = fleet.add(worker.url)
    async with asyncio.timeout(10):
        while not added.takes_requests:
            await asyncio.sleep(0.01)
        for _ in range(3):  # its task has waited by now
            await asyncio.sleep(0)
        added.was_lost.set()
        await asyncio.sleep(0)
        await fleet.close()
    await worker.stop()


async def test_requests_that_fail_together_are_one_reason_for_a_break(monkeypatch: pytest.MonkeyPatch):
    now, fleet = 100.0, Fleet(WorkerOptions(breaker_failures=5), "round-robin")
    monkeypatch.setattr(workers.time, "monotonic", lambda: now)
    try:
        worker = fleet.add("http://127.0.0.1:1")
        for _ in range(40):
            worker.note_outcome(failed=True)
        assert worker.breaker.open_until == now + workers.FIRST_BREAK_S
        now = worker.breaker.open_until
        worker.note_outcome(failed=True)  # of the one that finds out
        assert worker.breaker.open_until == now + 2 * workers.FIRST_BREAK_S
    finally:
        monkeypatch.undo()
        await fleet.close()


async def test_a_name_that_is_none_leaves_workers_as_they_are():
    fleet = Fleet(WorkerOptions(), "round-robin")
    watching = asyncio.create_task(watch_name("a..b:80", fleet))
    try:
        await asyncio.wait([watching], timeout=0.5)
        assert not watching.done()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await fleet.close()


async def test_a_name_is_resolved(monkeypatch: pytest.MonkeyPatch):
    worker = Worker()
    await worker.start()
    fleet = Fleet(WorkerOptions(health_interval_s=0.05), "round-robin")
    watching = asyncio.create_task(watch_name(f"localhost:{worker.port}", fleet))
    try:
        async with asyncio.timeout(10):
            while not fleet.is_ready:
                await asyncio.sleep(0.01)
        assert any(found.url == worker.url for found in fleet)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await fleet.close()
        await worker.stop()
    assert split_name("[::1]:80") == ("::1", 80)
    for name in ("host", "host:", ":80", "host:99999", "host:x"):
        with pytest.raises(ConfigError, match="NAME:PORT"):
            split_name(name)


def test_a_router_without_workers_says_how_to_name_them(tmp_path: Path):
    with pytest.raises(ConfigError, match="headrace router http://HOST:PORT"):
        serve_router([], RouterOptions(port=0), WorkerOptions())
    with pytest.raises(ConfigError, match="is no file"):
        serve_router([], RouterOptions(port=0), WorkerOptions(workers_file=str(tmp_path / "none")))
