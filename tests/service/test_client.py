"""`EngineClient` over a real engine process: streams, aborts, failures, restarts, draining. The model is a fake."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import aclosing
from functools import partialmethod
from pathlib import Path

import psutil
import pytest
from fakes import PATIENCE_S, FakeExecutor, continuation

from headrace.base.config import EngineConfig, engine_config
from headrace.base.errors import EngineUnavailable, ModelError, RequestError
from headrace.base.sampling import SamplingParams
from headrace.service import supervisor
from headrace.service.client import replica
from headrace.service.client.client import EngineClient
from headrace.service.client.outputs import ChoiceDelta
from headrace.service.client.replica import Supervision
from headrace.service.client.stream import RequestStream
from headrace.service.spawn import SpawnedEngine
from headrace.service.supervisor import EngineProcess

SLOW = {"seed": 20}
"""A fake engine whose steps take 20 ms."""


def greedy(max_tokens: int = 8, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, detokenize=False, **more)


async def read(stream: RequestStream) -> list[ChoiceDelta]:
    return [delta async for delta in stream]


def ids(deltas: list[ChoiceDelta], index: int = 0) -> list[int]:
    return [t for d in deltas if d.index == index for t in d.token_ids]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition to hold."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


def name_of(process: psutil.Process) -> str | None:
    """What it runs; None of one that has ended."""
    try:
        return process.name() if process.is_running() and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


async def test_a_request_streams_to_its_end(start_client: Callable):
    client = await start_client()
    assert client.facts.model == "fake" and client.memory[0].name == "weights" and client.progress == ("ready", 1.0)
    stream = client.submit([1, 2, 3], greedy(12), request_id="mine")
    assert stream.request_id == "mine" and stream.prompt_token_ids == [1, 2, 3]
    deltas = await read(stream)
    assert ids(deltas) == continuation([1, 2, 3], 12)
    assert [d.finish_reason for d in deltas if d.finish_reason] == ["length"]
    assert client.num_inflight == 0


@pytest.mark.parametrize("depth", [1, 2])
async def test_two_hundred_streams_at_once(start_client: Callable, depth: int):
    client = await start_client(overlap_depth=depth)
    prompts = [[i % 200, i // 200, 5] for i in range(200)]
    results = await asyncio.gather(*(read(client.submit(p, greedy(3 + i % 9))) for i, p in enumerate(prompts)))
    for i, (prompt, deltas) in enumerate(zip(prompts, results, strict=True)):
        assert ids(deltas) == continuation(prompt, 3 + i % 9)
    assert client.num_inflight == 0
    await client.check()
    stats = await client.stats()
    assert stats.num_running == 0 and stats.requests_total == 201  # one is the engine's own first token


async def test_choices_are_merged_into_one_stream(start_client: Callable):
    client = await start_client()
    deltas = await read(client.submit([4, 5], SamplingParams(n=3, max_tokens=5, detokenize=False)))
    assert {d.index for d in deltas} == {0, 1, 2}
    for index in range(3):
        assert ids(deltas, index) == continuation([4, 5], 5)
        assert [d.finish_reason for d in deltas if d.index == index and d.finish_reason] == ["length"]


async def test_a_slow_reader_costs_one_delta_a_choice(start_client: Callable):
    client = await start_client()
    stream = client.submit([7], SamplingParams(n=2, max_tokens=100, detokenize=False))
    await until(lambda: client.num_inflight == 0)
    deltas = await read(stream)
    assert len(deltas) == 2
    assert ids(deltas, 0) == ids(deltas, 1) == continuation([7], 100)


async def test_bad_requests_are_refused_at_the_door(start_client: Callable):
    client = await start_client()
    for prompt, params in (
        ([], greedy()), ([9999], greedy()), ([1], greedy(0)), ([1] * 5000, greedy()), ("text", greedy())
    ):
        with pytest.raises(RequestError) as caught:
            client.submit(prompt, params)
        assert caught.value.param
    running = client.submit([1], greedy(), request_id="twice")
    with pytest.raises(RequestError, match="twice"):
        client.submit([1], greedy(), request_id="twice")
    assert ids(await read(running)) == continuation([1], 8)
    assert ids(await read(client.submit([2], greedy(), request_id="twice"))) == continuation([2], 8)


async def test_what_the_engine_refuses_is_the_first_delta(start_client: Callable):
    client = await start_client(max_running_requests=1, max_queued=1, **SLOW)
    streams = [client.submit([i], greedy(4)) for i in range(6)]
    results = [await read(s) for s in streams]
    refused = [r for r in results if r[0].error is not None]
    assert refused and all(len(r) == 1 and r[0].error.kind == "queue_full" and r[0].error.retry_after for r in refused)
    assert any(r[-1].finish_reason == "length" for r in results)


async def test_every_way_to_leave_a_stream_ends_the_request(start_client: Callable):
    client = await start_client(**SLOW)

    async def leave_by_break() -> None:
        async for _ in client.submit([1], greedy(4000)):
            break

    async def leave_by_aclosing() -> None:
        async with aclosing(aiter(client.submit([1], greedy(4000)))) as deltas:
            await anext(deltas)

    async def leave_by_error() -> None:
        with pytest.raises(ZeroDivisionError):
            async for _ in client.submit([1], greedy(4000)):
                raise ZeroDivisionError

    async def be_cancelled() -> None:
        task = asyncio.create_task(read(client.submit([1], greedy(4000))))
        while not (await client.stats()).num_running:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    for leave in (leave_by_break, leave_by_aclosing, leave_by_error, be_cancelled):
        await leave()
        await until(lambda: client.num_inflight == 0)
    stats = await client.stats()
    assert stats.num_running == 0 and stats.num_queued == 0 and stats.aborted_total == 4
    await client.check()


async def test_abort_gives_a_last_delta(start_client: Callable):
    client = await start_client(**SLOW)
    one = client.submit([1], greedy(4000), request_id="one")
    many = client.submit([2], SamplingParams(n=3, max_tokens=4000, detokenize=False))
    while not (await client.stats()).num_running:
        await asyncio.sleep(0.01)
    await client.abort("one")
    await client.abort("nobody")
    many.abort()
    assert (await read(one))[-1].finish_reason == "abort"
    assert [d.finish_reason for d in await read(many) if d.finish_reason] == ["abort"] * 3
    await until(lambda: client.num_inflight == 0)


@pytest.mark.parametrize("poison", [FakeExecutor.FAIL_LAUNCH, FakeExecutor.FAIL_RESULT])
async def test_a_failed_step_fails_its_requests_alone(start_client: Callable, poison: int):
    client = await start_client()
    pid = client.engine_pids[0]
    deltas = await read(client.submit([poison], greedy()))
    assert deltas[-1].finish_reason == "error" and deltas[-1].error.kind == "step_failed"
    assert ids(await read(client.submit([3], greedy()))) == continuation([3], 8)
    assert client.engine_pids[0] == pid and client.state == "ready"
    await client.check()


async def test_a_killed_engine_is_noticed_and_replaced(start_client: Callable):
    client = await start_client(**SLOW)
    readers = [asyncio.create_task(read(client.submit([i], greedy(4000)))) for i in range(50)]
    await until(lambda: client.last_stats.generation_tokens_total > 50)
    pid = client.engine_pids[0]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineUnavailable):
        await client.stats()
    results = await asyncio.wait_for(asyncio.gather(*readers), PATIENCE_S)
    for deltas in results:
        assert deltas[-1].finish_reason == "error" and deltas[-1].error.kind == "engine_unavailable"
        assert deltas[-1].error.retry_after
    assert any(ids(deltas) for deltas in results), "it died under load"
    assert client.num_inflight == 0 and client.state in ("restarting", "ready")
    if client.state == "restarting":
        with pytest.raises(EngineUnavailable, match="restarting"):
            client.submit([1], greedy())
    await asyncio.wait_for(client.wait_ready(), PATIENCE_S)
    assert client.engine_pids[0] != pid and client.num_restarts == 1
    assert ids(await read(client.submit([1, 2], greedy()))) == continuation([1, 2], 8)


async def test_a_hung_engine_is_noticed_and_replaced(start_client: Callable):
    client = await start_client(stall_timeout_s=3.0)
    pid = client.engine_pids[0]
    await asyncio.sleep(4.0)  # idle is not hung
    assert client.engine_pids[0] == pid and ids(await read(client.submit([3], greedy()))) == continuation([3], 8)
    deltas = await asyncio.wait_for(read(client.submit([FakeExecutor.HANG], greedy())), PATIENCE_S)
    assert deltas[-1].finish_reason == "error" and deltas[-1].error.kind == "engine_unavailable"
    assert "no sign of life for 3 s" in deltas[-1].error.message
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    await asyncio.wait_for(client.wait_ready(), PATIENCE_S)
    assert client.num_restarts == 1 and ids(await read(client.submit([3], greedy()))) == continuation([3], 8)


async def test_an_engine_of_short_steps_is_replaced_long_before_the_stall_timeout(
    start_client: Callable, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(supervisor, "LEAST_STALL_S", 1.0)
    client = await start_client(stall_timeout_s=PATIENCE_S)
    running, hung = client.submit([3], greedy(4000)), client.submit([FakeExecutor.HANG], greedy())
    for deltas in await asyncio.wait_for(asyncio.gather(read(running), read(hung)), PATIENCE_S / 2):
        assert deltas[-1].error.kind == "engine_unavailable" and deltas[-1].error.retry_after
        assert "no sign of life for" in deltas[-1].error.message
    assert client.state == "restarting", "what /ready says"
    await asyncio.wait_for(client.wait_ready(), PATIENCE_S)
    assert client.num_restarts == 1 and ids(await read(client.submit([3], greedy()))) == continuation([3], 8)


async def test_long_steps_and_loading_are_not_taken_for_hanging(start_client: Callable):
    client = await start_client(builder="fakes:build_slowly", stall_timeout_s=3.0, seed=400)
    deltas = await read(client.submit([3], greedy(3)))
    assert ids(deltas) == continuation([3], 3) and client.num_restarts == 0
    forever = await start_client(stall_timeout_s=0)
    hung = asyncio.create_task(read(forever.submit([FakeExecutor.HANG], greedy())))
    await asyncio.sleep(0.3)
    assert not hung.done()
    await forever.close()
    assert (await hung)[-1].error.kind == "engine_unavailable"


async def test_an_engine_that_ends_takes_its_compilers_with_it(
    start_client: Callable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(EngineProcess, "end", partialmethod(EngineProcess.end, grace_s=PATIENCE_S))
    client = await start_client(builder="fakes:build_beside_compilers")
    engine = psutil.Process(client.engine_pids[0])
    await until(lambda: [name_of(c) for c in engine.children(recursive=True)] == ["sleep"] * 2)
    compilers = engine.children(recursive=True)
    await client.close()
    assert "is killed" not in caplog.text, "it ends by itself"
    await until(lambda: all(name_of(c) is None for c in compilers))


async def test_restarts_are_counted_and_end(start_client: Callable):
    client = await start_client(max_restarts=1)
    for _ in range(2):
        await asyncio.wait_for(client.wait_ready(), PATIENCE_S)
        deltas = await read(client.submit([FakeExecutor.DIE], greedy()))
        assert deltas[-1].error.kind == "engine_unavailable" and "signal 9" in deltas[-1].error.message
    assert client.state == "stopped"
    with pytest.raises(EngineUnavailable):
        await client.wait_ready()
    with pytest.raises(EngineUnavailable, match="stopped"):
        client.submit([1], greedy())


@pytest.fixture
def no_descriptors() -> Iterator[Callable[[], None]]:
    """Takes all file descriptors of this process, until the end of the test."""
    limits, taken = resource.getrlimit(resource.RLIMIT_NOFILE), []

    def take_all() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds() + 40, limits[1]))
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(os.dup(0))

    yield take_all
    for descriptor in taken:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_an_engine_is_replaced_without_a_descriptor_left(start_client: Callable, no_descriptors: Callable):
    client = await start_client()
    no_descriptors()
    for count in (1, 2):
        await read(client.submit([FakeExecutor.DIE], greedy()))
        await asyncio.wait_for(client.wait_ready(), PATIENCE_S)
        assert client.num_restarts == count
    assert ids(await read(client.submit([3], greedy(3)))) == continuation([3], 3)


async def test_an_engine_that_died_has_no_requests_and_pages_and_counters_go_on(start_client: Callable):
    """Sums over replicas would else fall, which Prometheus takes for a restart of all of them."""
    client = await start_client()
    await read(client.submit([3], greedy(3)))
    before = await client.stats()
    assert client.last_stats.num_pages > 0 and before.requests_total == 2
    await read(client.submit([FakeExecutor.DIE], greedy()))
    died = client.last_stats
    assert client.state == "restarting" and died.num_pages == died.num_running == died.num_used_pages == 0
    assert died.requests_total in (2, 3) and died.generation_tokens_total == before.generation_tokens_total
    await until(lambda: client.state == "ready")
    assert ids(await read(client.submit([3], greedy(3)))) == continuation([3], 3)
    after = await client.stats()
    assert after.num_pages == before.num_pages and after.requests_total == died.requests_total + 2
    assert after.generation_tokens_total == 2 * before.generation_tokens_total


async def test_a_shortage_is_waited_for(start_client: Callable, monkeypatch: pytest.MonkeyPatch, caplog):
    client = await start_client(max_restarts=1)
    shortages, real = [errno.EMFILE, errno.ENOMEM], replica.spawn_engine

    def spawn(config: EngineConfig, builder: str) -> SpawnedEngine:
        if shortages:
            number = shortages.pop()
            raise OSError(number, os.strerror(number))
        return real(config, builder)

    def start(thread: threading.Thread, begin: Callable = threading.Thread.start) -> None:
        if thread.name == "engine-watch" and threads:
            raise RuntimeError(threads.pop())
        begin(thread)

    threads = ["can't start new thread"]
    monkeypatch.setattr(replica, "spawn_engine", spawn)
    monkeypatch.setattr(threading.Thread, "start", start)
    await read(client.submit([FakeExecutor.DIE], greedy()))
    assert client.state == "restarting"
    await asyncio.wait_for(client.wait_ready(), PATIENCE_S)
    assert not shortages and client.num_restarts == 1 and "Too many open files; next try in 1.0 s" in caplog.text
    assert not threads and "can't start new thread; next try in 2.0 s" in caplog.text
    assert ids(await read(client.submit([3], greedy(3)))) == continuation([3], 3)


async def test_an_engine_that_cannot_be_started_at_all_is_given_up(start_client: Callable, monkeypatch):
    client = await start_client()

    def spawn(*_: object) -> SpawnedEngine:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "python")

    monkeypatch.setattr(replica, "spawn_engine", spawn)
    await read(client.submit([FakeExecutor.DIE], greedy()))
    with pytest.raises(EngineUnavailable, match=r"cannot be started: .*python"):
        await asyncio.wait_for(client.wait_ready(), PATIENCE_S)
    assert client.state == "stopped"


@pytest.mark.parametrize(("builder", "error", "words"), [
    ("fakes:refuse_to_build", ModelError, "layer 3 is missing"),
    ("fakes:die_while_building", EngineUnavailable, r"died with signal 9 \(SIGKILL\)"),
])
async def test_an_engine_that_cannot_start_says_why(config_only: Path, builder: str, error: type, words: str):
    config = engine_config(model=str(config_only), skip_tokenizer=True)
    client = EngineClient(config, supervision=Supervision(builder=builder))
    await client.start()
    with pytest.raises(error, match=words):
        await asyncio.wait_for(client.wait_ready(), PATIENCE_S)
    assert client.state == "stopped"
    await client.close()


async def test_closing_drains(start_client: Callable):
    client = await start_client(**SLOW)
    short = asyncio.create_task(read(client.submit([1], greedy(3))))
    long = asyncio.create_task(read(client.submit([2], greedy(4000))))
    closing = asyncio.create_task(client.close(drain_s=3.0))
    await asyncio.sleep(0)
    assert client.state == "draining"
    with pytest.raises(EngineUnavailable, match="draining") as caught:
        client.submit([3], greedy())
    assert caught.value.retry_after
    assert ids(await short) == continuation([1], 3)
    assert (await long)[-1].error.kind == "engine_unavailable"
    await closing
    assert client.state == "stopped" and client.num_inflight == 0 and client.engine_pids[0] is None
    await client.close()


async def test_nothing_is_left_behind(start_client: Callable):
    client = await start_client()
    pid, num_open = client.engine_pids[0], psutil.Process().num_fds()
    await client.close()
    assert psutil.Process().num_fds() < num_open
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert len(asyncio.all_tasks()) == 1


PARENT = """
import asyncio, sys
from headrace.base.config import EngineConfig, engine_config
from headrace.service import supervisor
from headrace.service.client.client import EngineClient
from headrace.service.client import replica
from headrace.service.client.replica import Supervision

