"""Replicas that divide experts: a step of any is a step of all, whoever has requests; they stand and fall together."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from fakes import PATIENCE_S, continuation

from headrace.base.config import engine_config
from headrace.base.errors import ConfigError, EngineBroken, EngineUnavailable
from headrace.base.sampling import SamplingParams
from headrace.base.step import StepPlan
from headrace.service.client.admin import EngineAdmin
from headrace.service.ranks import gate
from headrace.service.ranks.gate import Board, BoardGate, StepGate
from headrace.service.ranks.heartbeats import SILENCE_S

SHARED = {
    "data_parallel_size": 2, "enable_expert_parallel": True, "builder": "fakes:build_fakes_in_step",
    "data_parallel_policy": "round-robin",
}


def open_gates(size: int, **options: float) -> tuple[Board, list[BoardGate]]:
    """All replicas' in this process, with descriptors of their own."""
    board = Board(size)
    return board, [
        BoardGate(tuple(map(os.dup, board.descriptors)), replica, **options) for replica in range(size)
    ]


def plan_of(num_tokens: int) -> StepPlan:
    return StepPlan(1, 0, [0], [0], [num_tokens], [0]) if num_tokens else StepPlan(1, 0, [], [], [], [])


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_step_of_any_is_a_step_of_all(size: int):
    """Each has steps at random times; all see the same rounds, and nobody waits for one that has nothing to do."""
    board, gates = open_gates(size)
    rounds: list[list[list[int]]] = [[] for _ in gates]
    num_done, lock = 0, threading.Lock()

    def run(replica: int) -> None:
        nonlocal num_done
        draw, own, is_done = random.Random(replica), gates[replica], False
        left = draw.randrange(0, 60)
        while num_done < size or own._is_behind():
            if left and draw.random() < 0.7:
                left -= 1
                rounds[replica].append(own.admit(plan_of(1 + replica)).replica_tokens)
            elif not left and not is_done:
                is_done = True
                with lock:
                    num_done += 1
            elif draw.random() < 0.2:
                time.sleep(0.001)
            idle = own.find_idle_step()
            if idle is not None:
                assert not idle.rows
                rounds[replica].append(idle.replica_tokens)

    threads = [threading.Thread(target=run, args=(replica,)) for replica in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert all(others == rounds[0] for others in rounds)
    wanted = [random.Random(replica).randrange(0, 60) for replica in range(size)]
    assert [sum(counts[r] > 0 for counts in rounds[0]) for r in range(size)] == wanted
    assert all(any(counts) for counts in rounds[0])
    for own in gates:
        own.close()
    board.close()


def test_nobody_is_woken_for_nothing():
    board, (first, second) = open_gates(2)
    assert not first._poll.poll(0) and first.find_idle_step() is None
    results: list[StepPlan] = []
    thread = threading.Thread(target=lambda: results.append(first.admit(plan_of(4))))
    thread.start()
    assert second._poll.poll(5000), "the waker is readable once another waits"
    idle = second.find_idle_step()
    thread.join()
    assert idle is not None and idle.replica_tokens == [4, 0] == results[0].replica_tokens
    assert second.find_idle_step() is None and not second._poll.poll(0)
    for own in (first, second):
        own.close()
    board.close()


def test_one_that_does_not_come_breaks_the_group():
    board, (first, second) = open_gates(2, round_s=0.2)
    with pytest.raises(EngineBroken, match="have not come to a step"):
        first.admit(plan_of(1))
    with pytest.raises(EngineUnavailable, match="where ranks meet"):
        assert second.port
    first.port = 4321
    assert second.port == 4321
    for own in (first, second):
        own.close()
    board.close()


def test_all_meet_before_a_change(monkeypatch: pytest.MonkeyPatch):
    """Steps that one begins before it hears of the change are taken by all."""
    board, (first, second) = open_gates(2)
    taken: list[list[int]] = []
    met = threading.Thread(target=first.meet, args=(lambda plan: taken.append(plan.replica_tokens),))
    met.start()
    steps = [second.admit(plan_of(3)).replica_tokens for _ in range(5)]
    assert met.is_alive()
    second.meet(lambda plan: None)
    met.join(10)
    assert not met.is_alive() and taken == steps == [[0, 3]] * 5
    monkeypatch.setattr(gate, "MEETING_S", 0.1)
    with pytest.raises(EngineBroken, match="not all replicas were told"):
        first.meet(lambda plan: None)
    for own in (first, second):
        own.close()
    board.close()
    assert StepGate().find_idle_step() is None and StepGate().admit(plan_of(1)) == plan_of(1)


@pytest.mark.parametrize(("options", "param"), [
    ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"), ({"executor": "ray"}, "enable_expert_parallel"),
    ({"nnodes": 2, "node_token_file": "token"}, "enable_expert_parallel"),
])
def test_what_does_not_go_together_is_refused(options: dict[str, object], param: str):
    with pytest.raises(ConfigError, match="replicas that divide experts") as caught:
        engine_config(model="m", data_parallel_size=2, enable_expert_parallel=True, **options)
    assert caught.value.param == param
    engine_config(model="m", data_parallel_size=2, **options)


async def read(stream) -> tuple[list[int], str | None]:
    tokens, reason = [], None
    async for delta in stream:
        tokens += delta.token_ids
        reason = delta.error.kind if delta.error is not None else delta.finish_reason or reason
    return tokens, reason


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, detokenize=False)


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def steps_of(folder: Path) -> list[list[str]]:
    return [(folder / f"replica-{r}").read_text().splitlines() for r in range(2)]


