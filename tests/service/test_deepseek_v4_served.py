"""DeepSeek-V4, tiny, saved and served: greedy tokens equal ``generate`` whatever is cached, evicted, cut or aborted."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from headrace import LLM, AsyncLLM, SamplingParams
from headrace.base.config import engine_config
from headrace.base.errors import ConfigError
from headrace.base.messages import EngineRequest
from headrace.base.sampling import SamplingSpec, StopSpec
from headrace.models.deepseek_v4.naming import rename
from headrace.service.build import build_engine

VOCAB, NEW_TOKENS = 256, 8
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 4,
    "compress_ratios": [0, 4, 128, 4],
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "qk_rope_head_dim": 8, "q_lora_rank": 16,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "num_hash_layers": 1, "sliding_window": 16, "o_groups": 2,
    "o_lora_rank": 8,
    "index_n_heads": 32, "index_head_dim": 16, "index_topk": 16, "max_position_embeddings": 2048,
    "initializer_range": 0.3,
    "rope_parameters": {
        "rope_type": "yarn", "factor": 8, "original_max_position_embeddings": 256, "beta_fast": 32, "beta_slow": 1
    },
    "eos_token_id": None, "bos_token_id": 0, "pad_token_id": 0,
}
BASE = {"device": "cpu", "dtype": "float32", "threads": 1, "kv_pages": 24, "max_model_len": 1024}
PARAMS = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
AT_LENGTH = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
LONGER = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def make_model(**options: Any) -> transformers.PreTrainedModel:
    """transformers' own, tiny and random."""
    torch.manual_seed(2)
    config = transformers.DeepseekV4Config(**CONFIG | options)
    config._attn_implementation = config._experts_implementation = "eager"
    model = transformers.DeepseekV4ForCausalLM(config).eval()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith("tid2eid"):
            tensor.copy_(torch.stack([torch.randperm(6)[:2] for _ in range(VOCAB)]))
        elif name.endswith(("sinks", "position_bias", "base", "correction_bias")):
            tensor.data.add_(torch.randn_like(tensor) * 0.3)
    return model


def make_prompts() -> list[list[int]]:
    """Some share beginnings of one and two pages."""
    draw = random.Random(1)
    shared = [draw.randrange(1, VOCAB) for _ in range(600)]
    return [
        shared[:length] + [draw.randrange(1, VOCAB) for _ in range(extra)] for length,
        extra in ((513, 0), (600, 3), (300, 1), (256, 5), (0, 3), (0, 260))
    ]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]], list[list[int]]]:
    """A saved model, prompts, and what ``generate`` says to each."""
    model, prompts = make_model(), make_prompts()
    folder = tmp_path_factory.mktemp("deepseek_v4")
    model.save_pretrained(folder)
    with torch.inference_mode():
        expected = [
            model.generate(torch.tensor([p]), max_new_tokens=NEW_TOKENS, do_sample=False)[0, len(p):].tolist()
            for p in prompts
        ]
    assert len({tuple(tokens) for tokens in expected}) > 3
    return folder, prompts, expected


@pytest.mark.parametrize("options", [
    {},
    {"max_step_tokens": 101},
    {"page_size": 128, "kv_pages": 40, "max_step_tokens": 300, "overlap_depth": 2},
    {"kv_pages": 8, "overlap_depth": 2, "max_step_tokens": 300},
    {"kv_pages": 24, "window_share": 0.4, "max_step_tokens": 256},
    {"prefix_cache": False, "max_running_requests": 2, "max_step_tokens": 700},
], ids=str)
def test_greedy_tokens_equal_generate(served: tuple[Path, list[list[int]], list[list[int]]], options: dict[str, Any]):
    folder, prompts, expected = served
    with LLM(str(folder), **BASE | options) as llm:
        assert llm.facts.page_size == options.get("page_size", 256)
        for _ in range(2):
            outputs = llm.generate(prompt_token_ids=prompts, sampling_params=PARAMS)
            assert [o.outputs[0].token_ids for o in outputs] == expected
        llm.check()
        stats = llm.stats()
        assert stats.num_running == stats.num_queued == stats.num_used_pages == 0
        if not options:
            assert [o.num_cached_tokens for o in outputs] == [512, 512, 256, 256, 0, 256]