async def main():
    config = engine_config(model=sys.argv[1], skip_tokenizer=True, seed=5)
    client = EngineClient(config, supervision=Supervision(builder="fakes:build_fake_engine"))
    await client.start()
    await client.wait_ready()
    from headrace.base.sampling import SamplingParams
    stream = client.submit([1], SamplingParams(max_tokens=4000, detokenize=False))
    print(client.engine_pids[0], "torch" in sys.modules, flush=True)
    await asyncio.sleep(300)

asyncio.run(main())
"""


def test_the_engine_dies_with_its_parent_and_the_client_needs_no_torch(config_only: Path):
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    }
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(config_only)], stdout=subprocess.PIPE, text=True, env=environment
    )
    with parent:
        try:
            pid, has_torch = parent.stdout.readline().split()
            engine = psutil.Process(int(pid))
        finally:
            parent.kill()
    assert has_torch == "False"
    asyncio.run(until(lambda: name_of(engine) is None))  # it does not outlive its parent


@pytest.mark.skipif(sys.platform != "linux", reason="prctl(2)")
async def test_a_stopped_engine_ends_with_its_parent(config_only: Path):
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    # in a session of its own: the system continues what is stopped in a terminal's when that is left without a parent
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(config_only)], stdout=subprocess.PIPE, env=environment,
        start_new_session=True,
    )
    engine = psutil.Process(int((await asyncio.to_thread(parent.stdout.readline)).split()[0]))
    try:
        engine.suspend()
        await until(lambda: engine.status() == psutil.STATUS_STOPPED)
        parent.kill()
        parent.wait()
        async with asyncio.timeout(20):
            while name_of(engine) is not None:
                await asyncio.sleep(0.05)
    finally:
        parent.stdout.close()
        if engine.is_running():
            engine.kill()
