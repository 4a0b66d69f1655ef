"""Adapters on a GPU, in captured steps, against engines over merged weights."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from adapter_rig import VOCAB, Answer, Rig, ask, drain

pytestmark = pytest.mark.cuda
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    made = Rig(tmp_path_factory.mktemp("adapters"), shape=SHAPE, device="cuda", dtype="bfloat16")
    yield made
    made.close()


def test_captured_steps_with_adapters_say_what_merged_weights_say(rig: Rig):
    """Rounding differs between the two, so tokens are compared up to the first near tie."""
    prompts = [random.Random(i).choices(range(3, VOCAB), k=5 + 9 * (i % 3)) for i in range(8)]
    requests = [ask(f"r{i}", prompt, ("a0", "a1", "a2", "")[i % 4]) for i, prompt in enumerate(prompts)]
    for request in requests:
        rig.engine.submit(request)
    answers = drain(rig.engine)
    assert all(len(answers[request.request_id].token_ids) == 8 for request in requests)
    num_same = 0
    for request in requests:
        found, expected = answers[request.request_id], rig.expect(request.adapter, request)
        num_same += check_start(found, expected)
    assert num_same >= 5, "most answers are the same to their end"
    others = rig.expect("", requests[0])
    assert abs(others.logprobs[0] - answers["r0"].logprobs[0]) > 0.05 or others.token_ids != answers["r0"].token_ids


def check_start(found: Answer, expected: Answer) -> bool:
    """The same tokens, with near probabilities, up to where they differ; returns whether they do not."""
    for i, (own, theirs) in enumerate(zip(found.token_ids, expected.token_ids, strict=True)):
        difference = abs(found.logprobs[i] - expected.logprobs[i])
        assert difference < 0.35, f"token {i}: log-probabilities differ by {difference}"
        if own != theirs:
            assert i > 0 or difference < 0.1
            return False
    return True


def test_the_graphs_of_steps_with_adapters_are_used(rig: Rig):
    paths = rig.engine.executor._runner.paths
    used = [type(path).__name__ for path in paths]
    assert used.count("DecodeGraphPath") == 3, "of pages in common, of others, and of adapters"
    assert torch.cuda.is_available()


def test_steps_of_many_rows_and_loads_beside_them(tmp_path: Path):
    """More rows than fuse additions with norms row by row, and more adapters than slots: loads go on all the time."""
    rig = Rig(
        tmp_path, shape=SHAPE, device="cuda", dtype="bfloat16", max_loras=2, max_running_requests=80,
        max_step_tokens=512
    )
    prompts = [random.Random(i).choices(range(3, VOCAB), k=5 + i % 7) for i in range(78)]
    requests = [ask(f"r{i}", prompt, ("a0", "a1", "", "a2")[i % 4], max_tokens=5) for i, prompt in enumerate(prompts)]
    for request in requests:
        rig.engine.submit(request)
    answers = drain(rig.engine)
    assert all(len(answers[request.request_id].token_ids) == 5 for request in requests)
    chosen = requests[:: 5]
    num_same = sum(check_start(answers[r.request_id], rig.expect(r.adapter, r)) for r in chosen)
    assert num_same >= len(chosen) // 2, "most answers are the same to their end"
    rig.close()
