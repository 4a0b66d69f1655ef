"""`LLM` with several replicas: outputs in the order of the inputs, failures, interrupts. The model is a fake."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from fakes import BUILDER, FakeExecutor, continuation

from headrace import LLM, SamplingParams
from headrace.base.errors import EngineUnavailable, HeadraceError, ModelError, RequestError
from headrace.service.client.replica import Supervision
from headrace.service.client.replicated import ReplicatedClient
from headrace.serving.offline import llm as offline


@pytest.fixture
def start_llm(config_only: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LLM]]:
    opened: list[LLM] = []

    def start(builder: str = BUILDER, **options: object) -> LLM:
        client = partial(ReplicatedClient, supervision=Supervision(builder=builder))
        monkeypatch.setattr(offline, "ReplicatedClient", client)
        opened.append(LLM(config_only, skip_tokenizer=True, **{"data_parallel_size": 2, **options}))
        return opened[-1]

    yield start
    for llm in opened:
        llm.close()


def greedy(count: int, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, detokenize=False, **more)


def test_outputs_are_in_the_order_of_the_prompts(start_llm):
    llm = start_llm()
    prompts = [[i % 200, i // 200] for i in range(300)]
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=[greedy(1 + i % 30) for i in range(300)])
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        assert output.prompt_token_ids == prompt and output.outputs[0].token_ids == continuation(prompt, 1 + i % 30)
    shares = [r.last_stats.requests_total for r in llm._client._client.replicas]
    assert sum(shares) == 302 and min(shares) > 30
    assert llm.stats().num_running == 0 and llm.reset_prefix_cache()
    llm.check()


def test_a_window_no_larger_than_the_queue(start_llm):
    llm = start_llm(max_queued=4, max_running_requests=1)
    outputs = llm.generate(prompt_token_ids=[[i] for i in range(60)], sampling_params=greedy(2, n=2))
    assert all(choice.token_ids == continuation([i], 2) for i, o in enumerate(outputs) for choice in o.outputs)


def test_a_prompt_that_is_wrong_ends_the_batch(start_llm):
    llm = start_llm()
    with pytest.raises(RequestError):
        llm.generate(prompt_token_ids=[[1], [2], [9999]], sampling_params=greedy(4000))
    assert llm.generate(prompt_token_ids=[[5]], sampling_params=greedy(2))[0].outputs[0].token_ids == continuation(
        [5], 2
    )


def test_a_replica_dies_within_a_batch(start_llm):
    llm = start_llm()
    prompts = [[i] for i in range(20)] + [[FakeExecutor.DIE]] + [[i, 1] for i in range(20)]
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=greedy(20), errors="return")
    failed = [output.outputs[0].error for output in outputs if output.outputs[0].error is not None]
    assert failed and all(error.kind == "engine_unavailable" for error in failed) and len(failed) < 41
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].error or output.outputs[0].token_ids == continuation(prompt, 20)
    with pytest.raises(EngineUnavailable):
        llm.generate(prompt_token_ids=[[FakeExecutor.DIE]], sampling_params=greedy(1))


def test_an_interrupt_leaves_it_usable(start_llm):
    llm = start_llm(seed=20)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompt_token_ids=[[1], [2]], sampling_params=greedy(4000))
    assert llm.generate(prompt_token_ids=[[5]], sampling_params=greedy(2))[0].outputs[0].token_ids == continuation(
        [5], 2
    )


def test_closing_ends_the_processes(start_llm):
    llm = start_llm()
    pids = llm._client._client.engine_pids
    llm.close()
    llm.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(HeadraceError, match="closed"):
        llm.generate(prompt_token_ids=[[1]], sampling_params=greedy(1))


def test_a_replica_that_cannot_start(start_llm):
    with pytest.raises(ModelError, match="replica 1: layer 3 is missing"):
        start_llm(builder="fakes:refuse_second")
    assert not any(thread.name == "replicas" for thread in threading.enumerate())