@pytest.fixture(scope="module")
def undrafted(served: tuple[Path, list[list[int]], list[list[int]]]) -> tuple[Path, list[list[int]], list[list[int]]]:
    """The prompts and one that repeats itself, and what is said to each at length, without drafts."""
    folder, prompts, expected = served
    texts = [*prompts, [7, 8, 9, 10] * 62]
    with LLM(str(folder), **BASE) as llm:
        outputs = llm.generate(prompt_token_ids=texts, sampling_params=AT_LENGTH)
    tokens = [o.outputs[0].token_ids for o in outputs]
    assert [said[:NEW_TOKENS] for said in tokens[:-1]] == expected
    return folder, texts, tokens


FEW = {"num_speculative_tokens": 1}


@pytest.mark.parametrize(("options", "drafter", "least_right", "least_wrong"), [
    pytest.param(
        {"max_step_tokens": 101}, {"method": "ngram", "prompt_lookup_min": 1}, 0, 500, marks=pytest.mark.slow
    ),
    ({"kv_pages": 8, "overlap_depth": 2, "max_step_tokens": 300}, {"method": "suffix"}, 100, 0),
    ({"max_step_tokens": 101, "hot_slots": 8 * 16}, {"method": "ngram", "prompt_lookup_min": 1}, 0, 500),
    ({"overlap_depth": 2, "max_step_tokens": 300, "hot_slots": 40}, {"method": "suffix", **FEW}, 50, 0),
], ids=str)
def test_drafts_change_no_token(
    undrafted: tuple[Path, list[list[int]], list[list[int]]], options: dict[str, Any], drafter: dict[str, Any],
    least_right: int, least_wrong: int,
):
    """Wrong and right ones across the ends of windows and pages, beside chunks of other prompts."""
    folder, texts, expected = undrafted
    drafting = {"speculative_config": {"num_speculative_tokens": 7, **drafter}}
    with LLM(str(folder), **BASE | options | drafting) as llm:
        for _ in range(2):
            outputs = llm.generate(prompt_token_ids=texts, sampling_params=AT_LENGTH)
            assert [o.outputs[0].token_ids for o in outputs] == expected
        llm.check()
        drafted = llm.stats().speculation
    num_right = drafted.num_accepted_tokens
    assert num_right >= least_right and drafted.num_draft_tokens - num_right >= least_wrong


def add_module(folder: Path, into: Path) -> None:
    """Write the saved model once more, with a random module that drafts beside it."""
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(1)
    config = json.loads((folder / "config.json").read_text())
    last = f"layers.{CONFIG['num_hidden_layers'] - 1}."
    width, streams = CONFIG["hidden_size"], 4
    shapes = {
        "hc_head_fn": (streams, streams * width), "hc_head_base": (streams,), "hc_head_scale": (1,),
        **{f"{name}.weight": (width,) for name in ("norm", "enorm", "hnorm")},
        **{f"{name}.weight": (width, width) for name in ("e_proj", "h_proj")},
    }
    tensors |= {f"mtp.0.{name}": torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    # a layer like the last one, without what compresses
    for name, tensor in list(tensors.items()):
        if last in name and "compressor" not in name and "indexer" not in name:
            tensors[f"mtp.0.{rename(f'model.{name[name.index(last):]}').removeprefix(last)}"] = tensor.clone()
    save_file(tensors, into / "model.safetensors")
    (into / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))


def test_the_checkpoints_own_module_drafts(
    served: tuple[Path, list[list[int]], list[list[int]]], tmp_path: Path
):
    """A random one, which is rarely right, read from the checkpoint beside the model: no token changes."""
    folder, prompts, expected = served
    add_module(folder, tmp_path)
    for method, hot_slots in (("mtp", 0), ("auto", 0), ("mtp", 64), ("auto", 40)):
        options = {"speculative_config": {"method": method, "num_speculative_tokens": 3}, "hot_slots": hot_slots}
        with LLM(str(tmp_path), **BASE | {"max_step_tokens": 101} | options) as llm:
            outputs = llm.generate(prompt_token_ids=prompts, sampling_params=PARAMS)
            assert [o.outputs[0].token_ids for o in outputs] == expected
            assert llm.stats().speculation.num_draft_tokens > 0
            llm.check()


