"""Families with caches of their own, saved and served: greedy tokens equal ``generate`` however requests are
scheduled."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headrace import LLM, SamplingParams

VOCAB, NEW_TOKENS = 97, 10
SHAPE = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=256, initializer_range=0.3, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    pad_token_id=0,
)
CASES: dict[str, dict[str, Any]] = {
    "DeepseekV3": dict(
        kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, q_lora_rank=12, n_routed_experts=8,
        n_group=2, topk_group=1,
        num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1,
    ),
    "Gemma3Text": dict(
        sliding_window=8, head_dim=8, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=8
    ),
}
GPU_CASES: dict[str, dict[str, Any]] = {
    **CASES,
    "Qwen3Moe": dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, norm_topk_prob=True, head_dim=16),
    "Mixtral": dict(num_local_experts=4, num_experts_per_tok=2, head_dim=16),
    "GptOss": dict(num_local_experts=6, num_experts_per_tok=2, head_dim=16, sliding_window=6),
}
"""What the tests of layers and models have covered on a CPU is served on a GPU besides."""
CLASSES = {"Gemma3Text": "Gemma3ForCausalLM"}
BASE = {"device": "cpu", "dtype": "float32", "threads": 1, "kv_pages": 200, "page_size": 8}


def make_model(name: str) -> transformers.PreTrainedModel:
    """transformers' own, tiny and random."""
    torch.manual_seed(2)
    config = getattr(transformers, f"{name}Config")(**SHAPE, **GPU_CASES[name])
    model = getattr(transformers, CLASSES.get(name, f"{name}ForCausalLM"))(config).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith(("bias", "sinks")):
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return model


def make_prompts() -> list[list[int]]:
    """Some share long beginnings."""
    draw = random.Random(1)
    shared = [draw.randrange(1, VOCAB) for _ in range(60)]
    return [
        shared[:length] + [draw.randrange(1, VOCAB) for _ in range(extra)] for length,
        extra in ((60, 1), (60, 9), (33, 4), (0, 2), (0, 41), (48, 1))
    ]


@pytest.fixture(scope="module", params=list(CASES))
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[list[int]], list[list[int]]]:
    """A saved model, prompts, and what ``generate`` says to each."""
    model, prompts = make_model(request.param), make_prompts()
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    with torch.inference_mode():
        expected = [
            model.generate(torch.tensor([p]), max_new_tokens=NEW_TOKENS, do_sample=False)[0, len(p):].tolist()
            for p in prompts
        ]
    return folder, prompts, expected


@pytest.mark.parametrize("options", [
    {}, {"max_step_tokens": 16}, {"prefix_cache": False, "max_step_tokens": 24}, {"kv_pages": 14, "overlap_depth": 2},
    {"max_running_requests": 1},
], ids=str)
def test_greedy_tokens_equal_generate(served: tuple[Path, list[list[int]], list[list[int]]], options: dict[str, Any]):
    folder, prompts, expected = served
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(str(folder), **BASE | options) as llm:
        for _ in range(2):
            outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params)
            assert [o.outputs[0].token_ids for o in outputs] == expected
        llm.check()
        if not options:
            assert outputs[1].num_cached_tokens >= 56


@pytest.mark.cuda
@pytest.mark.parametrize("served", list(GPU_CASES), indirect=True)
@pytest.mark.parametrize("options", [{"max_step_tokens": 32}, {"overlap_depth": 1, "graphs": "off"}], ids=str)
def test_a_gpu_says_the_same(served: tuple[Path, list[list[int]], list[list[int]]], options: dict[str, Any]):
    folder, prompts, expected = served
    with LLM(str(folder), **BASE | {"device": "cuda", "page_size": 16} | options) as llm:
        for _ in range(2):
            outputs = llm.generate(
                prompt_token_ids=prompts,
                sampling_params=SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
            )
            assert [o.outputs[0].token_ids for o in outputs] == expected
        llm.check()


@torch.no_grad()
def oracle_logprobs(model: transformers.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Of each token but the first."""
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


@pytest.mark.cuda
@pytest.mark.parametrize("name", list(GPU_CASES))
def test_bfloat16_on_a_gpu_is_about_as_near_as_transformers_is(name: str, tmp_path: Path):
    """Not to a small factor: rounding makes some token choose another expert, here as there."""
    model, prompts = make_model(name), make_prompts()
    model.save_pretrained(tmp_path)
    exact = torch.cat([oracle_logprobs(model, p) for p in prompts])
    theirs = torch.cat([oracle_logprobs(model.bfloat16(), p) for p in prompts])
    with LLM(str(tmp_path), **BASE | {"device": "cuda", "dtype": "bfloat16", "page_size": 16}) as llm:
        outputs = llm.generate(
            prompt_token_ids=prompts,
            sampling_params=SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, prompt_logprobs=0)
        )
    ours = torch.tensor([entry.logprob for output in outputs for entry in output.prompt_logprobs[1:]])
    assert (ours - exact).norm() <= 4 * (theirs - exact).norm()