async def test_requests_at_random_times_and_idle_replicas(start_client: Callable, config_only: Path):
    client = await start_client(**SHARED)
    draw = random.Random(5)
    running = []
    for i in range(30):
        running.append(asyncio.create_task(read(client.submit([i] * draw.randrange(1, 90), greedy(1 + i)))))
        if draw.random() < 0.6:
            await asyncio.sleep(draw.random() * 0.03)
    assert [len(tokens) for tokens, _ in await asyncio.gather(*running)] == [1 + i for i in range(30)]
    alone = [await read(client.submit([7, n], greedy(5))) for n in range(4)]  # the other replica has nothing
    assert [tokens for tokens, _ in alone] == [continuation([7, n], 5) for n in range(4)]
    await asyncio.sleep(0.3)
    first, second = steps_of(config_only)
    assert first == second, "all have taken the same steps"
    busy = {(counts[0] > 0, counts[1] > 0) for counts in map(eval_counts, first)}
    assert {(True, True), (True, False), (False, True)} <= busy
    engines = [psutil.Process(pid) for pid in client.engine_pids]
    before = [sum(engine.cpu_times()[:2]) for engine in engines]
    await asyncio.sleep(1.0)
    assert steps_of(config_only) == [first, first], "nobody steps when nobody has a request"
    spent = [sum(engine.cpu_times()[:2]) - b for engine, b in zip(engines, before, strict=True)]
    assert max(spent) < 0.5, "nor does anybody spin"


def eval_counts(line: str) -> list[int]:
    return [int(part) for part in line.strip("[]").split(",")]


async def test_a_long_prompt_delays_the_decodes_of_others_by_a_chunk_at_a_time(
    start_client: Callable, config_only: Path
):
    """In each step that computes a chunk of it, the other replica's request gets its token."""
    client, length, most = await start_client(**SHARED, max_step_tokens=16), 400, 16
    decoding = asyncio.create_task(read(client.submit([1], greedy(1500))))
    before = steps_of(config_only)[0]  # of the start
    await until(lambda: len(steps_of(config_only)[0]) > len(before) + 5)
    assert (await read(client.submit([2] * length, greedy(1))))[0] == continuation([2] * length, 1)
    assert not decoding.done()

    def chunks() -> list[list[int]]:
        counts = [eval_counts(line) for line in steps_of(config_only)[0][len(before) :]]
        return [step for step in counts if step[1]]

    await until(lambda: len(chunks()) >= length // most)  # the last one may be written behind its output
    assert chunks() == [[1, most]] * (length // most)
    assert len((await decoding)[0]) == 1500


async def test_pauses_sleep_and_other_weights_reach_all_without_a_deadlock(start_client: Callable, config_only: Path):
    client = await start_client(**SHARED, seed=2)
    admin = EngineAdmin(client)
    running = [asyncio.create_task(read(client.submit([i], greedy(150)))) for i in range(5)]
    await asyncio.sleep(0.1)
    await admin.pause()
    await asyncio.sleep(0.1)
    assert not any(task.done() for task in running)
    await admin.pause(False)
    assert await asyncio.wait_for(admin.replace_weights("3"), 30) == 5  # while they run
    assert [len(tokens) for tokens, _ in await asyncio.gather(*running)] == [150] * 5
    await asyncio.wait_for(admin.sleep(mode="wait"), 30)
    assert client.state == "asleep"
    await asyncio.wait_for(admin.wake(), 30)
    for n in range(3):
        assert (await read(client.submit([n], greedy(1))))[0] == [(continuation([n], 1)[0] + 3) % 250]
    await until(lambda: len({tuple(steps) for steps in steps_of(config_only)}) == 1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
async def test_one_that_dies_takes_all_with_it_and_all_come_back(start_client: Callable, number: int):
    client = await start_client(**SHARED, seed=2)
    pids = client.engine_pids
    running = [asyncio.create_task(read(client.submit([i], greedy(3000)))) for i in range(6)]
    await asyncio.sleep(0.3)
    began = time.monotonic()
    os.kill(pids[1], number)
    ends = await asyncio.gather(*running)
    assert [reason for _, reason in ends] == ["engine_unavailable"] * 6 and time.monotonic() - began < 3.0
    await until(lambda: [replica.state for replica in client.replicas] == ["ready"] * 2)
    assert not set(pids) & set(client.engine_pids) and [r.supervisor.num_restarts for r in client.replicas] == [1, 1]
    for n in range(4):
        assert (await read(client.submit([n], greedy(4))))[0] == continuation([n], 4)


@pytest.mark.parametrize("num_requests", [4, 0], ids=["waited for", "idle"])
async def test_one_that_is_stopped_is_noticed_by_the_others(start_client: Callable, num_requests: int):
    """Also where none of them waits for it before a step; in a step they may wait for it as well."""
    client = await start_client(**SHARED, seed=2)
    pids = client.engine_pids
    running = [asyncio.create_task(read(client.submit([i], greedy(3000)))) for i in range(num_requests)]
    await asyncio.sleep(0.3)
    began = time.monotonic()
    os.kill(pids[1], signal.SIGSTOP)
    ends = await asyncio.gather(*running)
    assert [reason for _, reason in ends] == ["engine_unavailable"] * num_requests
    await until(lambda: client.replicas[0].supervisor.num_restarts == 1)
    assert SILENCE_S / 2 < time.monotonic() - began < SILENCE_S + 6
    await until(lambda: [replica.state for replica in client.replicas] == ["ready"] * 2)
    assert not set(pids) & set(client.engine_pids)
    assert (await read(client.submit([9], greedy(4))))[0] == continuation([9], 4)


async def test_all_end_when_one_is_given_up(start_client: Callable):
    client = await start_client(**SHARED, max_restarts=0)
    os.kill(client.engine_pids[0], signal.SIGKILL)
    await until(lambda: [replica.state for replica in client.replicas] == ["stopped"] * 2)
    assert client.state == "stopped"
