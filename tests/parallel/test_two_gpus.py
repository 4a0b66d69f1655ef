"""Two GPUs compute what one does, by own collectives: tokens in float32, in graphs and without."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel.test_narrowing import write
from service import random_models

from headrace import LLM, SamplingParams

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
FAMILIES = ("LlamaForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM")


def draw(family: str) -> dict[str, Any]:
    """A random configuration with head dims that GPU backends serve."""
    for seed in range(10_000):
        config = random_models.draw_config(random.Random(seed))
        heads = config["num_attention_heads"]
        if config["architectures"] == [family] and heads >= 4 and 128 % heads == 0:
            latent = family.startswith("Deepseek")
            return config if latent else {**config, "head_dim": 64, "hidden_size": 128, "intermediate_size": 256}
    raise AssertionError(family)


def generate(folder: Path, **options: Any) -> list[list[int]]:
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    prompts = [[(7 * i * j + 3) % vocab for j in range(5 + 30 * i)] for i in range(1, 6)]
    params = [
        SamplingParams(max_tokens=24, ignore_eos=True, temperature=temperature, seed=4, detokenize=False)
        for temperature in (0.0, 0.0, 0.8, 0.0, 0.0)
    ]
    with LLM(
        str(folder), skip_tokenizer=True, dtype="float32", device="cuda", kv_pages=256, max_step_tokens=64, **options
    ) as llm:
        rounds = [llm.generate(prompt_token_ids=prompts, sampling_params=params) for _ in range(2)]
        llm.check()
    return [output.outputs[0].token_ids for outputs in rounds for output in outputs]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_one_gpu(family: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """Weights come from a file, of which each rank copies its part."""
    write(tmp_path, draw(family))
    alone = generate(tmp_path)
    capfd.readouterr()
    assert generate(tmp_path, tensor_parallel_size=2) == alone
    told = [line for line in capfd.readouterr().err.splitlines() if "collectives" in line]
    assert len(told) == 1 and "own collectives" in told[0], "one line of the ranks' log says which serve"
    if family in random_models.MIXTURES:
        assert generate(tmp_path, tensor_parallel_size=2, enable_expert_parallel=True) == alone


def test_a_step_without_graphs(tmp_path: Path):
    write(tmp_path, draw("LlamaForCausalLM"))
    assert generate(tmp_path, tensor_parallel_size=2, graphs="off") == generate(tmp_path, graphs="off")
