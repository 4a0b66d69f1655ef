"""`LLM` and `AsyncLLM` over fakes: shapes of calls, order, errors, interrupts."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from fakes import BUILDER, FakeExecutor, continuation

from headrace.base.errors import ConfigError, ContextLengthExceeded, EngineUnavailable, RequestError, StepFailed
from headrace.base.sampling import SamplingParams
from headrace.service.client.client import EngineClient
from headrace.service.client.local import LocalClient
from headrace.service.client.replica import Supervision
from headrace.service.client.replicated import ReplicatedClient
from headrace.serving.offline import async_llm
from headrace.serving.offline import llm as offline
from headrace.serving.offline.async_llm import AsyncLLM
from headrace.serving.offline.llm import LLM


@pytest.fixture(autouse=True)
def over_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "LocalClient", partial(LocalClient, builder=BUILDER))
    monkeypatch.setattr(async_llm, "EngineClient", partial(EngineClient, supervision=Supervision(builder=BUILDER)))


@pytest.fixture
def llm(config_only: Path) -> Iterator[LLM]:
    with LLM(str(config_only), skip_tokenizer=True, max_running_requests=4) as llm:
        yield llm


def greedy(max_tokens: int = 6, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **more)


def test_ids_in_ids_out_in_order(llm: LLM):
    prompts = [[i, 9] for i in range(20)]
    params = [greedy(1 + i % 7) for i in range(20)]
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params)
    for prompt, p, output in zip(prompts, params, outputs, strict=True):
        assert output.prompt_token_ids == prompt and output.prompt is None
        assert output.outputs[0].token_ids == continuation(prompt, p.max_tokens)
        assert output.outputs[0].finish_reason == "length"
    assert len({o.request_id for o in outputs}) == 20
    assert llm.stats().num_running == 0
    llm.check()


@pytest.mark.parametrize("prompts", [[3, 4], [[3, 4]], {"prompt_token_ids": [3, 4]}, [{"prompt_token_ids": [3, 4]}]])
def test_prompts_in_every_shape(llm: LLM, prompts: object):
    (output,) = llm.generate(prompts, greedy())
    assert output.outputs[0].token_ids == continuation([3, 4], 6)


def test_defaults_and_nothing(llm: LLM):
    assert llm.generate([], greedy()) == [] and llm.generate(prompt_token_ids=[]) == []
    (output,) = llm.generate([3, 4])
    assert len(output.outputs[0].token_ids) == SamplingParams().max_tokens
    (output,) = llm.generate([3] * 4090)  # nobody asked for more than the context has room for
    assert len(output.outputs[0].token_ids) == 6 and output.outputs[0].finish_reason == "length"
    (output,) = llm.generate([3, 4], SamplingParams(n=3, max_tokens=2), progress=True)
    assert [c.index for c in output.outputs] == [0, 1, 2]


def test_more_prompts_than_the_queue_holds(config_only: Path):
    with LLM(str(config_only), skip_tokenizer=True, max_queued=3) as llm:
        outputs = llm.generate([[i % 250] for i in range(50)], greedy(2))
    assert [o.outputs[0].token_ids for o in outputs] == [continuation([i % 250], 2) for i in range(50)]


@pytest.mark.parametrize(("arguments", "error", "words"), [
    ({"prompts": [[1], []], "sampling_params": greedy()}, RequestError, "."),
    ({"prompts": [[1], [99999]], "sampling_params": greedy()}, RequestError, "."),
    ({"prompts": [[1], [1] * 4096], "sampling_params": greedy()}, ContextLengthExceeded, "."),
    ({"prompts": ["text"], "sampling_params": greedy()}, RequestError, "without a tokenizer"),
    ({"prompts": [[1]], "sampling_params": greedy(0)}, RequestError, "max_tokens"),
    ({"prompts": [[1]], "sampling_params": [greedy(), greedy()]}, RequestError, "2 entries for 1"),
    ({"prompts": [[1]], "prompt_token_ids": [[1]]}, RequestError, "either"),
    ({}, RequestError, "either"),
    ({"prompts": [3.5]}, RequestError, "float"),
    ({"prompts": {"text": "x"}}, RequestError, "prompt_token_ids"),
    ({"prompts": [1], "errors": "ignore"}, RequestError, "errors"),
])
def test_a_wrong_call_raises_before_anything_runs(llm: LLM, arguments: dict, error: type, words: str):
    with pytest.raises(error, match=words):
        llm.generate(**arguments)
    assert llm.stats().requests_total == 0


def test_a_wrong_prompt_found_late_ends_those_that_run(llm: LLM):
    long = [[i % 250] * 3000 for i in range(40)]  # more than is prepared before the first step
    with pytest.raises(RequestError, match="99999"):
        llm.generate([*long, [99999]], greedy(2))
    assert 0 < llm.stats().requests_total < 40 and llm.stats().num_running == 0
    llm.check()
    assert [
        o.outputs[0].token_ids for o in llm.generate([[5], [6]], greedy(2))
    ] == [continuation([5], 2), continuation([6], 2)]


def test_unknown_option_names_the_nearest(config_only: Path):
    with pytest.raises(ConfigError, match="page_size"):
        LLM(str(config_only), pagesize=16)


def test_what_fails_on_the_way_raises_or_is_returned(llm: LLM):
    prompts = [[FakeExecutor.FAIL_RESULT], *[[i] for i in range(8)]]
    with pytest.raises(StepFailed):
        llm.generate(prompts, greedy())
    outputs = llm.generate(prompts, greedy(), errors="return")
    assert outputs[0].outputs[0].finish_reason == "error" and outputs[0].outputs[0].error.kind == "step_failed"
    assert [o.outputs[0].token_ids for o in outputs[-2:]] == [continuation([6], 6), continuation([7], 6)]


@contextlib.contextmanager
def usual_interrupts() -> Iterator[None]:
    """Ctrl-C raises, though it is ignored where the tests run in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def interrupt_midway(llm: LLM) -> None:
    while llm.stats().generation_tokens_total < 10:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


