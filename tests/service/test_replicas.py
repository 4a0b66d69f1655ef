"""`EngineClient` over several engines: placement, deaths and hangs of one, calls to all. The model is a fake."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import psutil
import pytest
from fakes import PATIENCE_S, FakeExecutor, continuation
from test_client import SLOW, greedy, ids, read, until

from headrace.base.adapters import (
    AdapterConfig,
    AdapterInfo,
    AdapterStats,
    ListAdapters,
    LoadAdapter,
    LoRARequest,
    UnloadAdapter,
)
from headrace.base.admin import AcquireMemory, ReleaseMemory, ReplaceWeights, StartProfile
from headrace.base.config import engine_config
from headrace.base.errors import (
    AdapterError,
    Conflict,
    EngineAsleep,
    EngineUnavailable,
    ModelError,
    PluginError,
    RequestError,
)
from headrace.base.messages import EngineStats, ExpertStats, SpeculationStats, StatsByTier, TierStats, TransferStats
from headrace.base.sampling import SamplingParams
from headrace.service.client.adapters import AdapterCatalog
from headrace.service.client.admin import EngineAdmin
from headrace.service.client.client import EngineClient
from headrace.service.client.replica import Supervision
from headrace.service.client.replicas import call_all
from headrace.service.client.statistics import continue_stats, counters_of, sum_stats

TWO = {"data_parallel_size": 2}


def counts(client: EngineClient) -> list[int]:
    """Requests that each replica has had, without its own first one."""
    return [replica.last_stats.requests_total - 1 for replica in client.replicas]


async def test_requests_are_spread_and_all_are_right(start_client: Callable):
    client = await start_client(**TWO, data_parallel_policy="round-robin")
    assert client.facts.num_kv_tokens == 2 * client.replicas[0].facts.num_kv_tokens
    assert client.memory[0].name == "weights" and client.memory[0].num_bytes == 2
    prompts = [[i % 200, i // 200, 5] for i in range(100)]
    results = await asyncio.gather(*(read(client.submit(p, greedy(3 + i % 9))) for i, p in enumerate(prompts)))
    for i, (prompt, deltas) in enumerate(zip(prompts, results, strict=True)):
        assert ids(deltas) == continuation(prompt, 3 + i % 9)
    assert client.num_inflight == 0
    await client.check()
    stats = await client.stats()
    assert stats.requests_total == 102 and stats.num_pages == 2 * client.replicas[0].last_stats.num_pages
    assert counts(client) == [50, 50]
    assert [replica.load.load for replica in client.replicas] == [0, 0], "all that was counted has ended"


async def test_choices_of_a_request_stay_together(start_client: Callable):
    client = await start_client(**TWO, data_parallel_policy="round-robin")
    for _ in range(2):
        deltas = await read(client.submit([4, 5], SamplingParams(n=5, max_tokens=5, detokenize=False)))
        assert all(ids(deltas, index) == continuation([4, 5], 5) for index in range(5))
    await client.stats()
    assert counts(client) == [5, 5]


async def test_a_replica_whose_queue_is_full_is_passed_over(start_client: Callable):
    limits = {"max_running_requests": 1, "max_queued": 3, "max_queued_per_client": 3}
    client = await start_client(**TWO, **SLOW, **limits, data_parallel_policy="round-robin")
    streams = [client.submit([i], SamplingParams(n=n, max_tokens=4, detokenize=False)) for i, n in enumerate((3, 1, 2))]
    results = await asyncio.gather(*(read(stream) for stream in streams))
    assert not any(delta.error for deltas in results for delta in deltas)
    await client.stats()
    assert counts(client) == [3, 3]


async def test_a_conversation_comes_back_to_its_cache(start_client: Callable):
    client = await start_client(**TWO, kv_pages=512)
    talks = [[t] * 64 for t in range(6)]
    for _ in range(4):
        for talk in talks:
            deltas = await read(client.submit(talk, greedy(40)))
            assert len(talk) == 64 or deltas[0].num_cached_tokens > len(talk) - 64
            talk += ids(deltas)
    await client.stats()
    assert counts(client) == [12, 12], "and the two share the conversations"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_one_replica_is_lost_under_load(start_client: Callable, number: signal.Signals):
    """Its requests end with a typed error that can be retried, the others' go on, new ones go elsewhere, and when it is
    back it gets requests again."""
    client = await start_client(**TWO, **SLOW, stall_timeout_s=3.0, data_parallel_policy="round-robin")
    streams = [client.submit([i], greedy(2000)) for i in range(10)]
    readers = [asyncio.create_task(read(stream)) for stream in streams]
    await until(lambda: all(r.last_stats.generation_tokens_total > 20 for r in client.replicas))
    lost, kept = client.engine_pids
    os.kill(lost, number)
    await until(lambda: client.num_inflight == 5)
    assert client.state == "ready" and [r.state for r in client.replicas] == ["restarting", "ready"]
    for reader in readers[::2]:
        last = (await asyncio.wait_for(reader, PATIENCE_S))[-1]
        assert last.error.kind == "engine_unavailable" and last.error.retry_after and "replica 0" in last.error.message
    during = await asyncio.gather(*(read(client.submit([7, i], greedy(3))) for i in range(4)))
    assert all(ids(deltas) == continuation([7, i], 3) for i, deltas in enumerate(during))
    await until(lambda: client.replicas[0].state == "ready")
    assert client.engine_pids[1] == kept and client.engine_pids[0] not in (lost, None)
    assert not any(reader.done() for reader in readers[1::2]), "the others still run"
    after = await asyncio.gather(*(read(client.submit([8, i], greedy(3))) for i in range(4)))
    assert all(ids(deltas) == continuation([8, i], 3) for i, deltas in enumerate(after))
    await client.stats()
    assert counts(client)[0] == 5 + 1 + 2 and client.num_restarts == 1, "one is the second engine's own"
    await client.abort(None)
    for index, reader in enumerate(readers):
        deltas = await asyncio.wait_for(reader, PATIENCE_S)
        assert ids(deltas) == continuation([index], len(ids(deltas)))


async def test_a_replica_that_does_not_answer_gets_nothing_new(start_client: Callable):
    client = await start_client(**TWO, stall_timeout_s=12.0, data_parallel_policy="round-robin")  # ticks every 3 s
    process = psutil.Process(client.engine_pids[1])
    process.suspend()
    try:
        await until(lambda: client.replicas[1].supervisor.is_silent)
        results = await asyncio.gather(*(read(client.submit([i], greedy(3))) for i in range(6)))
        assert all(ids(deltas) == continuation([i], 3) for i, deltas in enumerate(results))
    finally:
        process.resume()
    await until(lambda: not client.replicas[1].supervisor.is_silent)
    assert ids(await read(client.submit([9], greedy(3)))) == continuation([9], 3) and client.num_restarts == 0


async def test_all_are_lost(start_client: Callable):
    client = await start_client(**TWO, max_restarts=1)
    for _ in range(2):
        await asyncio.wait_for(client.wait_ready(), PATIENCE_S)
        await until(lambda: all(r.state == "ready" for r in client.replicas))
        for pid in client.engine_pids:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: client.state != "ready")
        with pytest.raises(EngineUnavailable) as caught:
            client.submit([1], greedy())
        assert caught.value.retry_after
    await until(lambda: client.state == "stopped")
    with pytest.raises(EngineUnavailable):
        await client.wait_ready()


async def test_one_that_is_given_up_leaves_the_others(start_client: Callable):
    client = await start_client(**TWO, max_restarts=0)
    os.kill(client.engine_pids[0], signal.SIGKILL)
    await until(lambda: client.replicas[0].state == "stopped")
    assert client.state == "ready"
    assert ids(await read(client.submit([3], greedy()))) == continuation([3], 8)
    admin = EngineAdmin(client)
    await admin.pause()  # what is given up concerns nobody any more
    await admin.pause(False)
    assert ids(await read(client.submit([4], greedy()))) == continuation([4], 8)


@pytest.mark.parametrize(("builder", "words"), [
    ("fakes:refuse_second", "replica 1: layer 3 is missing"), ("fakes:refuse_to_build", "replica 0|1: layer 3"),
])
async def test_a_replica_that_cannot_start_ends_the_start(config_only, builder: str, words: str):
    config = engine_config(model=str(config_only), skip_tokenizer=True, data_parallel_size=2)
    client = EngineClient(config, supervision=Supervision(builder=builder))
    await client.start()
    with pytest.raises(ModelError, match=words):
        await asyncio.wait_for(client.wait_ready(), PATIENCE_S)
    assert client.state == "stopped"
    pids = [pid for pid in client.engine_pids if pid]
    await client.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_an_unknown_policy_is_refused_before_anything_starts(config_only):
    with pytest.raises(PluginError, match="round-robin"):
        EngineClient(engine_config(model=str(config_only), data_parallel_size=2, data_parallel_policy="best"))


async def test_admin_calls_reach_all(start_client: Callable):
    client = await start_client(**TWO, seed=5, kv_pages=256)
    admin = EngineAdmin(client)
    running = [asyncio.create_task(read(client.submit([i], greedy(2000)))) for i in range(4)]
    with pytest.raises(Conflict, match="4 requests"):
        await admin.sleep()
    await admin.pause()
    assert admin.is_paused
    await asyncio.sleep(0.1)  # what was in flight is committed
    before = (await client.stats()).generation_tokens_total
    late = asyncio.create_task(read(client.submit([9], greedy(2))))
    await asyncio.sleep(0.2)
    assert (await client.stats()).generation_tokens_total == before and not late.done()
    await admin.pause(False)
    assert ids(await late) == continuation([9], 2)
    await admin.sleep(mode="abort")
    assert [(await task)[-1].finish_reason for task in running] == ["abort"] * 4
    assert client.state == "asleep" and [r.state for r in client.replicas] == ["asleep"] * 2
    await admin.wake()
    assert client.state == "ready"
    await admin.start_profile(StartProfile("folder", num_steps=7))
    assert await admin.stop_profile() == "7 steps, 7 steps"
    assert await client.reset_prefix_cache() is True
    assert await admin.replace_weights("9") == 0
    assert [r.supervisor.config.model.model for r in client.replicas] == ["9", "9"]
    assert [r.supervisor.config.replica for r in client.replicas] == [0, 1]
    for prompt in ([1], [2], [3]):
        assert ids(await read(client.submit(prompt, greedy(1)))) == [(continuation(prompt, 1)[0] + 9) % 250]


async def test_weights_are_replaced_on_all_or_none(start_client: Callable):
    client = await start_client(**TWO, builder="fakes:build_picky", data_parallel_policy="round-robin")
    client.config = engine_config(model="0", skip_tokenizer=True, **TWO)  # what the fakes can load again
    admin = EngineAdmin(client)
    with pytest.raises(ModelError, match=r"replica 1: .*undone on the others"):
        await admin.replace_weights("9")  # which the second refuses
    results = await asyncio.gather(*(read(client.submit([i], greedy(3))) for i in range(4)))
    assert [ids(deltas) for deltas in results] == [continuation([i], 3) for i in range(4)]
    assert client.config.model.model == "0" and client.num_restarts == 0


class HalfReplica:
    """Notes calls; ``error``: what loading ``bad`` raises."""

    is_up, state, num_ends = True, "ready", 0

    def __init__(self, name: str, error: RequestError | None = None):
        self.name, self._error, self.calls = name, error, []

    async def call(self, method: str, args: Any = None, timeout_s: float = 0.0) -> Any:
        if method == ListAdapters.method:
            return []
        self.calls.append((method, args["name"], args.get("path")))
        if self._error is not None and args.get("path") == "bad":
            raise self._error
        return {}


@pytest.mark.parametrize(("call", "undone"), [
    (LoadAdapter("sql", "bad", replaces=True, previous="old"), ("load_adapter", "sql", "old")),
    (LoadAdapter("sql", "bad"), ("unload_adapter", "sql", None)),
], ids=["in place", "new"])
async def test_an_adapter_that_some_cannot_load_is_undone_on_the_others(call: LoadAdapter, undone: Any):
    replicas = [HalfReplica("replica 0"), HalfReplica("replica 1", AdapterError("torn", param="lora_path"))]
    with pytest.raises(AdapterError, match="replica 1: torn; undone"):
        await call_all(replicas, call, engine_config(model="0", skip_tokenizer=True), 1.0)
    assert replicas[0].calls == [("load_adapter", "sql", "bad"), undone]
    assert replicas[1].calls == [("load_adapter", "sql", "bad")]


@pytest.mark.parametrize("previous", ["", "bad"], ids=["tensors", "the same files"])
async def test_an_adapter_that_cannot_be_put_back_is_unloaded_on_all(previous: str):
    """Else its name would stand for the old one on some, and for the new one on others."""
    call = LoadAdapter("sql", "bad", replaces=True, previous=previous)
    error = AdapterError("torn", param="lora_path")
    replicas = [HalfReplica("replica 0"), HalfReplica("replica 1", error)]
    with pytest.raises(AdapterError, match="replica 1: torn; it is unloaded on all"):
        await call_all(replicas, call, engine_config(model="0", skip_tokenizer=True), 1.0)
    for replica in replicas:
        assert replica.calls == [("load_adapter", "sql", "bad"), ("unload_adapter", "sql", None)]
    alike = [HalfReplica(f"replica {i}", error) for i in range(2)]
    with pytest.raises(AdapterError, match=r"replica 1: torn$"):
        await call_all(alike, call, engine_config(model="0", skip_tokenizer=True), 1.0)
    assert all(len(replica.calls) == 1 for replica in alike), "all have the old one still"


class Dying(HalfReplica):
    """Its engine ends in every call."""

    async def call(self, method: str, args: Any = None, timeout_s: float = 0.0) -> Any:
        await super().call(method, args, timeout_s)
        self.num_ends, self.is_up = self.num_ends + 1, False
        raise EngineUnavailable(f"{self.name} stopped")


@pytest.mark.parametrize(("call", "is_done"), [
    (LoadAdapter("sql", "good"), True), (LoadAdapter("sql", "good", replaces=True, previous="good"), True),
    (UnloadAdapter("sql"), True), (LoadAdapter("sql", tensors=b"x"), False),
], ids=["load", "in place", "unload", "tensors"])
async def test_a_replica_that_ends_while_adapters_change_follows_with_its_next_engine(call: Any, is_done: bool):
    """What the others did stands: it gets what they have, unless that came with the call alone."""
    config = engine_config(model="0", skip_tokenizer=True)
    replicas = [HalfReplica("replica 0"), Dying("replica 1")]
    if is_done:
        assert await call_all(replicas, call, config, 1.0) == {}
        assert len(replicas[0].calls) == 1
    else:
        with pytest.raises(EngineUnavailable, match="replica 1: replica 1 stopped; undone"):
            await call_all(replicas, call, config, 1.0)
        assert [name for name, *_ in replicas[0].calls] == ["load_adapter", "unload_adapter"]
    with pytest.raises(EngineUnavailable):
        await call_all([Dying("replica 0"), Dying("replica 1")], call, config, 1.0)


async def test_a_replica_that_is_back_before_the_first_adapter_is_loaded_gets_it():
    client = AdapterClient([])
    client.config = replace(client.config, adapters=AdapterConfig(enable_lora=True, lora_folders="/"))
    client.replicas = [HalfReplica("replica 0"), HalfReplica("replica 1")]
    catalog = AdapterCatalog(client)  # type: ignore[arg-type]
    async with catalog._turn:  # as while it is being loaded
        client.on_restart(client.replicas[1])
        await asyncio.sleep(0)
        catalog._known["sql"] = LoRARequest("sql", "good")
    await asyncio.wait(catalog._reloading)
    assert client.replicas[1].calls[0] == ("load_adapter", "sql", "good")


class Crowded(HalfReplica):
    """Finds no room for its cache when its weights are replaced; ``ends``: why it is restarted."""

    def __init__(self, name: str):
        super().__init__(name)
        self.ends: list[str] = []
        self.supervisor = self

    def replace_process(self, reason: EngineUnavailable) -> None:
        self.ends.append(reason.message)

    async def call(self, method: str, args: Any = None, timeout_s: float = 0.0) -> Any:
        raise EngineAsleep("no room for the KV cache")


async def test_a_replica_that_may_have_either_weights_is_restarted():
    crowded, other = Crowded("replica 0"), HalfReplica("replica 1")
    other.call = replaced = AsyncMock(return_value=[])
    config = engine_config(model="old", skip_tokenizer=True)
    with pytest.raises(EngineAsleep, match="replica 0: no room"):
        await call_all([crowded, other], ReplaceWeights("new", "auto"), config, 1.0)
    assert [call.args[1]["model"] for call in replaced.await_args_list] == ["new", "old"]
    assert len(crowded.ends) == 1 and "replica 0 is restarted" in crowded.ends[0]


class Fleeting(HalfReplica):
    """Obeys, and has another engine before the others have answered."""

    async def call(self, method: str, args: Any = None, timeout_s: float = 0.0) -> Any:
        self.num_ends = 1
        return []


@pytest.mark.parametrize(("method", "undo"), [
    (ReplaceWeights("new", "auto"), ReplaceWeights("old", "auto")),
    (ReleaseMemory(["weights"]), AcquireMemory(["weights"])),
])
async def test_a_replica_that_has_obeyed_and_ended_before_the_others_answered_has_failed(method: Any, undo: Any):
    """Its new engine has the old weights, or is awake."""
    other = HalfReplica("replica 1")
    other.call = called = AsyncMock(return_value=[])
    config = engine_config(model="old", skip_tokenizer=True)
    with pytest.raises(EngineUnavailable, match=r"replica 0: its engine has ended meanwhile.*undone on the others"):
        await call_all([Fleeting("replica 0"), other], method, config, 1.0)
    made = [(call.args[0], call.args[1]) for call in called.await_args_list]
    assert made == [(call.method, msgspec.to_builtins(call)) for call in (method, undo)]


class Reader(HalfReplica):
    """Reads files of this content."""

    def __init__(self, name: str, digest: str):
        super().__init__(name)
        self.digest = digest

    async def call(self, method: str, args: Any = None, timeout_s: float = 0.0) -> Any:
        if method == ListAdapters.method:
            return msgspec.to_builtins([AdapterInfo("sql", "good", self.digest, 1, 0)])
        await super().call(method, args, timeout_s)
        return msgspec.to_builtins(AdapterInfo("sql", "good", self.digest, 1, 0))


async def test_files_that_change_while_replicas_read_them_are_refused():
    replicas = [Reader("replica 0", "aa"), Reader("replica 1", "bb")]
    with pytest.raises(AdapterError, match="changed while the replicas read them"):
        await call_all(replicas, LoadAdapter("sql", "good"), engine_config(model="0", skip_tokenizer=True), 1.0)
    for replica in replicas:
        assert replica.calls == [("load_adapter", "sql", "good"), ("unload_adapter", "sql", None)]


@pytest.mark.parametrize("digest", ["aa", "bb"])
async def test_files_that_a_restarted_replica_reads_otherwise_are_read_by_all(digest: str):
    client = AdapterClient([])
    client.config = replace(client.config, adapters=AdapterConfig(enable_lora=True, lora_modules="sql=good"))
    client.replicas = [Reader("replica 0", "aa"), Reader("replica 1", digest)]
    catalog = AdapterCatalog(client)  # type: ignore[arg-type]
    client.on_restart(client.replicas[1])
    await asyncio.wait(catalog._reloading)
    assert client.loaded == ["sql"] * (digest == "bb")


class AdapterClient:
    """Answers what a catalog asks; ``left``: the adapters that engines have after a load of ``bad``."""

    engine_pids = (1, 2)

    def __init__(self, left: list[str]):
        self.config = replace(engine_config(model="0"), adapters=AdapterConfig(enable_lora=True))
        self._left, self.on_restart = left, None
        self.replicas: list[HalfReplica] = []
        self.loaded: list[str] = []

    async def control(self, method: Any, timeout_s: float = 0.0) -> Any:
        if isinstance(method, LoadAdapter) and method.path == "bad":
            raise AdapterError("torn")
        if isinstance(method, LoadAdapter):
            self.loaded.append(method.name)
        infos = [AdapterInfo(name, "", "", 1, 0) for name in self._left]
        return msgspec.to_builtins(infos if isinstance(method, ListAdapters) else AdapterInfo("sql", "", "", 1, 0))


@pytest.mark.parametrize("left", [[], ["sql"]], ids=["unloaded", "kept"])
async def test_a_name_ends_with_the_adapter_that_a_failed_reload_unloads(left: list[str]):
    catalog = AdapterCatalog(AdapterClient(left))  # type: ignore[arg-type]
    await catalog.load("sql", "good", is_trusted=True)
    assert catalog.names == ["sql"]
    with pytest.raises(AdapterError, match="torn"):
        await catalog.load("sql", "bad", is_trusted=True, replaces=True)
    assert catalog.names == left


async def test_calls_that_need_all_wait_for_a_replica_that_restarts(start_client: Callable):
    client = await start_client(**TWO, builder="fakes:build_slowly")
    admin = EngineAdmin(client)
    os.kill(client.engine_pids[1], signal.SIGKILL)
    await until(lambda: client.replicas[1].state == "restarting")
    for call in (admin.pause, admin.sleep, lambda: admin.replace_weights("9")):
        with pytest.raises(EngineUnavailable, match="replica 1 is restarting") as caught:
            await call()
        assert caught.value.retry_after
    assert client.state == "ready" and await client.reset_prefix_cache() is True
    assert ids(await read(client.submit([3], greedy()))) == continuation([3], 8)


async def test_a_replica_that_does_not_pause_is_restarted(start_client: Callable):
    """Else it would obey when it goes on, and hold its requests for good."""
    client = await start_client(**TWO)
    pid = client.engine_pids[1]
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(EngineUnavailable, match=r"replica 1: .*did not answer pause within 1 s; undone on the others"):
        await client.control("pause", timeout_s=1.0)
    assert ids(await read(client.submit([3], greedy()))) == continuation([3], 8)
    await until(lambda: client.replicas[1].state == "ready" and client.engine_pids[1] != pid)
    results = await asyncio.gather(*(read(client.submit([i], greedy(3))) for i in range(6)))
    assert [ids(deltas) for deltas in results] == [continuation([i], 3) for i in range(6)]


async def test_weights_that_cannot_be_put_back_are_loaded_anew(start_client: Callable):
    client = await start_client(**TWO, builder="fakes:build_picky", data_parallel_policy="round-robin")
    pid = client.engine_pids[0]
    with pytest.raises(ModelError, match="replica 1"):
        await EngineAdmin(client).replace_weights("9")  # the first takes it, and does not know the name it had
    await until(lambda: client.engine_pids[0] not in (pid, None) and client.replicas[0].state == "ready")
    results = await asyncio.gather(*(read(client.submit([i], greedy(3))) for i in range(4)))
    assert [ids(deltas) for deltas in results] == [continuation([i], 3) for i in range(4)]


async def test_closing_drains_all(start_client: Callable):
    client = await start_client(**TWO, **SLOW)
    short = [asyncio.create_task(read(client.submit([i], greedy(3)))) for i in range(4)]
    long = asyncio.create_task(read(client.submit([2], greedy(4000))))
    pids = client.engine_pids
    closing = asyncio.create_task(client.close(drain_s=3.0))
    await asyncio.sleep(0)
    with pytest.raises(EngineUnavailable, match="draining"):
        client.submit([3], greedy())
    assert [ids(await task) for task in short] == [continuation([i], 3) for i in range(4)]
    assert (await long)[-1].error.kind == "engine_unavailable"
    await closing
    assert client.engine_pids == (None, None) and not any(psutil.pid_exists(pid) for pid in pids)


async def test_a_poisoned_request_kills_one_replica_alone(start_client: Callable):
    client = await start_client(**TWO)
    deltas = await read(client.submit([FakeExecutor.DIE], greedy()))
    assert deltas[-1].error.kind == "engine_unavailable" and client.state == "ready"
    assert ids(await read(client.submit([3], greedy()))) == continuation([3], 8)


def test_statistics_are_added_up():
    one = EngineStats(
        num_pages=3, steps_total=2, speculation=SpeculationStats(1, 2, 3, [2, 1]), experts=ExpertStats([1, 2], 0.5),
        adapters=AdapterStats(2, 1, 3, running={"a": 1}),
        tiers=StatsByTier(TierStats(num_pages=1), peers=TransferStats(2, sent_pages_total=5)),
    )
    other = EngineStats(
        num_pages=4, num_running=1, speculation=SpeculationStats(1, 1, 1, [1]),
        adapters=AdapterStats(2, 2, 1, running={"a": 1, "b": 2}),
        tiers=StatsByTier(TierStats(num_pages=2), peers=TransferStats(1, lost_requests_total=1)),
    )
    assert sum_stats([one, other]) == EngineStats(
        num_pages=7, num_running=1, steps_total=2, speculation=SpeculationStats(2, 3, 4, [3, 1]),
        experts=ExpertStats([1, 2], 0.5), adapters=AdapterStats(2, 3, 4, running={"a": 2, "b": 2}),
        tiers=StatsByTier(TierStats(num_pages=3), peers=TransferStats(3, 0, 1, 5)),
    )
    left = counters_of(one)
    assert left == EngineStats(
        steps_total=2, speculation=SpeculationStats(1, 2, 3, [2, 1]), experts=ExpertStats([1, 2]),
        adapters=AdapterStats(loads_total=3), tiers=StatsByTier(peers=TransferStats(2, sent_pages_total=5)),
    )
    assert continue_stats(left, one) == EngineStats(
        num_pages=3, steps_total=4, speculation=SpeculationStats(2, 4, 6, [4, 2]), experts=ExpertStats([2, 4], 0.5),
        adapters=AdapterStats(2, 1, 6, running={"a": 1}),
        tiers=StatsByTier(TierStats(num_pages=1), peers=TransferStats(4, sent_pages_total=10)),
    )
