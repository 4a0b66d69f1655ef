"""Prefixes in host memory, served: the same greedy tokens with and without, for every kind of cache."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import test_deepseek_v4_served as v4
import test_families_served as families

from headrace import LLM, SamplingParams
from headrace.base.errors import ConfigError

PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
GB = 0.02
SMALL: dict[str, dict[str, Any]] = {"Llama": {}, **families.CASES}


def save(name: str, folder: Path) -> tuple[str, dict[str, Any], list[list[int]]]:
    """A saved model, options with a cache that holds one long prompt at a time, and prompts."""
    if name == "DeepseekV4":
        v4.make_model().save_pretrained(folder)
        draw = random.Random(3)
        prompts = [[draw.randrange(1, v4.VOCAB) for _ in range(length)] for length in (700, 520, 515, 769)]
        return str(folder), {**v4.BASE, "kv_pages": 6}, prompts
    families.GPU_CASES.setdefault(name, SMALL[name])
    families.make_model(name).save_pretrained(folder)
    return str(folder), {**families.BASE, "kv_pages": 12, "max_model_len": 80}, families.make_prompts()


def run(llm: LLM, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    """One prompt at a time: tokens, and how many prompt tokens were cached."""
    outputs = [llm.generate([prompt], PARAMS)[0] for prompt in prompts]
    return [output.outputs[0].token_ids for output in outputs], sum(o.num_cached_tokens for o in outputs)


@pytest.mark.parametrize("name", [*SMALL, "DeepseekV4"])
def test_the_host_changes_no_token_and_saves_prefills(name: str, tmp_path: Path):
    folder, options, prompts = save(name, tmp_path)
    with LLM(folder, skip_tokenizer=True, prefix_cache=False, **options) as llm:
        expected, _ = run(llm, prompts * 2)
    with LLM(folder, skip_tokenizer=True, **options) as llm:
        without, cached_without = run(llm, prompts * 2)
    with LLM(folder, skip_tokenizer=True, host_cache_gb=GB, **options) as llm:
        tokens, cached = run(llm, prompts * 2)
        together = [o.outputs[0].token_ids for o in llm.generate(prompts * 3, PARAMS)]
        stats = llm.stats()
    assert tokens == without == expected and together == expected[: len(prompts)] * 3
    assert cached > cached_without, "what the device evicted came back"
    assert stats.host.num_pages > 0 and stats.host.read_pages_total > 0 and stats.host.failed_pages_total == 0


@pytest.mark.cuda
@pytest.mark.parametrize("name", [*SMALL, "DeepseekV4"])
def test_a_gpu_changes_no_token_either(name: str, tmp_path: Path):
    folder, options, prompts = save(name, tmp_path)
    options |= {"device": "cuda"}
    with LLM(folder, skip_tokenizer=True, **options) as llm:
        expected, _ = run(llm, prompts * 2)
    with LLM(folder, skip_tokenizer=True, host_cache_gb=GB, **options) as llm:
        tokens, _ = run(llm, prompts * 2)
        stats = llm.stats()
    assert tokens == expected and stats.host.read_pages_total > 0


def test_two_ranks_move_their_parts_of_a_page_together(tmp_path: Path):
    folder, options, prompts = save("Llama", tmp_path)
    with LLM(folder, skip_tokenizer=True, prefix_cache=False, **options) as llm:
        expected, _ = run(llm, prompts * 2)
    with LLM(folder, skip_tokenizer=True, host_cache_gb=GB, tensor_parallel_size=2, **options) as llm:
        tokens, cached = run(llm, prompts * 2)
        stats = llm.stats()
    assert tokens == expected
    assert stats.host.read_pages_total > 0 and stats.host.failed_pages_total == 0 and cached > 0


def test_too_little_and_too_much_host_memory_are_refused(tmp_path: Path):
    folder, options, _ = save("Llama", tmp_path)
    with pytest.raises(ConfigError, match="leaves no room for a page"):
        LLM(folder, skip_tokenizer=True, host_cache_gb=1e-6, **options)
    with pytest.raises(ConfigError, match="lower it"):
        LLM(folder, skip_tokenizer=True, host_cache_gb=1e6, **options)
    with pytest.raises(ConfigError, match="leave out one"):
        LLM(folder, skip_tokenizer=True, host_cache_gb=GB, prefix_cache=False, **options)
