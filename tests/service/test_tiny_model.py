"""The offline API over a real, tiny, random model: what a request says does not depend on how it was scheduled."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace import LLM, AsyncLLM, SamplingParams
from headrace.service.client.outputs import GenerationOutput

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 199, "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "torch_dtype": "float32",
    "initializer_range": 0.2,
}
BASE = {"load_format": "dummy", "device": "cpu", "dtype": "float32", "kv_pages": 256, "page_size": 16, "threads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def make_prompts() -> list[list[int]]:
    """Some share long prefixes, some are one token long."""
    draw = random.Random(3)
    shared = [draw.randrange(199) for _ in range(70)]
    prompts = [
        shared[:length] + [draw.randrange(199) for _ in range(extra)] for length,
        extra in ((70, 1), (70, 30), (40, 5), (64, 0), (0, 1), (0, 33), (16, 1))
    ]
    return [*prompts, prompts[1]]


PARAMS = [SamplingParams(temperature=0.0, max_tokens=5 + 5 * i, ignore_eos=True) for i in range(8)]


def generate(folder: Path, **options: object) -> list[GenerationOutput]:
    with LLM(str(folder), **(BASE | options)) as llm:
        outputs = llm.generate(prompt_token_ids=make_prompts(), sampling_params=PARAMS)
        again = llm.generate(prompt_token_ids=make_prompts(), sampling_params=PARAMS)
        assert token_ids(again) == token_ids(outputs), "a second round, over whatever is cached now, says the same"
        llm.check()
        stats = llm.stats()
        assert stats.num_running == stats.num_queued == stats.num_used_pages == 0
        if options.get("prefix_cache", True) and options.get("kv_pages", 256) >= 256:
            assert again[1].num_cached_tokens >= 64
    return outputs


def token_ids(outputs: list[GenerationOutput]) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in outputs]


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[int]]:
    """Each prompt by itself, in one piece, without any cache."""
    with LLM(str(folder), **BASE, prefix_cache=False, overlap_depth=1, max_step_tokens=512) as llm:
        results = [
            llm.generate(prompt_token_ids=[p], sampling_params=q)[0] for p,
            q in zip(make_prompts(), PARAMS, strict=True)
        ]
    assert [len(t) for t in token_ids(results)] == [q.max_tokens for q in PARAMS]
    assert len({tuple(t[:5]) for t in token_ids(results)}) > 3, "the model says different things to different prompts"
    return token_ids(results)


@pytest.mark.parametrize("options", [
    {},
    {"max_step_tokens": 8},
    {"max_step_tokens": 24, "overlap_depth": 2},
    {"overlap_depth": 2, "prefix_cache": False, "max_running_requests": 2},
    {"kv_pages": 12},
    {"kv_pages": 12, "overlap_depth": 2, "max_step_tokens": 32},
    {"page_size": 1, "kv_pages": 2048},
    {"page_size": 64, "kv_pages": 64},
    {"max_running_requests": 1},
    {"policy": "longest-prefix", "share_prefix_in_batch": False},
], ids=str)
def test_greedy_output_is_the_same_however_it_is_scheduled(folder: Path, alone: list[list[int]], options: dict):
    assert token_ids(generate(folder, **options)) == alone


@pytest.mark.parametrize("depth", [1, 2])
def test_greedy_output_survives_retraction(folder: Path, depth: int):
    """Requests that stop at once make the scheduler expect short outputs; then long ones outgrow the pages."""
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    prompts = [[i, 7, i] for i in range(8)]
    with LLM(str(folder), **BASE | {"kv_pages": 256}, overlap_depth=depth) as llm:
        expected = token_ids(llm.generate(prompt_token_ids=prompts, sampling_params=params))
    with LLM(str(folder), **BASE | {"kv_pages": 14}, overlap_depth=depth) as llm:
        for _ in range(10):
            llm.generate(
                prompt_token_ids=prompts[:1],
                sampling_params=SamplingParams(temperature=0.0, max_tokens=60, stop_token_ids=[expected[0][0]])
            )
        assert token_ids(llm.generate(prompt_token_ids=prompts, sampling_params=params)) == expected
        llm.check()
        assert llm.stats().retracted_total > 0


def test_a_nucleus_of_nothing_is_the_argmax(folder: Path, alone: list[list[int]]):
    params = [
        SamplingParams(temperature=1.5, top_p=0, top_k=20, max_tokens=len(expected), ignore_eos=True)
        for expected in alone
    ]
    with LLM(str(folder), **BASE) as llm:
        assert token_ids(llm.generate(prompt_token_ids=make_prompts(), sampling_params=params)) == alone


def test_samplers_against_repetition_are_the_same_however_it_is_scheduled(folder: Path):
    """DRY looks at the whole history and XTC decides at each position: neither may depend on batches, plans in flight,
    retractions or what was cached."""
    common = {"max_tokens": 40, "ignore_eos": True, "dry_multiplier": 1.5, "dry_base": 2.0, "dry_allowed_length": 1}
    params = [
        SamplingParams(temperature=0.0, **common),
        SamplingParams(temperature=0.7, seed=5, xtc_probability=0.5, xtc_threshold=0.05, **common),
        SamplingParams(temperature=0.9, seed=6, xtc_probability=0.5, xtc_threshold=0.05, top_k=20, **common),
        SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.0, repetition_penalty=1.2, **{**common, "dry_penalty_last_n": 8}),
        *[SamplingParams(temperature=0.8, seed=i, **common) for i in range(3)],
    ]
    with LLM(str(folder), **BASE, prefix_cache=False, overlap_depth=1) as llm:
        alone = [
            token_ids(llm.generate(prompt_token_ids=[p], sampling_params=q))[0]
            for p, q in zip(make_prompts(), params, strict=True)
        ]
        plain = llm.generate(prompt_token_ids=make_prompts()[:1], sampling_params=params[3])
        assert token_ids(plain)[0] != alone[0], "DRY changes the output"
    drafts = {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 4}'}
    for options in (
        {"kv_pages": 14, "overlap_depth": 2}, {"max_step_tokens": 16}, {**drafts, "overlap_depth": 2},
    ):
        with LLM(str(folder), **(BASE | options)) as llm:
            assert token_ids(llm.generate(prompt_token_ids=make_prompts(), sampling_params=params)) == alone, options
            llm.check()


def test_named_and_all_logprobs_of_outputs_and_prompts(folder: Path):
    params = SamplingParams(
        temperature=0.0, max_tokens=3, logprobs=-1, prompt_logprobs=-1, logprob_token_ids=[7, 3], ignore_eos=True
    )
    with LLM(str(folder), **BASE) as llm:
        output, few = llm.generate(
            prompt_token_ids=[[5, 6, 7]] * 2,
            sampling_params=[params, SamplingParams(temperature=0.0, max_tokens=3, logprobs=2, ignore_eos=True)]
        )
    for entry in (*output.outputs[0].logprobs, *output.prompt_logprobs[1:]):
        best = dict(zip(entry.top_ids, entry.top_logprobs, strict=True))
        assert sorted(best) == list(range(199)) and entry.top_logprobs == sorted(entry.top_logprobs, reverse=True)
        assert entry.id_logprobs == pytest.approx([best[7], best[3]]) and best[entry.token_id] == entry.logprob
    assert [len(entry.top_ids) for entry in few.outputs[0].logprobs] == [2, 2, 2]


def test_seeded_sampling_is_the_same_however_it_is_scheduled(folder: Path):
    params = [SamplingParams(temperature=1.2, top_p=0.9, max_tokens=12, seed=i, ignore_eos=True) for i in range(8)]

    def draw(**options: object) -> list[list[int]]:
        with LLM(str(folder), **(BASE | options)) as llm:
            return token_ids(llm.generate(prompt_token_ids=make_prompts(), sampling_params=params))

    expected = draw()
    assert draw(overlap_depth=2, max_step_tokens=16, kv_pages=12) == expected
    assert draw(prefix_cache=False, max_running_requests=1) == expected


def test_details_of_an_output(folder: Path):
    with LLM(str(folder), **BASE, max_model_len=128) as llm:
        assert llm.tokenizer is None and llm.facts.max_model_len == 128 and llm.facts.vocab_size == 199
        assert sum(line.num_bytes for line in llm.memory_plan()) > 0
        prompt = make_prompts()[0]
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=1)
        (output,) = llm.generate(prompt_token_ids=[prompt], sampling_params=params)
        choice = output.outputs[0]
        assert [p.token_id for p in choice.logprobs] == choice.token_ids and all(p.rank == 1 for p in choice.logprobs)
        assert choice.cumulative_logprob == pytest.approx(sum(p.logprob for p in choice.logprobs))
        assert len(output.prompt_logprobs) == len(prompt) and output.prompt_logprobs[0] is None
        assert [p.token_id for p in output.prompt_logprobs[1:]] == prompt[1:]
        stopped = llm.generate(
            prompt_token_ids=[prompt],
            sampling_params=SamplingParams(temperature=0.0, max_tokens=9, stop_token_ids=[choice.token_ids[1]])
        )
        assert (
            stopped[0].outputs[0].finish_reason == "stop" and stopped[0].outputs[0].stop_reason == choice.token_ids[1]
        )
        assert llm.reset_prefix_cache() is True
        assert llm.generate(prompt_token_ids=[prompt], sampling_params=params)[0].num_cached_tokens == 0


async def test_an_engine_process_says_the_same(folder: Path, alone: list[list[int]]):
    async def last(stream: AsyncIterator[GenerationOutput]) -> list[int]:
        return [output async for output in stream][-1].outputs[0].token_ids

    async with AsyncLLM(str(folder), **BASE) as llm:
        results = await asyncio.gather(*(last(llm.generate(p, q)) for p, q in zip(make_prompts(), PARAMS, strict=True)))
    assert results == alone
