"""DeepSeek-V3.2 and GLM-5, tiny, saved and served: greedy tokens equal ``generate``; what cannot be served is told."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers

from headrace import LLM, SamplingParams
from headrace.base.config import engine_config
from headrace.base.errors import ConfigError
from headrace.base.messages import EngineRequest
from headrace.base.sampling import SamplingSpec, StopSpec
from headrace.layers.build import Build
from headrace.models.catalog import find_family
from headrace.parallel.layout import Stage
from headrace.service.build import build_engine

NEW_TOKENS = 6
CONFIG: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "moe_intermediate_size": 16, "n_routed_experts": 6, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "index_n_heads": 32, "index_head_dim": 16,
    "index_topk": 12, "max_position_embeddings": 256, "initializer_range": 0.3, "eos_token_id": None,
    "bos_token_id": 0, "pad_token_id": 0,
}
KINDS = {"DeepseekV32": {}, "GlmMoeDsa": {"indexer_types": ["full", "shared", "full"]}}
BASE = {"dtype": "float32", "kv_pages": 40, "page_size": 16, "max_model_len": 128}
IN_CHUNKS = {**BASE, "device": "cpu", "threads": 1, "max_step_tokens": 24, "overlap_depth": 2}
PARAMS = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
AT_LENGTH = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


Served = tuple[Path, list[list[int]], list[list[int]]]


@pytest.fixture(scope="module", params=list(KINDS))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A saved model, prompts of which two share a beginning, and what ``generate`` says to each."""
    torch.manual_seed(2)
    config = getattr(transformers, f"{request.param}Config")(**CONFIG | KINDS[request.param])
    model = getattr(transformers, f"{request.param}ForCausalLM")(config).eval()
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    draw = random.Random(1)
    shared = [draw.randrange(1, 128) for _ in range(40)]
    prompts = [shared, [*shared[:33], 5, 6], [7] * 3, [draw.randrange(1, 128) for _ in range(25)]]
    with torch.inference_mode():
        expected = [
            model.generate(torch.tensor([p]), max_new_tokens=NEW_TOKENS, do_sample=False)[0, len(p):].tolist()
            for p in prompts
        ]
    return folder, prompts, expected


@pytest.fixture(scope="module")
def at_length(served: Served) -> Served:
    """The prompts and one that repeats itself, and what is said to each at length, all latents on the device."""
    folder, prompts, expected = served
    texts = [*prompts, [7, 8, 9, 10] * 12]
    with LLM(str(folder), **IN_CHUNKS) as llm:
        outputs = llm.generate(prompt_token_ids=texts, sampling_params=AT_LENGTH)
    tokens = [o.outputs[0].token_ids for o in outputs]
    assert [said[:NEW_TOKENS] for said in tokens[:-1]] == expected
    return folder, texts, tokens


def test_greedy_tokens_equal_generate(served: Served):
    """Whole, cut into chunks, and behind pages of the prefix cache."""
    (folder, prompts, expected), runs = served, []
    with LLM(str(folder), **BASE, device="cpu", threads=1, max_step_tokens=24, overlap_depth=2) as llm:
        for _ in range(2):
            outputs = llm.generate(prompt_token_ids=prompts, sampling_params=PARAMS)
            assert [o.outputs[0].token_ids for o in outputs] == expected
            runs.append([[entry.logprob for entry in o.outputs[0].logprobs] for o in outputs])
        assert [o.num_cached_tokens for o in outputs] == [32, 32, 0, 16]
        llm.check()
    torch.testing.assert_close(torch.tensor(runs[1]), torch.tensor(runs[0]), atol=1e-4, rtol=1e-4)


def test_hot_slots_change_no_token(served: Served, at_length: Served):
    """Latents in host memory: chunks beside decodes, prefix hits, more tokens than slots; then retraction, as requests
    that stop at once make the scheduler expect short outputs."""
    folder, prompts, expected = served
    stops = SamplingParams(temperature=0.0, max_tokens=60, stop_token_ids=[expected[0][0]])
    with LLM(str(folder), **IN_CHUNKS | {"kv_pages": 12, "hot_slots": 16}) as llm:
        for _ in range(2):
            outputs = llm.generate(prompt_token_ids=prompts, sampling_params=PARAMS)
            assert [o.outputs[0].token_ids for o in outputs] == expected
        for _ in range(10):
            llm.generate(prompt_token_ids=prompts[:1], sampling_params=stops)
        retracted = llm.generate(prompt_token_ids=prompts, sampling_params=AT_LENGTH)
        assert [o.outputs[0].token_ids for o in retracted] == at_length[2][: len(prompts)]
        llm.check()
        stats = llm.stats()
    counts = stats.tiers.hot_slots
    assert stats.retracted_total > 0 == stats.num_used_pages
    assert sum(o.num_cached_tokens for o in outputs) > 0 < counts.loaded_entries_total < counts.wanted_entries_total


