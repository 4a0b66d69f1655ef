"""Adapters on two ranks that divide each layer, beside drafts and grammars, against one rank."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from execution.tiny_checkpoint import write_tiny_checkpoint
from parallel.rank_processes import RankProcesses
from safetensors.torch import load_file, save_file

from headrace import LLM, SamplingParams
from headrace.base.adapters import LoRARequest
from headrace.base.errors import ConfigError
from headrace.service import build

OPTIONS = {
    "device": "cpu", "dtype": "float32", "max_model_len": 160, "kv_pages": 240, "page_size": 4, "threads": 1,
    "skip_tokenizer": True, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8,
}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
VOCAB = 199


def write_adapter(base: Path, folder: Path, seed: int, **fields: Any) -> Path:
    """Random numbers for every linear; with ``use_dora`` magnitudes too."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if module.rpartition(".")[2] in TARGETS:
            tensors[f"{module}.lora_A.weight"] = torch.randn(4, weight.shape[1], generator=generator) * 0.2
            tensors[f"{module}.lora_B.weight"] = torch.randn(weight.shape[0], 4, generator=generator) * 0.2
            if fields.get("use_dora"):
                magnitude = weight.norm(dim=1) * (0.6 + torch.rand(weight.shape[0], generator=generator))
                tensors[f"{module}.lora_magnitude_vector"] = magnitude
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(TARGETS), "bias": "none", **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranked")
    made = write_tiny_checkpoint(folder / "base", 5)
    write_adapter(made, folder / "plain", 1)
    write_adapter(made, folder / "other", 2)
    write_adapter(made, folder / "dora", 3, use_dora=True)
    return made


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    made = RankProcesses(2, 1)
    yield made
    made.close()


def generate(llm: LLM, base: Path) -> list[Any]:
    """Twice, the second time over what is cached; three adapters take turns in two slots."""
    chance = random.Random(4)
    prompts = [[chance.randrange(3, VOCAB) for _ in range(chance.randint(1, 30))] for _ in range(8)]
    names = ["plain", "other", "dora", None] * 2
    adapters = [None if name is None else LoRARequest(name, str(base.parent / name)) for name in names]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
    outputs = [
        output for _ in range(2)
        for output in llm.generate(prompt_token_ids=prompts, sampling_params=params, lora_request=adapters)
    ]
    llm.check()
    return outputs


def compare(alone: list[Any], together: list[Any]) -> None:
    for one, two in zip(alone, together, strict=True):
        assert two.outputs[0].token_ids == one.outputs[0].token_ids
        its, mine = (torch.tensor([entry.logprob for entry in o.outputs[0].logprobs]) for o in (one, two))
        torch.testing.assert_close(mine, its, atol=2e-3, rtol=2e-3)


def test_two_ranks_say_what_one_says(base: Path, ranks: RankProcesses, monkeypatch: pytest.MonkeyPatch):
    options = {**OPTIONS, "model": str(base)}
    with LLM(**options) as llm:
        alone = generate(llm, base)
    assert len({tuple(output.outputs[0].token_ids) for output in alone}) > 6
    monkeypatch.setattr(build, "build_executor", ranks.builder(options))
    with LLM(**options) as llm:
        compare(alone, generate(llm, base))


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model"])
def test_drafts_change_nothing(base: Path, method: str):
    """Those of a model are the base's, for all rows."""
    options = {**OPTIONS, "model": str(base)}
    with LLM(**options) as llm:
        alone = generate(llm, base)
    own = {"model": str(base)} if method == "draft_model" else {}
    stated = json.dumps({"method": method, "num_speculative_tokens": 3, **own})
    with LLM(**options, speculative_config=stated) as llm:
        compare(alone, generate(llm, base))


def test_small_steps_and_few_pages_change_nothing(base: Path):
    """Prompts in chunks, requests that are retracted, and two plans in flight."""
    options = {**OPTIONS, "model": str(base)}
    with LLM(**options) as llm:
        alone = generate(llm, base)
    options |= {"kv_pages": 44, "max_model_len": 64, "max_step_tokens": 9, "overlap_depth": 2}
    with LLM(**options) as llm:
        compare(alone, generate(llm, base))


def test_pipeline_stages_are_refused(base: Path):
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        LLM(**OPTIONS, model=str(base), pipeline_parallel_size=2)
