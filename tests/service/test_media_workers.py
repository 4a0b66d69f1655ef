"""Worker processes: what crashes, hangs or fills memory fails alone; queues are bounded; clients that leave free their
places; the same item is prepared once."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from headrace.base.config import ModelConfig
from headrace.base.errors import HeadraceError, MediaError, QueueFull
from headrace.base.media_config import MediaConfig
from headrace.service.media import workers as module
from headrace.service.media.wire import Job, PreparedItem, Setup
from headrace.service.media.workers import MediaWorkers


def job(text: str, param: str = "here", **options) -> Job:
    return Job("image", text.encode(), hashlib.sha256(text.encode()).digest(), param, options)


def pid_of(prepared: PreparedItem) -> int:
    return int(prepared.item.place.numbers["pid"])


@pytest.fixture
async def make(monkeypatch):
    monkeypatch.setattr(module, "START_S", 20.0)
    made: list[MediaWorkers] = []

    def start(count: int = 1, **options) -> MediaWorkers:
        config = MediaConfig(**{"media_timeout_s": 30.0, **options})
        setup = Setup(ModelConfig(), config, "tests.service.media_preparers:Obedient")
        made.append(MediaWorkers(setup, count))
        return made[-1]

    yield start
    for each in made:
        each.close()


async def test_processes_are_others_and_stay(make):
    pool = make(2)
    await pool.start()
    found = await asyncio.gather(*(pool.prepare(job(f"ok {i}")) for i in range(8)))
    assert len({pid_of(each) for each in found}) <= 2 and os.getpid() not in map(pid_of, found)
    large = await pool.prepare(job("size 30000000"))
    assert large.item.num_bytes == 30_000_000


async def test_large_data_go_both_ways(make):
    pool = make(1)
    found = await pool.prepare(job("size 5000000 " + " " * 20_000_000))
    assert found.item.num_bytes == 5_000_000 and not any(found.item.arrays["pixel_values"].data)


async def test_no_descriptor_or_process_is_left(make):
    """Of workers that crash, that hang, whose clients leave, and that are closed while they work."""
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    pool = make(2, media_timeout_s=0.5)
    await asyncio.to_thread(time.sleep, 0)  # the loop's threads
    begun = count()
    await pool.start()
    await asyncio.gather(*(pool.prepare(job(f"ok {number}")) for number in range(2)))  # both have loaded
    await asyncio.gather(*(pool.prepare(job(text)) for text in ("crash", "sleep 60")), return_exceptions=True)
    leaver = asyncio.create_task(pool.prepare(job("sleep 0.2")))
    last = asyncio.create_task(pool.prepare(job("sleep 50")))
    await asyncio.sleep(0.1)
    leaver.cancel()
    processes = [each.process for each in (*pool._idle, *pool._busy)]
    pool.close()
    with pytest.raises(asyncio.CancelledError):
        await last
    async with asyncio.timeout(20):
        while count() > begun or any(process.poll() is None for process in processes):
            await asyncio.sleep(0.01)


async def test_a_crash_fails_its_item_alone_and_the_process_is_replaced(make):
    pool = make(1)
    first = pid_of(await pool.prepare(job("ok")))
    results = await asyncio.gather(
        pool.prepare(job("crash", "messages[1]")), pool.prepare(job("ok again")), return_exceptions=True
    )
    assert isinstance(results[0], MediaError) and results[0].param == "messages[1]"
    assert isinstance(results[1], PreparedItem) and pid_of(results[1]) != first


async def test_what_hangs_is_ended(make):
    pool = make(1, media_timeout_s=0.5)
    await pool.prepare(job("ok"))  # loading is not counted
    began = time.monotonic()
    with pytest.raises(MediaError, match=r"more than 0\.5 seconds"):
        await pool.prepare(job("sleep 60"))
    assert time.monotonic() - began < 5
    assert await pool.prepare(job("ok again"))


async def test_items_of_processes_that_are_stopped_are_prepared_by_others(make, monkeypatch):
    """All of them at once, one with more data than its line takes, one that has prepared nothing yet."""
    monkeypatch.setattr(module, "SILENCE_S", 0.5)
    monkeypatch.setattr(module, "WATCH_S", 0.1)
    pool = make(3)
    await pool.prepare(job("ok"))
    await pool.start()
    stopped = [worker.process for worker in pool._idle]
    while any(not psutil.Process(each.pid).cpu_times().user for each in stopped):  # they have come to live
        await asyncio.sleep(0.02)
    for process in stopped:
        process.send_signal(signal.SIGSTOP)
    texts = ["size 7", "size 8", "size 9" + " " * 20_000_000]
    async with asyncio.timeout(20):
        found = await asyncio.gather(*(pool.prepare(job(text)) for text in texts))
    assert [len(each.item.arrays["pixel_values"].data) for each in found] == [7, 8, 9]
    assert {process.wait() for process in stopped} == {-signal.SIGKILL}


async def test_what_is_killed_from_outside_twice_may_be_tried_again(make):
    pool = make(1)
    task = asyncio.create_task(pool.prepare(job("sleep 60", "there")))
    for _ in range(2):
        while not pool._busy or (worker := next(iter(pool._busy))).process.poll() is not None:
            await asyncio.sleep(0.01)
        worker.process.kill()
        await asyncio.to_thread(worker.process.wait)
    with pytest.raises(HeadraceError, match=r"there could not be read: .* was killed; try again") as caught:
        await task
    assert caught.value.status == 503 and caught.value.retry_after and caught.value.param == "there"
    assert await pool.prepare(job("ok"))


async def test_a_process_that_is_stopped_ends_with_its_parent():
    setup = 'Setup(ModelConfig(), MediaConfig(), "tests.service.media_preparers:Obedient")'
    code = "; ".join((
        "import sys, time", "from headrace.base.config import ModelConfig",
        "from headrace.base.media_config import MediaConfig", "from headrace.service.media.wire import Setup",
        "from headrace.service.media.workers import _Worker",
        f"worker = _Worker.start({setup})", "print(worker.process.pid, flush=True)", "time.sleep(60)",
    ))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    assert parent.stdout is not None
    process = psutil.Process(int(parent.stdout.readline()))
    while b"\0headrace.service.media.worker" not in Path(f"/proc/{process.pid}/cmdline").read_bytes() or (
        process.nice() == os.nice(0)
    ):  # it does so when it has told the system what it wants of it
        await asyncio.sleep(0.01)
    process.suspend()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    await asyncio.to_thread(process.wait, 10)


async def test_errors_are_typed_and_name_the_part(make):
    pool = make(1)
    for text, message in (
        ("refuse", "there is refused"), ("raise", "there cannot be prepared"), ("fill", "there needs too much memory")
    ):
        with pytest.raises(MediaError, match=message) as caught:
            await pool.prepare(job(text, "there"))
        assert caught.value.param == "there"


async def test_the_same_item_is_prepared_once(make):
    pool = make(2)
    found = await asyncio.gather(*(pool.prepare(job("sleep 0.3", f"part {i}")) for i in range(5)))
    assert len({(pid_of(each), each.item.place.numbers["count"]) for each in found}) == 1
    assert await pool.prepare(job("sleep 0.3")) is found[0], "kept"
    assert await pool.prepare(job("sleep 0.3", detail="low")) is not found[0], "another size is another item"
    errors = await asyncio.gather(
        *(pool.prepare(job("refuse", f"part {i}")) for i in range(2)), return_exceptions=True
    )
    assert [str(error) for error in errors] == ["part 0 is refused", "part 1 is refused"]


async def test_base64_is_decoded_by_the_process_and_found_as_text(make):
    pool, text = make(1), base64.b64encode(b"ok encoded")
    sent = replace(job("x"), data=text, sha256=hashlib.sha256(text).digest(), is_base64=True)
    found = await pool.prepare(sent)
    assert found.item.place.digest == hashlib.sha256(b"ok encoded").digest(), "as the same file by other ways"
    assert await pool.prepare(sent) is found
    with pytest.raises(MediaError, match="here is not valid base64"):
        await pool.prepare(replace(sent, data=b"!!", sha256=b"other"))


async def test_salts_share_nothing_that_is_prepared(make):
    pool = make(2)
    one, other = (replace(job("sleep 0.2"), salt=salt) for salt in ("a", "b"))
    found = await asyncio.gather(pool.prepare(one), pool.prepare(other), pool.prepare(one))
    assert found[0] is found[2] is not found[1]
    assert await pool.prepare(other) is found[1]


async def test_the_cache_keeps_to_its_budget(make):
    pool = make(1, media_cache_mib=1)
    first = await pool.prepare(job("size 600000"))
    await pool.prepare(job("size 600001"))
    assert await pool.prepare(job("size 600000")) is not first
    huge = await pool.prepare(job("size 2000000"))
    assert await pool.prepare(job("size 2000000")) is not huge


async def test_who_leaves_frees_the_queue(make):
    pool = make(1)
    await pool.prepare(job("ok"))
    running = asyncio.create_task(pool.prepare(job("sleep 1")))
    await asyncio.sleep(0.2)
    waiting = [asyncio.create_task(pool.prepare(job(f"sleep 5 {i}".replace(" 5 ", f" 5.{i}")))) for i in range(6)]
    await asyncio.sleep(0.1)
    for task in waiting:
        task.cancel()
    began = time.monotonic()
    await running
    await pool.prepare(job("ok again"))
    assert time.monotonic() - began < 4, "none of what was given up was prepared"


async def test_a_full_queue_refuses(make, monkeypatch):
    monkeypatch.setattr(module, "MOST_WAITING", 3)
    pool = make(1)
    tasks = [asyncio.create_task(pool.prepare(job(f"sleep 0.{i}"))) for i in range(1, 4)]
    await asyncio.sleep(0.05)
    with pytest.raises(QueueFull) as caught:
        await pool.prepare(job("one too many", "there"))
    assert caught.value.status == 429 and caught.value.retry_after
    await asyncio.gather(*tasks)


async def test_a_processor_that_cannot_be_loaded_is_told_to_each_request(make):
    setup = Setup(ModelConfig(model="there-is-no-such-model"), MediaConfig())
    pool = MediaWorkers(setup, 1)
    try:
        for _ in range(2):
            with pytest.raises(Exception, match="there-is-no-such-model"):
                await pool.prepare(job("x"))
    finally:
        pool.close()