def test_a_prefix_hit_changes_no_probability(served: tuple[Path, list[list[int]], list[list[int]]]):
    """Cold, and behind one and two pages of the prefix cache: compressor state at the boundary included."""
    folder, prompts, _ = served
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
    with LLM(str(folder), **BASE | {"max_step_tokens": 300}) as llm:
        runs = [llm.generate(prompt_token_ids=prompts, sampling_params=params) for _ in range(2)]
    assert [o.num_cached_tokens for o in runs[1]][:4] == [512, 512, 256, 256]
    cold, warm = (
        torch.tensor([[entry.logprob for entry in o.outputs[0].logprobs] for o in outputs]) for outputs in runs
    )
    torch.testing.assert_close(warm, cold, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def decoded(served: tuple[Path, list[list[int]], list[list[int]]]) -> tuple[Path, list[list[int]], list[list[int]]]:
    """The same prompts, and three whose outputs pass 16 entries, 40 entries, and the end of a page; all caches on the
    device."""
    folder, prompts, _ = served
    prompts = [*prompts, *(prompts[0][:length] for length in (58, 150, 250))]
    with LLM(str(folder), **BASE) as llm:
        outputs = llm.generate(prompt_token_ids=prompts, sampling_params=LONGER)
    return folder, prompts, [o.outputs[0].token_ids for o in outputs]


@pytest.mark.parametrize("options", [
    {"hot_slots": 16, "max_step_tokens": 101, "overlap_depth": 2},
    {"hot_slots": 40, "kv_pages": 8, "max_step_tokens": 300, "overlap_depth": 2, "max_running_requests": 4},
], ids=str)
def test_hot_slots_change_no_token(
    decoded: tuple[Path, list[list[int]], list[list[int]]], options: dict[str, Any]
):
    """Prompts in chunks beside decodes, prefix hits, rows that others had; entries within and beyond a row's slots."""
    folder, prompts, expected = decoded
    with LLM(str(folder), **BASE | options) as llm:
        for _ in range(2):
            outputs = llm.generate(prompt_token_ids=prompts, sampling_params=LONGER)
            assert [o.outputs[0].token_ids for o in outputs] == expected
        llm.check()
        stats = llm.stats()
        assert stats.num_running == stats.num_queued == stats.num_used_pages == 0
        assert sum(o.num_cached_tokens for o in outputs) > 0, "the prefix cache is on"
        assert 0 < stats.tiers.hot_slots.loaded_entries_total < stats.tiers.hot_slots.wanted_entries_total


def test_retractions_behind_hot_slots_change_no_token(served: tuple[Path, list[list[int]], list[list[int]]]):
    """Outputs that all need another page at once, of which there are too few: rows are given up and begun again."""
    draw = random.Random(9)
    prompts = [[draw.randrange(1, VOCAB) for _ in range(250)] for _ in range(4)]
    with LLM(str(served[0]), **BASE) as llm:
        outputs = llm.generate(prompt_token_ids=prompts, sampling_params=LONGER)
    options = BASE | {"hot_slots": 40, "kv_pages": 5, "overlap_depth": 2, "skip_tokenizer": True}
    engine = build_engine(engine_config(model=str(served[0]), **options))
    engine._scheduler._admission.forecast.share = 0.0  # too many are let in
    tokens: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    for name, prompt in zip(tokens, prompts, strict=True):
        stop = StopSpec(max_tokens=LONGER.max_tokens)
        engine.submit(EngineRequest(name, prompt, SamplingSpec(temperature=0.0), stop))
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    stats = engine.stats()
    assert stats.retracted_total > 0 == stats.num_running == stats.num_used_pages
    assert list(tokens.values()) == [o.outputs[0].token_ids for o in outputs]
    engine.check()
    engine.close()


@pytest.mark.parametrize(("options", "reason"), [
    ({"hot_slots": 15}, "cannot hold the 16 entries"),
    ({"hot_slots": 31, "speculative_config": {"method": "suffix"}}, "hold what a request's last token and 0 drafts"),
    ({"hot_slots": 32, "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "last token and 1 dr"),
    ({"hot_slots": 32, "hot_host_gb": 1e6}, "lower it"),
    ({"hot_slots": 32, "hot_host_gb": 1e-6}, "raise it"),
], ids=str)
def test_hot_slots_that_cannot_be(
    served: tuple[Path, list[list[int]], list[list[int]]], options: dict[str, Any], reason: str
):
    with pytest.raises(ConfigError, match=reason):
        LLM(str(served[0]), **BASE | options)


@pytest.mark.parametrize("options", [{}, {"hot_slots": 16}], ids=str)
async def test_aborts_leave_nothing_behind(
    served: tuple[Path, list[list[int]], list[list[int]]], options: dict[str, Any]
):
    folder, prompts, expected = served
    async with AsyncLLM(str(folder), **BASE | {"max_step_tokens": 64, "skip_tokenizer": True} | options) as llm:
        async def run(index: int, stop_early: bool) -> list[int] | None:
            params = SamplingParams(temperature=0.0, max_tokens=100 if stop_early else NEW_TOKENS, ignore_eos=True)
            tokens = None
            async for output in llm.generate(prompts[index], params):
                if stop_early:
                    return None
                tokens = output.outputs[0].token_ids
            return tokens

        results = await asyncio.gather(*(run(i, stop_early=bool(i % 2)) for i in range(6)))
        assert [r for r in results if r is not None] == expected[::2]
        assert [await run(i, stop_early=False) for i in (1, 3, 5)] == expected[1::2]
        stats = await llm.stats()
        assert stats.num_running == stats.num_queued == stats.num_used_pages == 0 < stats.aborted_total


@pytest.mark.cuda
@pytest.mark.parametrize("options", [
    {}, {"max_step_tokens": 101, "overlap_depth": 2}, {"max_step_tokens": 101, "hot_slots": 40}, {"graphs": "off"},
    {"kv_pages": 8, "overlap_depth": 2, "max_step_tokens": 300},
    {"speculative_config": {"method": "suffix", "num_speculative_tokens": 5}},
    {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}, "hot_slots": 64},
], ids=str)
def test_a_gpu_says_the_same(served: tuple[Path, list[list[int]], list[list[int]]], options: dict[str, Any]):
    folder, prompts, expected = served
    with LLM(str(folder), **BASE | {"device": "cuda"} | options) as llm:
        for _ in range(2):
            outputs = llm.generate(prompt_token_ids=prompts, sampling_params=PARAMS)
            assert [o.outputs[0].token_ids for o in outputs] == expected
        llm.check()


@torch.no_grad()
def oracle_logprobs(model: transformers.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Of each token but the first."""
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


@pytest.mark.cuda
@pytest.mark.parametrize(("kv_dtype", "times"), [("auto", 2), ("float8_e4m3fn", 3)])
def test_half_the_bits_on_a_gpu_are_near(kv_dtype: str, times: int, tmp_path: Path):
    """In bfloat16 as near to float32 as transformers is; with caches in 8 bits not much further. Every entry is chosen,
    as rounding would else choose others."""
    model = make_model(head_dim=128, qk_rope_head_dim=64, index_head_dim=64, index_topk=160)
    model.save_pretrained(tmp_path)
    prompts = make_prompts()[2:]
    exact = torch.cat([oracle_logprobs(model, p) for p in prompts])
    theirs = torch.cat([oracle_logprobs(model.bfloat16(), p) for p in prompts])
    with LLM(
        str(tmp_path), **BASE | {"device": "cuda", "dtype": "bfloat16", "kv_dtype": kv_dtype, "max_step_tokens": 128}
    ) as llm:
        outputs = llm.generate(
            prompt_token_ids=prompts,
            sampling_params=SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, prompt_logprobs=0, ignore_eos=True)
        )
    ours = torch.tensor([entry.logprob for output in outputs for entry in output.prompt_logprobs[1:]])
    assert (ours - exact).norm() <= times * (theirs - exact).norm()