def test_interrupt_aborts_everything_and_the_model_stays_usable(config_only: Path):
    with usual_interrupts(), LLM(str(config_only), skip_tokenizer=True, seed=10) as llm:
        interrupter = threading.Thread(target=interrupt_midway, args=(llm,), daemon=True)
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1], [2]], greedy(4000))
        interrupter.join()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        stats = llm.stats()
        assert stats.num_running == 0 and stats.num_queued == 0 and 0 < stats.generation_tokens_total < 8000
        llm.check()
        assert llm.generate([5], greedy())[0].outputs[0].token_ids == continuation([5], 6)


def test_threads_take_turns(llm: LLM):
    results: dict[int, list[int]] = {}
    threads = [
        threading.Thread(target=lambda i=i: results.update({i: llm.generate([i], greedy(30))[0].outputs[0].token_ids}))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: continuation([i], 30) for i in range(4)}


def test_closed_and_broken_engines_say_so(config_only: Path, monkeypatch: pytest.MonkeyPatch):
    llm = LLM(str(config_only), skip_tokenizer=True)

    def lose() -> None:
        raise ConnectionError("the device is gone")

    monkeypatch.setattr(llm._client._engine.executor, "reset", lose)
    with pytest.raises(ConnectionError):
        llm.generate([FakeExecutor.FAIL_RESULT], greedy())
    with pytest.raises(EngineUnavailable, match="failed"):
        llm.generate([1], greedy())
    llm.close()
    llm.close()
    with pytest.raises(EngineUnavailable, match="closed"):
        llm.generate([1], greedy())


async def test_async_outputs_are_cumulative(config_only: Path):
    async with AsyncLLM(str(config_only), skip_tokenizer=True) as llm:
        assert llm.facts.model == "fake"
        seen = [output async for output in llm.generate([1, 2], greedy(10))]
        expected = continuation([1, 2], 10)
        for output in seen:
            known = output.outputs[0].token_ids
            assert known == expected[:len(known)]
        assert seen[-1].outputs[0].token_ids == expected and seen[-1].outputs[0].finish_reason == "length"
        with pytest.raises(StepFailed):
            await anext(llm.generate([FakeExecutor.FAIL_RESULT], greedy()))
        with pytest.raises(RequestError):
            await anext(llm.generate([], greedy()))


async def test_async_abort_and_leaving(config_only: Path):
    llm = AsyncLLM(str(config_only), skip_tokenizer=True, seed=10)
    last = None
    async for output in llm.generate([1], greedy(4000), request_id="mine"):
        last = output
        await llm.abort("mine")
    assert last.outputs[0].finish_reason == "abort"
    async for _ in llm.generate([1], greedy(4000)):
        break
    while (stats := await llm.stats()).num_running:
        await asyncio.sleep(0.01)
    assert stats.aborted_total == 2
    assert await llm.reset_prefix_cache() is True
    await llm.close()


def test_a_second_event_loop_is_refused_instead_of_waited_for(config_only: Path):
    llm = AsyncLLM(str(config_only), skip_tokenizer=True)

    async def complete(llm: AsyncLLM) -> list[int]:
        return [output async for output in llm.generate([1], greedy(2))][-1].outputs[0].token_ids

    assert asyncio.run(complete(llm)) == continuation([1], 2)
    (pid,) = llm._client.engine_pids
    with pytest.raises(EngineUnavailable, match="another event loop: use it in that one alone"):
        asyncio.run(complete(llm))
    del llm  # without `close`, whose event loop is gone
    gc.collect()
    await_gone(pid)


def test_a_deleted_model_is_freed(config_only: Path, monkeypatch: pytest.MonkeyPatch):
    llm = LLM(str(config_only), skip_tokenizer=True)
    freed: list[bool] = []
    monkeypatch.setattr(llm._client._engine, "close", lambda: freed.append(True))
    del llm
    assert freed == [True]


def test_engine_processes_of_a_deleted_model_end(config_only: Path, monkeypatch: pytest.MonkeyPatch):
    supervision = Supervision(builder=BUILDER)
    monkeypatch.setattr(offline, "ReplicatedClient", partial(ReplicatedClient, supervision=supervision))
    llm = LLM(str(config_only), skip_tokenizer=True, data_parallel_size=2)
    (output,) = llm.generate([[1]], greedy(2))
    pids = llm._client._client.engine_pids
    assert output.outputs[0].token_ids == continuation([1], 2) and None not in pids
    del llm
    for pid in pids:
        await_gone(pid)


def await_gone(pid: int) -> None:
    while psutil.pid_exists(pid):
        time.sleep(0.01)


@pytest.mark.parametrize(
    "code", ["import headrace", "from headrace import SamplingParams", "from headrace import LLM, AsyncLLM"]
)
def test_imports_cost_no_torch(code: str):
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; import sys; sys.exit('torch' in sys.modules)"], cwd=Path(__file__).parents[2],
        timeout=200
    )
    assert done.returncode == 0


def test_exports():
    import headrace

    assert headrace.LLM is LLM and headrace.AsyncLLM is AsyncLLM and headrace.SamplingParams is SamplingParams
    assert {"LLM", "AsyncLLM", "SamplingParams", "__version__"} <= set(dir(headrace))
    with pytest.raises(AttributeError, match="Nonsense"):
        _ = headrace.Nonsense
