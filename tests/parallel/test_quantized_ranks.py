"""Quantised checkpoints on several ranks: each takes its part of codes, scales and groups, and together they compute
what one computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from layers.format_cases import CASES, LLAMA, QWEN_MOE, make_checkpoint
from parallel.rank_processes import RankProcesses

from headrace import LLM, SamplingParams
from headrace.service import build

PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=2, detokenize=False)
UNEVEN = {
    "hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32,
}
"""Sizes whose shares end inside blocks of 128 and groups of 64, and that three ranks divide."""


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankProcesses]:
    made = RankProcesses(request.param)
    yield made
    made.close()


def generate(options: dict[str, Any]) -> list[Any]:
    prompts = [[(7 * i * j + 3) % 160 for j in range(5 + 9 * i)] for i in range(1, 4)]
    llm = LLM(**options)
    try:
        return [output.outputs[0] for output in llm.generate([{"prompt_token_ids": p} for p in prompts], PARAMS)]
    finally:
        llm.close()


@pytest.mark.parametrize(("name", "config", "keeps"), [
    ("fp8-block", LLAMA, True), ("ct-int8", LLAMA, True), ("gptq-order", LLAMA, False),
    ("ct-int4-asymmetric", LLAMA, False), ("awq", QWEN_MOE, True),
    ("gptq-order", {**QWEN_MOE, "moe_intermediate_size": 96}, True),
    *(pytest.param(name, config, keeps, marks=pytest.mark.slow) for name, config, keeps in (
        ("fp8-block", LLAMA, False), ("ct-int8", LLAMA, False), ("gptq-order", LLAMA, True),
        ("ct-int4-asymmetric", LLAMA, True), ("awq", QWEN_MOE, False),
    )),
])
def test_tokens_of_several_ranks_are_those_of_one(
    ranks: RankProcesses, name: str, config: dict[str, Any], keeps: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch
):
    make_checkpoint(tmp_path / "m", {**config, **(UNEVEN if config is LLAMA else {})}, CASES[name])
    options = {
        "model": str(tmp_path / "m"), "skip_tokenizer": True, "dtype": "float32", "device": "cpu", "max_model_len": 128,
        "kv_pages": 64, **({} if keeps else {"quantization": "none"}),
    }
    alone = generate(options)
    monkeypatch.setattr(build, "build_executor", ranks.builder(options))
    together = generate(options)
    for one, other in zip(alone, together, strict=True):
        # rounded inputs: a group's scale is that of the rank's part of it
        tolerance = 0.15 if keeps and CASES[name].is_packed else 1e-3
        first, second = one.logprobs[0], other.logprobs[0]
        assert other.token_ids[0] == one.token_ids[0]
        assert second.top_logprobs == pytest.approx(first.top_logprobs, abs=tolerance)
        if tolerance < 0.01:
            assert other.token_ids == one.token_ids