@pytest.mark.parametrize(("hot_slots", "drafter", "least_right", "least_wrong"), [
    (12 * 8, {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 7}, 0, 50),
    (25, {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 1}, 4, 5),
    (36, {"method": "suffix", "num_speculative_tokens": 2}, 20, 0),
], ids=str)
def test_drafts_behind_hot_slots_change_no_token(
    at_length: Served, hot_slots: int, drafter: dict[str, Any], least_right: int, least_wrong: int
):
    """Every token is an entry: wrong drafts leave entries that others take the place of, in slots too."""
    folder, texts, expected = at_length
    with LLM(str(folder), **IN_CHUNKS, hot_slots=hot_slots, speculative_config=drafter) as llm:
        for _ in range(2):
            outputs = llm.generate(prompt_token_ids=texts, sampling_params=AT_LENGTH)
            assert [o.outputs[0].token_ids for o in outputs] == expected
        llm.check()
        stats = llm.stats()
    drafted, counts = stats.speculation, stats.tiers.hot_slots
    assert len(drafted.num_accepted_tokens_per_position) <= hot_slots // CONFIG["index_topk"] - 1
    assert drafted.num_accepted_tokens >= least_right
    assert drafted.num_draft_tokens - drafted.num_accepted_tokens >= least_wrong
    assert 0 < counts.loaded_entries_total < counts.wanted_entries_total


def test_counts_of_hot_slots_go_on_behind_sleep(served: Served):
    folder, prompts, _ = served
    engine = build_engine(
        engine_config(model=str(folder), skip_tokenizer=True, device="cpu", threads=1, hot_slots=16, **BASE)
    )

    def count() -> tuple[int, int]:
        engine.submit(EngineRequest("one", prompts[0], SamplingSpec(), StopSpec(max_tokens=NEW_TOKENS)))
        while engine.has_work:
            engine.step()
        return msgspec.structs.astuple(engine.stats().tiers.hot_slots)

    first, second = count(), count()
    engine.drain()
    engine.executor.acquire_memory(["kv_cache"])  # nothing is away
    assert msgspec.structs.astuple(engine.stats().tiers.hot_slots) == second
    engine.executor.release_memory(["kv_cache"])
    assert msgspec.structs.astuple(engine.stats().tiers.hot_slots) == second
    engine.executor.acquire_memory(["kv_cache"])
    awake = msgspec.structs.astuple(engine.stats().tiers.hot_slots)  # its first step counts too, as at the start
    wanted, loaded = count()
    assert wanted - awake[0] == second[0] - first[0] and loaded > awake[1] >= second[1] > first[1] > 0
    engine.close()


@pytest.mark.parametrize("options", [{}, {"hot_slots": 16}], ids=str)
def test_latents_are_not_rounded_to_8_bits(served: Served, options: dict[str, Any]):
    with pytest.raises(ConfigError, match="plain keys and values") as caught:
        LLM(str(served[0]), **BASE, device="cpu", kv_dtype="float8_e4m3fn", **options)
    assert caught.value.param == "kv_dtype"


@pytest.mark.cuda
@pytest.mark.parametrize("options", [{}, {"hot_slots": 16}], ids=str)
def test_a_gpu_says_the_same(served: Served, options: dict[str, Any]):
    """With graphs and two steps in flight."""
    folder, prompts, expected = served
    with LLM(str(folder), **BASE, device="cuda", max_step_tokens=24, **options) as llm:
        outputs = llm.generate(prompt_token_ids=prompts, sampling_params=PARAMS)
        assert [o.outputs[0].token_ids for o in outputs] == expected
        llm.check()


def given(**options: Any) -> dict[str, Any]:
    return {**CONFIG, "rms_norm_eps": 1e-6, "architectures": ["GlmMoeDsaForCausalLM"], **options}


@pytest.mark.parametrize(("options", "selects"), [
    ({}, [True] * 3), ({"index_topk_freq": 2}, [True, True, False]),
    ({"index_topk_pattern": "FSS"}, [True, False, False]),
    ({"indexer_types": ["full", "full", "shared"]}, [True, True, False]),
])
def test_which_layers_have_an_indexer(options: dict[str, Any], selects: list[bool]):
    spec = find_family("GlmMoeDsaForCausalLM").read_config(given(**options))
    assert [(layer.attention or spec.attention).selects for layer in spec.layers] == selects


@pytest.mark.parametrize(("options", "named"), [
    ({"indexer_types": ["shared", "full", "full"]}, "indexer_types"), ({"index_topk_pattern": "FX"}, "indexer_types"),
    ({"q_lora_rank": None}, "q_lora_rank"), ({"index_head_dim": 4}, "index_head_dim"),
    ({"attention_bias": True}, "attention_bias"),
    ({"mlp_layer_types": ["sparse", "dense", "sparse"]}, "mlp_layer_types"),
])
def test_values_that_cannot_be_served_are_named(options: dict[str, Any], named: str):
    with pytest.raises(ConfigError, match=named):
        find_family("GlmMoeDsaForCausalLM").read_config(given(**options))


@pytest.mark.parametrize("start", [1, 2])
def test_no_stage_begins_with_a_layer_that_has_no_indexer(start: int):
    """It would attend to all tokens: what the layer before selects does not come with the hidden states."""
    family = find_family("GlmMoeDsaForCausalLM")
    spec = family.read_config(given(indexer_types=["full", "shared", "full"]))
    build = Build(torch.device("cpu"), torch.float32, stage=Stage(start, None), moe_experts="reference")
    if start == 2:
        family.model_class(spec)(spec, family.names, build)
        return
    with pytest.raises(ConfigError, match="begins with layer 0"):
        family.model_class(spec)(spec, family.names, build)


def test_a_token_costs_one_row_a_layer():
    family = find_family("GlmMoeDsaForCausalLM")
    specs = family.cache_specs(family.read_config(given()), "bfloat16")
    assert [(s.kind, s.head_dim, s.value_dim) for s in specs] == [("deepseek_v32.rows", 40, 16)] * 3
