"""`LLM` over sharded checkpoints of transformers' own making: greedy tokens, prompt logprobs and every logit processor
are transformers', whatever the shapes, pages, chunks, order and neighbours."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headrace import LLM, SamplingParams
from headrace.kernels.sample.reference import uniform

EOS, MAX_MODEL_LEN = 7, 96
SHAPE = {
    "vocab_size": 131, "hidden_size": 72, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128, "initializer_range": 0.25, "rms_norm_eps": 1e-5, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": EOS,
}
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "one-layer-mqa-head80": (
        "Llama", {"head_dim": 80, "num_hidden_layers": 1, "num_key_value_heads": 1},
        {"page_size": 1, "max_step_tokens": 8}
    ),
    "mha-head96-tight": (
        "Mistral", {"head_dim": 96, "num_key_value_heads": 8, "sliding_window": 17},
        {"page_size": 8, "kv_pages": 14, "overlap_depth": 2}
    ),
    "window-of-3-head32": (
        "Qwen2",
        {
            "num_attention_heads": 6, "num_key_value_heads": 3, "use_sliding_window": True, "sliding_window": 3,
            "max_window_layers": 1
        },
        {"page_size": 2, "max_step_tokens": 13, "policy": "longest-prefix", "overlap_depth": 2},
    ),
    "gemma-head256": (
        "Gemma3Text",
        {
            "head_dim": 256, "num_hidden_layers": 3, "num_key_value_heads": 1, "sliding_window": 8,
            "layer_types": WINDOWS, "query_pre_attn_scalar": 256
        },
        {"page_size": 16, "kv_pages": 9, "max_step_tokens": 9, "prefix_cache": False},
    ),
    "one-page-is-all": (
        "Qwen3", {"head_dim": 64, "vocab_size": 97, "tie_word_embeddings": True},
        {"page_size": 256, "kv_pages": 4, "max_running_requests": 1}
    ),
    "partial-rotation-priorities": (
        "Glm4", {"head_dim": 24},
        {"page_size": 64, "kv_pages": 6, "policy": "priority", "starvation_steps": 1, "overlap_depth": 2}
    ),
}


def make_checkpoint(folder: Path, kind: str, options: dict[str, Any]) -> transformers.PreTrainedModel:
    """Random weights, norms and biases away from neutral, in as many files as there are tensors worth one."""
    torch.manual_seed(5)
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **options})
    model = getattr(
        transformers, {"Gemma3Text": "Gemma3ForCausalLM"}.get(kind, f"{kind}ForCausalLM")
    )._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder, max_shard_size="40KB")
    (folder / "generation_config.json").unlink(missing_ok=True)
    return model


@torch.no_grad()
def oracle_logits(model: transformers.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens]), use_cache=False).logits[0]


def make_prompts(vocab_size: int) -> list[list[int]]:
    draw = random.Random(2)
    shared = [draw.randrange(8, vocab_size) for _ in range(40)]
    return [
        shared[:length] + [draw.randrange(8, vocab_size) for _ in range(extra)] for length,
        extra in ((0, 1), (40, 3), (40, 20), (17, 1), (0, 33), (40, 3))
    ]


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_whatever_the_shape_and_the_schedule(name: str, tmp_path: Path):
    kind, options, engine = CASES[name]
    model = make_checkpoint(tmp_path, kind, options)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    prompts = make_prompts(model.config.vocab_size)
    params = [
        SamplingParams(temperature=0, max_tokens=4 + 3 * i, ignore_eos=True, prompt_logprobs=0 if i == 2 else None)
        for i in range(len(prompts))
    ]
    with LLM(
        str(tmp_path),
        **{
            "dtype": "float32", "device": "cpu", "kv_pages": 300, "max_model_len": MAX_MODEL_LEN,
            "skip_tokenizer": True, **engine
        }
    ) as llm:
        rounds = [llm.generate(prompt_token_ids=prompts, sampling_params=params) for _ in range(2)]
        llm.check()
        assert llm.stats().num_used_pages == 0
    for outputs in rounds:
        for prompt, asked, output in zip(prompts, params, outputs, strict=True):
            tokens = output.outputs[0].token_ids
            logits = oracle_logits(model, prompt + tokens)
            assert tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist() and len(tokens) == asked.max_tokens
            if asked.prompt_logprobs is not None:
                expected = logits.log_softmax(-1)[: len(prompt) - 1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
                torch.testing.assert_close(
                    torch.tensor([entry.logprob for entry in output.prompt_logprobs[1:]]), expected, atol=1e-3, rtol=0
                )


def draw_params(draw: random.Random) -> SamplingParams:
    """Any features together; half of the requests have none but a temperature."""
    params: dict[str, Any] = {
        "temperature": draw.choice([0, 0.3, 1.0, 1.7]), "max_tokens": draw.choice([5, 14]),
        "seed": draw.randrange(-(2**63), 2**63)
    }
    features = {
        "top_k": [1, 2, 30, 500], "top_p": [0.1, 0.9], "min_p": [0.01, 0.3], "repetition_penalty": [0.7, 2.0],
        "presence_penalty": [-1.0, 2.0],
        "frequency_penalty": [-1.0, 2.0], "logit_bias": [{9: 20.0, 8: -20.0}],
        "allowed_token_ids": [[EOS, *range(8, 131, 3)]],
        "min_tokens": [1, 4], "stop_token_ids": [list(range(20, 60))], "ignore_eos": [True], "logprobs": [0, 3],
    }
    if draw.random() < 0.7:
        params |= {name: draw.choice(values) for name, values in features.items() if draw.random() < 0.35}
    return SamplingParams(**params)


def edit(
    logits: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int], stops: set[int]
) -> torch.Tensor:
    x, context = logits.double(), torch.tensor([prompt + output])
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    if params.allowed_token_ids:
        x[[token for token in range(len(x)) if token not in params.allowed_token_ids]] = -math.inf
    if len(output) < params.min_tokens:
        x[list(stops)] = -math.inf
    x = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(context, x[None])[0]
    counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=len(x))
    return x - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


def draws_near(edited: torch.Tensor, params: SamplingParams, position: int) -> range:
    """Tokens that the seed may draw, up to rounding of a probability in the fourth place."""
    x, context = TemperatureLogitsWarper(float(params.temperature))(None, edited[None]), torch.zeros(1, 1)
    for is_on, make in (
        (params.min_p > 0, lambda: MinPLogitsWarper(params.min_p)),
        (params.top_k > 0, lambda: TopKLogitsWarper(params.top_k)),
        (params.top_p < 1, lambda: TopPLogitsWarper(params.top_p)),
    ):
        x = make()(context, x) if is_on else x
    place = float(uniform(torch.tensor([params.seed]), torch.tensor([position])))
    cumulative = np.cumsum(x[0].softmax(-1).numpy())
    first, last = (int(np.searchsorted(cumulative, place + shift, side="right")) for shift in (-2e-4, 2e-4))
    return range(first, last + 1)


@pytest.mark.parametrize(
    "engine", [{"max_step_tokens": 8, "max_running_requests": 3, "page_size": 4}, {"overlap_depth": 2, "kv_pages": 12}],
    ids=str
)
def test_every_sampling_feature_among_neighbours_with_others(tmp_path: Path, engine: dict[str, Any]):
    model = make_checkpoint(tmp_path, "Llama", {"head_dim": 16})
    draw = random.Random(str(engine))
    params = [draw_params(draw) for _ in range(48)]
    prompts = [prompt for prompt in make_prompts(131) for _ in range(8)]
    with LLM(
        str(tmp_path),
        **{
            "dtype": "float32", "device": "cpu", "kv_pages": 300, "max_model_len": MAX_MODEL_LEN,
            "skip_tokenizer": True, **engine
        }
    ) as llm:
        outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params)
    for prompt, asked, output in zip(prompts, params, outputs, strict=True):
        choice = output.outputs[0]
        stops = set(asked.stop_token_ids or ()) | (set() if asked.ignore_eos else {EOS})
        logits = oracle_logits(model, prompt + choice.token_ids)[len(prompt) - 1 :]
        for i, token in enumerate(choice.token_ids):
            edited = edit(logits[i], asked, prompt, choice.token_ids[:i], stops)
            if asked.temperature == 0:
                assert edited[token] >= edited.max() - 1e-4, asked
            else:
                assert token in draws_near(edited, asked, i), asked
        is_stopped = choice.token_ids[-1] in stops and len(choice.token_ids) >= asked.min_tokens
        assert choice.finish_reason == ("stop" if is_stopped else "length")
        assert is_stopped or len(choice.token_ids) == asked.max_tokens
        assert not any(token in stops for token in choice.token_ids[max(0, asked.min_tokens - 1) : -1])
        if asked.logprobs is not None:
            assert [len(entry.top_ids) for entry in choice.logprobs] == [asked.logprobs] * len(choice.token_ids)
            expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(choice.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(
                torch.tensor([entry.logprob for entry in choice.logprobs]), expected, atol=1e-3, rtol=0
            )
