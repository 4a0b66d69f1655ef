"""Steps on a GPU: no launch waits for the device, plans may overlap, and seeded samples ignore the batch."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from driver import Driver

from headrace.base.config import engine_config
from headrace.base.sampling import LogitRules, Penalties, SamplingSpec
from headrace.execution.building import build_executor
from headrace.execution.executor import LocalExecutor

pytestmark = pytest.mark.cuda

VOCAB_SIZE, PAGE_SIZE, NUM_PAGES = 512, 16, 200
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB_SIZE, "hidden_size": 256,
    "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16", "eos_token_id": 2,
}
SPECS = [
    SamplingSpec(),
    SamplingSpec(temperature=0.8, top_k=30, top_p=0.9, min_p=0.01, seed=4),
    SamplingSpec(temperature=1.0, seed=5, num_logprobs=3, penalties=Penalties(1.2, 0.3, 0.1)),
    SamplingSpec(rules=LogitRules({5: 2.0}, [], [[7], [8, 9]], 4, [2, 3]), num_prompt_logprobs=2),
    SamplingSpec(temperature=0.7, top_p=0.8, seed=6, rules=LogitRules(allowed_ids=list(range(50, 90)))),
]


@pytest.fixture(scope="module", params=["off", "lazy", "on"])
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalExecutor]:
    folder: Path = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    built = build_executor(engine_config(
        model=str(folder), load_format="dummy", device="cuda", kv_pages=NUM_PAGES, page_size=PAGE_SIZE,
        max_running_requests=8, max_step_tokens=256,
        graphs=request.param,
    ))
    yield built
    built.close()


def prompt_of(row: int) -> list[int]:
    return random.Random(row).choices(range(VOCAB_SIZE), k=20 + 7 * row)


def run(executor: LocalExecutor, specs: dict[int, SamplingSpec], *, depth: int, steps: int) -> dict[int, list[int]]:
    """Tokens by row, with ``depth`` plans in flight."""
    driver = Driver(executor, num_pages=NUM_PAGES, page_size=PAGE_SIZE, num_groups=1)
    for row, spec in specs.items():
        driver.start(row, prompt_of(row), spec)
    tokens: dict[int, list[int]] = {row: [] for row in specs}
    flying = []
    for step in range(steps + depth):
        if step < steps:
            plan = driver.plan({row: 200 for row in specs})
            torch.cuda.set_sync_debug_mode("error")
            try:
                flying.append((plan, executor.execute(plan)))
            finally:
                torch.cuda.set_sync_debug_mode("default")
        if len(flying) > depth - 1 or step >= steps:
            plan, pending = flying.pop(0) if flying else (None, None)
            if plan is not None:
                result = pending.result()
                assert not result.failed_rows
                sampled = [row for row, samples in zip(plan.rows, plan.samples, strict=True) if samples]
                for row, token in zip(sampled, result.token_ids, strict=True):
                    tokens[row].append(token)
    for row in specs:
        driver.release(row)
    executor.execute(driver.plan({})).result()
    return tokens


def test_launches_do_not_wait_and_overlap_changes_nothing(executor: LocalExecutor):
    specs = dict(enumerate(SPECS))
    run(executor, {0: SPECS[0]}, depth=1, steps=1)
    alone = run(executor, specs, depth=1, steps=12)
    assert run(executor, specs, depth=2, steps=12) == alone
    assert all(len(tokens) == 12 for tokens in alone.values())
    assert set(alone[4]) <= set(range(50, 90)) and not {7} & set(alone[3]) and not {2, 3} & set(alone[3][:4])


def test_greedy_rows_only(executor: LocalExecutor):
    specs = dict.fromkeys(range(5), SamplingSpec())
    assert run(executor, specs, depth=2, steps=10) == run(executor, specs, depth=1, steps=10)


def test_the_last_token_of_a_cached_prompt_decodes_in_a_graph(executor: LocalExecutor):
    """What its row had before does not matter; no launch waits for the device."""
    count, expected = 3, run(executor, {row: SPECS[0] for row in range(3)}, depth=1, steps=4)
    driver = Driver(executor, num_pages=NUM_PAGES, page_size=PAGE_SIZE, num_groups=1)
    for row in range(count):
        driver.start(row, prompt_of(row), SPECS[0])
    tokens: dict[int, list[int]] = {row: [] for row in range(count)}
    # row by row: all but the last token beside the decodes of the rows before, then that one as a decode among them
    for row in range(count):
        for chunk in (len(prompt_of(row)) - 1, 1):
            plan = driver.plan({row: chunk})
            torch.cuda.set_sync_debug_mode("error")
            try:
                pending = executor.execute(plan)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            sampled = [row for row, samples in zip(plan.rows, plan.samples, strict=True) if samples]
            for own, token in zip(sampled, pending.result().token_ids, strict=True):
                tokens[own].append(token)
    for row in range(count):
        driver.release(row)
    executor.execute(driver.plan({})).result()
    for row in range(count):
        assert tokens[row][:2] == expected[row][:2][: len(tokens[row])], row
