"""Prompts of which all but one token are cached: that one is computed as a decode, and says what it does alone."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from service import random_models

from headrace import LLM, SamplingParams
from headrace.base.step import StepPlan
from headrace.execution import step as steps
from headrace.execution.rows import Rows

PAGE = 8
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 0.9, "seed": 3}, {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.7, "top_k": 5, "seed": 9, "presence_penalty": 0.5}, {"temperature": 0.0, "logprobs": 2},
]


def draw(family: str) -> dict[str, Any]:
    for seed in range(10_000):
        config = random_models.draw_config(random.Random(seed))
        if config["architectures"] == [family] and config.get("max_position_embeddings", 4096) >= 256:
            return config
    raise AssertionError(family)


@pytest.mark.parametrize("family", ["Qwen3ForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM"])
@pytest.mark.parametrize("options", [
    {}, {"overlap_depth": 1, "max_step_tokens": 24},
    {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}},
], ids=str)
def test_output_is_that_without_a_cache(
    family: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config, counts, count = draw(family), list[int](), steps.count_resumed

    def note(plan: StepPlan, rows: Rows) -> int:
        counts.append(count(plan, rows))
        return counts[-1]

    monkeypatch.setattr(steps, "count_resumed", note)
    (tmp_path / "config.json").write_text(json.dumps(config))
    dice = random.Random(family)
    prompts = [dice.choices(range(3, config["vocab_size"]), k=PAGE * (1 + i % 4) + 1) for i in range(10)]
    params = [
        SamplingParams(max_tokens=1 + i % 7, ignore_eos=True, detokenize=False, **KINDS[i % len(KINDS)])
        for i in range(len(prompts))
    ]

    def generate(**more: Any) -> list[list[int]]:
        with LLM(
            str(tmp_path), load_format="dummy", skip_tokenizer=True, device="cpu", dtype="float32", threads=1,
            kv_pages=200, page_size=PAGE, max_model_len=120, **more
        ) as llm:
            outputs = [llm.generate(prompt_token_ids=prompts, sampling_params=params) for _ in range(2)]
            llm.check()
        return [output.outputs[0].token_ids for output in outputs[-1]]

    alone = generate(prefix_cache=False)
    assert not any(counts)
    assert generate(**options) == alone
    assert sum(counts) >= len(prompts) // 2, "steps with a chunk of more tokens before them leave some as chunks"
