"""Workers of ranked engines: the ring, the order of commands, and what a dead, failed or stopped rank does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from cycles import FakeGroups, run_cycles
from fakes import PATIENCE_S, Boom, FakeExecutor, continuation, engine_over, start_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.config import EngineConfig, engine_config
from headrace.base.errors import EngineBroken, EngineUnavailable, HeadraceError, ModelError, WeightError
from headrace.base.messages import EngineRequest, Place
from headrace.base.sampling import SamplingSpec, StopSpec
from headrace.service.ranks import worker
from headrace.service.ranks.commands import Reset
from headrace.service.ranks.heartbeats import SILENCE_S, Heartbeats, Silence
from headrace.service.ranks.launch import LocalHost, LocalLauncher
from headrace.service.ranks.ring import RingPlace, RingReader, RingWriter
from headrace.service.ranks.workers import Workers


def ring_reader(writer: RingWriter, reader: int = 0) -> RingReader:
    """In this process, with descriptors of its own."""
    place = writer.place(reader)
    return RingReader(
        RingPlace(os.dup(place.memory), os.dup(place.waker), reader, place.num_readers, place.capacity)
    )


@given(
    sizes=st.lists(st.integers(0, 700), max_size=40), capacity=st.sampled_from([128, 160, 512, 4096]),
    num_readers=st.integers(1, 3), slow=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_every_reader_gets_every_message(sizes: list[int], capacity: int, num_readers: int, slow: bool):
    """Of any size, also several rings long, in order, with the ring wrapping around under readers of other speeds."""
    writer = RingWriter(num_readers, capacity)
    messages = [bytes((index + i * 7) % 256 for i in range(size)) for index, size in enumerate(sizes)]
    received: list[list[bytes | None]] = [[] for _ in range(num_readers)]
    readers = [ring_reader(writer, index) for index in range(num_readers)]

    def read(index: int) -> None:
        for place in range(len(messages)):
            if slow and index == 0 and place % 8 == 3:
                time.sleep(0.003)
            received[index].append(readers[index].receive(PATIENCE_S))

    threads = [threading.Thread(target=read, args=(index,)) for index in range(num_readers)]
    for thread in threads:
        thread.start()
    for message in messages:
        writer.write(message, timeout_s=PATIENCE_S)
    for thread in threads:
        thread.join()
    assert received == [messages] * num_readers
    assert [reader.receive(0.0) for reader in readers] == [None] * num_readers
    for end in (*readers, writer):
        end.close()


def test_a_writer_waits_for_the_slowest_reader_no_longer_than_told():
    writer, num_checks = RingWriter(2, 128), 0
    quick, dead = ring_reader(writer, 0), ring_reader(writer, 1)

    def check() -> None:
        nonlocal num_checks
        num_checks += 1

    for _ in range(4):
        writer.write(b"x" * 20)
        assert quick.receive(1.0) == b"x" * 20
    with pytest.raises(EngineUnavailable, match="has read no command"):
        writer.write(b"x" * 20, check, timeout_s=0.2)
    assert num_checks > 5

    def refuse() -> None:
        raise Boom("rank 1 is dead")

    with pytest.raises(Boom):
        writer.write(b"x" * 20, refuse)
    assert [dead.receive(0.0) for _ in range(5)] == [b"x" * 20] * 4 + [None]
    for end in (quick, dead, writer):
        end.close()


def test_a_sleeping_reader_is_woken():
    """At once by its eventfd, and by itself where the wake-up is lost."""
    writer = RingWriter(1)
    reader, arrivals = ring_reader(writer), queue.SimpleQueue[float]()

    def read() -> None:
        while reader.receive(PATIENCE_S):
            arrivals.put(time.monotonic())

    thread = threading.Thread(target=read)
    thread.start()
    delays = []
    for _ in range(20):
        time.sleep(0.02)  # far longer than it polls
        began = time.monotonic()
        writer.write(b"wake up")
        delays.append(arrivals.get(timeout=PATIENCE_S) - began)
    assert sorted(delays)[10] < 0.005, delays
    writer._wakers, wakers = [], writer._wakers
    writer.write(b"lost wake-up")
    assert arrivals.get(timeout=PATIENCE_S)
    writer._wakers = wakers
    writer.write(b"")
    thread.join()
    reader.close()
    writer.close()


def test_a_frame_that_is_not_all_visible_yet_is_not_taken():
    writer = RingWriter(1, 4096)
    reader = ring_reader(writer)
    writer.write(b"first words")
    broken = writer._map.data[8]
    writer._map.data[8] = broken ^ 1
    threading.Timer(0.1, lambda: writer._map.data.__setitem__(8, broken)).start()
    assert reader.receive(1.0) == b"first words"
    writer.write(b"second words")
    writer._map.data[32] ^= 1
    with pytest.raises(RuntimeError, match="broken"):
        reader.receive(1.0)
    reader.close()
    writer.close()


def test_silence_counts_looks_and_not_time():
    silence = Silence(0.2, limit_s=1.0)
    assert not any(silence.note(count) for count in range(10))
    assert [silence.note(9) for _ in range(5)] == [False] * 4 + [True]
    assert not silence.note(10)
    beats = Heartbeats(3)
    beats.start(2, beat_s=0.005)
    deadline = time.monotonic() + PATIENCE_S
    while not beats.count(2) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert beats.count(2) and not beats.count(0) and not beats.count(1)
    beats.close()


def ranked_config(folder: Path, size: int = 3, **options: object) -> EngineConfig:
    return engine_config(model=str(folder), skip_tokenizer=True, tensor_parallel_size=size, **options)


def run(engine, prompt: list[int], count: int) -> list[int]:
    engine.submit(EngineRequest("r", prompt, SamplingSpec(), StopSpec(max_tokens=count)))
    tokens: list[int] = []
    while engine.has_work:
        for output in engine.step():
            assert output.finish is None or output.finish.error is None
            tokens += output.token_ids
    return tokens


def test_all_ranks_carry_out_the_same_commands(config_only: Path):
    _, executor = start_ranks(ranked_config(config_only))
    engine = engine_over(executor)
    prompt = list(range(100)) * 20
    assert run(engine, prompt, 5) == continuation(prompt, 5)
    while executor.use_idle_moment():
        pass
    assert not executor.use_idle_moment()  # sends nothing
    engine.drain()
    executor.release_memory(["kv_cache", "weights"], discards_weights=True)
    assert executor.released == {"kv_cache", "weights"}
    executor.acquire_memory(["kv_cache", "weights"])
    executor.replace_weights("7", "dummy")
    with pytest.raises(WeightError, match="does not fit"):
        executor.replace_weights("all", "auto")  # all ranks still have the old ones
    assert run(engine, prompt, 3)
    executor.close()
    own, *others = [(config_only / f"rank-{rank}").read_text().splitlines() for rank in range(3)]
    assert own == others[0] == others[1]
    kinds = [line.split()[0] for line in own]
    assert kinds.count("idle") == 3 and kinds[-1] == "close" and kinds.count("execute") >= 8


def test_ranks_that_end_in_different_states_break_the_engine(config_only: Path):
    _, executor = start_ranks(ranked_config(config_only))
    for model in ("0", "2"):
        with pytest.raises(EngineBroken, match=f"rank {model}: the checkpoint does not fit"):
            executor.replace_weights(model, "auto")
    executor.close()


@pytest.mark.parametrize("poison", [FakeExecutor.FAIL_LAUNCH, FakeExecutor.FAIL_RESULT])
def test_failed_steps_are_not_contained(config_only: Path, poison: int):
    failures = queue.SimpleQueue[HeadraceError]()
    _, executor = start_ranks(ranked_config(config_only, 2), on_failure=failures.put)
    with pytest.raises(EngineBroken):
        run(engine_over(executor), [1, poison], 4)
    if poison == FakeExecutor.FAIL_LAUNCH:
        error = failures.get(timeout=PATIENCE_S)
        assert isinstance(error, EngineBroken) and "rank 1 (pid" in error.message and "launch failed" in error.message
    executor.close()


def test_a_rank_that_comes_too_late_breaks_the_engine(config_only: Path):
    """Whoever notices: rank 0 does not report what it computed without the other, and a worker ends."""
    failures = queue.SimpleQueue[HeadraceError]()
    workers, executor = start_ranks(ranked_config(config_only, 2), on_failure=failures.put)
    engine = engine_over(executor)
    assert run(engine, [1, 2, 3], 2) == continuation([1, 2, 3], 2)
    with pytest.raises(EngineBroken, match="rank 1 waited in vain for rank 0"):
        run(engine, [1, FakeExecutor.LATE], 4)
    error = failures.get(timeout=PATIENCE_S)
    assert isinstance(error, EngineBroken) and "rank 1 (pid" in error.message and "waited in vain" in error.message
    with pytest.raises(EngineBroken):
        workers.send(Reset())
    executor.close()


@pytest.mark.parametrize(
    ("revision", "kind", "text"),
    [
        ("dies", ModelError, r"rank 1 \(pid \d+\) died with signal 9 \(SIGKILL\).* while drawing fakes"),
        ("raises", WeightError, "a tensor is missing"), ("breaks", HeadraceError, "Boom: no such kernel"),
    ],
)
def test_a_start_that_fails_says_why(config_only: Path, revision: str, kind: type[HeadraceError], text: str):
    failures: list[HeadraceError] = []
    with pytest.raises(HeadraceError, match=text) as caught:
        start_ranks(ranked_config(config_only, revision=revision), on_failure=failures.append)
    assert failures == [caught.value]
    # errors cross processes by their kind: the class is that which defines it
    assert caught.value.kind == kind.kind


def test_a_rank_that_is_stopped_while_it_starts_is_killed(config_only: Path):
    failures, config = queue.SimpleQueue[HeadraceError](), ranked_config(config_only, 2, revision="stops")
    workers = Workers(config, 2, LocalLauncher(config, 2, "fakes:build_fake_rank"), on_failure=failures.put)
    process = next(c for c in psutil.Process().children() if "headrace.service.ranks.worker" in c.cmdline())
    workers.assign(1)
    deadline = time.monotonic() + PATIENCE_S
    while process.status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
        time.sleep(0.02)
    workers._workers[0].silence.limit_s = 0.5
    with pytest.raises(ModelError, match=r"rank 1 \(pid \d+\) gives no sign of life while drawing fakes"):
        workers.await_ready()
    workers.close()
    assert failures.get(timeout=0.0) is workers.failure and not process.is_running()


def test_a_parent_that_stands_still_while_a_rank_starts_ends_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    beats, left = Heartbeats(2), threading.Event()
    monkeypatch.setattr(worker, "START_SILENCE_S", 0.4)
    monkeypatch.setattr(worker, "leave", lambda _: left.set())
    worker.watch_parent(beats, os.getppid(), kills=False)
    assert left.wait(PATIENCE_S) and "the agent of this host" in caplog.text
    beats.close()


def test_a_killed_worker_is_noticed_within_a_second(config_only: Path):
    failures = queue.SimpleQueue[HeadraceError]()
    workers, executor = start_ranks(ranked_config(config_only), on_failure=failures.put)
    run(engine_over(executor), [1, 2, 3], 2)
    pid = next(c.pid for c in psutil.Process().children() if "headrace.service.ranks.worker" in c.cmdline())
    os.kill(pid, signal.SIGKILL)
    error = failures.get(timeout=1.0)
    assert f"(pid {pid}) died with signal 9 (SIGKILL) while carrying out Execute; the engine restarts" in error.message
    with pytest.raises(EngineBroken):
        for _ in range(1000):
            executor.reset()
    assert workers.failure is error
    executor.close()
    assert failures.empty()


def test_a_rank_that_fails_alone_ends_the_engine_within_a_second(config_only: Path, monkeypatch: pytest.MonkeyPatch):
    """Rank 0 waits for it in a collective meanwhile."""
    failures, ends = queue.SimpleQueue[HeadraceError](), threading.Event()
    _, executor = start_ranks(ranked_config(config_only, 2), on_failure=failures.put)
    monkeypatch.setattr(executor._executor, "execute", lambda plan: ends.wait(PATIENCE_S))
    engine = engine_over(executor)
    engine.submit(EngineRequest("r", [1, FakeExecutor.FAIL_LAUNCH], SamplingSpec(), StopSpec(max_tokens=4)))

    def step() -> None:
        with contextlib.suppress(EngineBroken, AttributeError):  # once it is released, with no result
            engine.step()

    thread = threading.Thread(target=step)
    thread.start()
    error = failures.get(timeout=1.5)
    assert isinstance(error, EngineBroken) and "rank 1 (pid" in error.message and "launch failed" in error.message
    ends.set()
    thread.join()
    executor.close()


def test_a_device_that_fails_after_a_launch_ends_the_engine(config_only: Path):
    """Although rank 0 sends no further command."""
    failures = queue.SimpleQueue[HeadraceError]()
    _, executor = start_ranks(ranked_config(config_only, 2), on_failure=failures.put)
    executor.reset()
    (config_only / "broken-1").touch()
    assert "a kernel of an earlier step failed" in failures.get(timeout=2.0).message
    executor.close()


def test_a_stopped_worker_is_killed(config_only: Path):
    failures = queue.SimpleQueue[HeadraceError]()
    _, executor = start_ranks(ranked_config(config_only), on_failure=failures.put)
    process = next(c for c in psutil.Process().children() if "headrace.service.ranks.worker" in c.cmdline())
    began = time.monotonic()
    process.suspend()
    assert "gives no sign of life" in failures.get(timeout=SILENCE_S + 5).message
    assert time.monotonic() - began > SILENCE_S / 2
    executor.close()
    assert not process.is_running()


def test_nothing_is_left_behind(tmp_path: Path):
    """By groups that end well, fail at the start, lose a worker, or are on two hosts; 1,000 of them: cycles.py."""
    report = run_cycles(20, FakeGroups(tmp_path).cycle)
    assert report.is_clean, (report.before, report.after)


def engine_and_workers() -> tuple[psutil.Process, list[psutil.Process]]:
    engine = next(c for c in psutil.Process().children() if "headrace.service.process" in c.cmdline())
    return engine, [c for c in engine.children() if "headrace.service.ranks.worker" in c.cmdline()]


async def _await_gone(processes: list[psutil.Process], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while alive := [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, f"{alive} still run after {limit_s} s"
        await asyncio.sleep(0.05)


@pytest.mark.parametrize(("victim", "number", "limit_s"), [
    ("worker", signal.SIGKILL, 2.0), ("engine", signal.SIGKILL, 3.0), ("engine", signal.SIGSTOP, SILENCE_S + 6),
])
async def test_the_whole_group_is_restarted(start_client, victim: str, number: int, limit_s: float):
    client = await start_client(builder="fakes:build_fake_ranks", tensor_parallel_size=3)
    engine, workers = engine_and_workers()
    assert len(workers) == 2
    (workers[1] if victim == "worker" else engine).send_signal(number)
    await _await_gone([engine, *workers], limit_s)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            await asyncio.wait_for(client.wait_ready(), PATIENCE_S)
            replacement, workers = engine_and_workers()
            if replacement.pid != engine.pid and len(workers) == 2:
                return
        except (StopIteration, EngineUnavailable, psutil.NoSuchProcess):
            pass
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


async def test_a_closed_client_leaves_no_worker(start_client):
    client = await start_client(builder="fakes:build_fake_ranks", tensor_parallel_size=3)
    engine, workers = engine_and_workers()
    await client.close()
    await _await_gone([engine, *workers], 3.0)


def test_a_worker_imports_while_rank_0_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config_only: Path):
    """Before it is assigned a rank, which takes as long as rank 0's own imports."""
    mark = tmp_path / "imported"
    (tmp_path / "marking_builder.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    host = LocalHost(ranked_config(config_only, 2), {1: Place(1, 2)}, "marking_builder:build")
    try:
        until = time.monotonic() + PATIENCE_S
        while not mark.exists():
            assert time.monotonic() < until and host.workers[0].is_alive()
            time.sleep(0.02)
    finally:
        host.close()


@pytest.mark.parametrize("main", ["headrace.service.process", "headrace.service.ranks.worker"])
def test_types_are_known_before_another_thread_imports(main: str):
    """msgspec crashes when one thread decodes a type while another, in a module's body, finds out what it is."""
    code = (
        f"import {main}, sys; from headrace.base.config import EngineConfig; "
        "sys.exit('__msgspec_cache__' not in vars(EngineConfig))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_S).returncode == 0


def test_what_starts_ranks_imports_no_torch():
    """So that workers, and the agents of other hosts, are there before it is imported."""
    text = (
        "import sys, headrace.service.process, headrace.service.ranks.starting, headrace.service.ranks.agent\n"
        "import headrace.service.ranks.on_ray, headrace.service.ranks.worker\n"
        "print('torch' in sys.modules, 'ray' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert done.stdout.split() == ["False", "False"]
