"""Data-parallel attention: replicas with requests of their own divide experts, and generate what one engine does."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from parallel.test_tensor_parallel import COUNTS, DEEPSEEK_V4, draw_config

from headrace import LLM, SamplingParams
from headrace.base.config import engine_config
from headrace.service.client.admin import EngineAdmin
from headrace.service.client.client import EngineClient

PATIENCE_S = 200.0
OPTIONS = {
    "load_format": "dummy", "skip_tokenizer": True, "dtype": "float32", "device": "cpu", "threads": 1,
    "max_model_len": 256, "kv_pages": 64, "max_step_tokens": 24,
}
NUM_REQUESTS = 12


def make_requests(vocab_size: int) -> list[tuple[list[int], SamplingParams]]:
    """Of very different lengths, some of which share a prefix."""
    draw = random.Random(3)
    prompts = [[draw.randrange(vocab_size) for _ in range(draw.randrange(1, 70))] for _ in range(NUM_REQUESTS)]
    prompts[5] = prompts[4] + prompts[5][:9]
    return [
        (prompt, SamplingParams(max_tokens=draw.randrange(1, 20), ignore_eos=True, detokenize=False, **own))
        for prompt in prompts
        for own in (draw.choice([{"temperature": 0.0}, {"temperature": 0.9, "seed": 3, "top_k": 30}]),)
    ]


async def read(stream: Any) -> tuple[list[int], str | None]:
    tokens, error = [], None
    async for delta in stream:
        tokens += delta.token_ids
        error = delta.error.kind if delta.error is not None else error
    return tokens, error


async def generate(client: EngineClient, requests: list[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    """Requests that arrive at random times; the second round comes one by one, with all other replicas idle."""
    draw, running = random.Random(8), []
    for prompt, params in requests:
        running.append(asyncio.create_task(read(client.submit(prompt, params))))
        if draw.random() < 0.5:
            await asyncio.sleep(draw.random() * 0.1)
    outputs = await asyncio.gather(*running) + [await read(client.submit(*request)) for request in requests[:4]]
    assert not any(error for _, error in outputs)
    return [tokens for tokens, _ in outputs]


@pytest.mark.parametrize(("family", "own"), [
    ("MixtralForCausalLM", {"enable_eplb": True}), ("Qwen3MoeForCausalLM", {"all2all_backend": "all-to-all"}),
    pytest.param("GptOssForCausalLM", {"all2all_backend": "all-gather"}, marks=pytest.mark.slow),
    ("DeepseekV3ForCausalLM", {"tensor_parallel_size": 2}),
    ("DeepseekV4ForCausalLM", {"all2all_backend": "all-gather"}),
    ("DeepseekV4ForCausalLM", {"expert_dtype": "fp4", "enable_eplb": True, "all2all_backend": "all-to-all"}),
    pytest.param(
        "DeepseekV4ForCausalLM", {"enable_eplb": True, "tensor_parallel_size": 2}, marks=pytest.mark.slow
    ),
])
async def test_tokens_are_those_of_one_engine(family: str, own: dict[str, Any], tmp_path: Path):
    config, own = DEEPSEEK_V4 if family == "DeepseekV4ForCausalLM" else draw_config(family, 4), dict(own)
    if "expert_dtype" in own:
        config = {**config, "expert_dtype": own.pop("expert_dtype")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    requests = make_requests(config["vocab_size"])
    with LLM(tmp_path, **OPTIONS) as llm:
        alone = [
            output.outputs[0].token_ids for output in
            llm.generate([{"prompt_token_ids": prompt} for prompt, _ in requests], [params for _, params in requests])
        ]
    if own.get("enable_eplb"):
        count = next(config[name] for name in COUNTS[1:] if config.get(name))
        ranks = 2 * own.get("tensor_parallel_size", 1)
        keys = {"step_interval": 8, "window_size": 6, "num_redundant_experts": -count % ranks + ranks}
        own = {**own, "eplb_config": json.dumps(keys)}
    client = EngineClient(engine_config(
        model=str(tmp_path), data_parallel_size=2, enable_expert_parallel=True, data_parallel_policy="round-robin",
        **OPTIONS, **own,
    ))
    try:
        await client.start(has_tokenizer=False)
        await asyncio.wait_for(client.wait_ready(), PATIENCE_S)
        assert await generate(client, requests) == alone + alone[:4]
        assert min(replica.last_stats.requests_total for replica in client.replicas) > 3
        experts = (await client.stats()).experts
        assert bool(own.get("enable_eplb")) == bool(experts.num_moved) == bool(sum(experts.tokens_by_rank))
        if own.get("all2all_backend"):
            await asyncio.wait_for(sleep_and_replace(client, str(tmp_path)), PATIENCE_S)
            assert (await generate(client, requests[:5]))[:5] == alone[:5]
        if own.get("tensor_parallel_size", 1) > 1:
            await kill_a_worker(client, requests[0][0])
            assert (await generate(client, requests))[:NUM_REQUESTS] == alone
    finally:
        await client.close()


async def sleep_and_replace(client: EngineClient, folder: str) -> None:
    """All replicas give up their memory, take it back, and load the same weights again while requests run."""
    admin = EngineAdmin(client)
    await admin.sleep()
    assert client.state == "asleep"
    await admin.wake()
    long = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True, detokenize=False)
    running = [asyncio.create_task(read(client.submit([1 + i], long))) for i in range(3)]
    await asyncio.sleep(0.1)
    await admin.replace_weights(folder, load_format="dummy")
    assert [(len(tokens), error) for tokens, error in await asyncio.gather(*running)] == [(60, None)] * 3


async def kill_a_worker(client: EngineClient, prompt: list[int]) -> None:
    """Under load: all ranks of all replicas end, their requests with a typed error, and all come back."""
    engines = [psutil.Process(pid) for pid in client.engine_pids]
    everybody = [*engines, *(child for engine in engines for child in engine.children())]
    assert len(everybody) == 4
    endless = SamplingParams(max_tokens=180, temperature=0.0, ignore_eos=True, detokenize=False)
    running = [asyncio.create_task(read(client.submit(prompt, endless))) for _ in range(4)]
    await asyncio.sleep(0.2)
    began = time.monotonic()
    os.kill(engines[1].children()[0].pid, signal.SIGKILL)
    assert [error for _, error in await asyncio.gather(*running)] == ["engine_unavailable"] * 4
    assert time.monotonic() - began < 10.0
    deadline = began + PATIENCE_S
    while [replica.state for replica in client.replicas] != ["ready"] * 2:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    assert not any(process.is_running() for process in everybody)
