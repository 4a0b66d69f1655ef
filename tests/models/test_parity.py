"""Every family against transformers, on tiny random configs in float32: logits, and greedy tokens against
``generate``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from family_cases import CASES, MAX_MODEL_LEN, PROMPT_LEN, config_json, make_oracle, prompt
from harness import Harness, build_harness
from safetensors.torch import load_file

from headrace.kernels.linear.reference import norm_linear
from headrace.layers.linear import Linear
from headrace.layers.norm import RmsNorm
from headrace.layers.self_attention import Attention

NEW_TOKENS = 12
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


@torch.no_grad()
def oracle_logits(model: transformers.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens]), use_cache=False).logits[0]


def prefill_in_chunks(harness: Harness, tokens: list[int], chunk: int) -> tuple[Any, torch.Tensor]:
    sequence = harness.start()
    pieces = [harness.step((sequence, tokens[i : i + chunk]))[0] for i in range(0, len(tokens), chunk)]
    return sequence, torch.cat(pieces)


@pytest.fixture(scope="module", params=list(CASES))
def pair(request: pytest.FixtureRequest) -> tuple[transformers.PreTrainedModel, Any]:
    model = make_oracle(*CASES[request.param])

    def build(page_size: int) -> Harness:
        return build_harness(
            config_json(model), model.state_dict(), page_size=page_size,
            max_model_len=MAX_MODEL_LEN.get(request.param, 0)
        )

    return model, build


def test_logits_whole_chunked_and_step_by_step(pair):
    """One prefill, prefill in chunks that straddle pages, and a decode of every token after a short prefill."""
    model, build = pair
    tokens = prompt(0)
    expected = oracle_logits(model, tokens)
    for page_size in (4, 16):
        harness = build(page_size)
        for chunk in (PROMPT_LEN, 5, 7):
            torch.testing.assert_close(prefill_in_chunks(harness, tokens, chunk)[1], expected, **TOLERANCE)
        sequence = harness.start()
        pieces = [harness.step((sequence, tokens[:3]))[0]]
        pieces += [harness.step((sequence, [token]))[0] for token in tokens[3:]]
        torch.testing.assert_close(torch.cat(pieces), expected, **TOLERANCE)


def test_mixed_batches(pair):
    """Decodes of different lengths together with chunks of other requests change nothing for anyone."""
    model, build = pair
    harness = build(4)
    long, short, late = prompt(1, 29), prompt(2, 4), prompt(3, 19)
    expected = [oracle_logits(model, tokens) for tokens in (long, short, late)]
    first, second, third = harness.start(), harness.start(), harness.start()
    harness.step((first, long[:28]), (second, short[:3]))
    mixed = harness.step((first, long[28:]), (third, late[:8]), (second, short[3:]))
    torch.testing.assert_close(mixed[0], expected[0][28:], **TOLERANCE)
    torch.testing.assert_close(mixed[1], expected[2][:8], **TOLERANCE)
    torch.testing.assert_close(mixed[2], expected[1][3:], **TOLERANCE)
    torch.testing.assert_close(harness.step((third, late[8:]))[0], expected[2][8:], **TOLERANCE)


def test_greedy_tokens_equal_generate(pair):
    """Two requests decoded together, each as ``generate`` has it."""
    model, build = pair
    harness = build(16)
    tokens, others = prompt(4), prompt(5, 9)
    expected = [
        model.generate(torch.tensor([p]), max_new_tokens=NEW_TOKENS, do_sample=False)[0, len(p):].tolist()
        for p in (tokens, others)
    ]
    sequences = [harness.start(), harness.start()]
    logits = harness.step((sequences[0], tokens), (sequences[1], others))
    sampled: list[list[int]] = [[], []]
    for _ in range(NEW_TOKENS):
        for row_tokens, piece in zip(sampled, logits, strict=True):
            row_tokens.append(int(piece[-1].argmax()))
        logits = harness.step(*((s, [d[-1]]) for s, d in zip(sequences, sampled, strict=True)))
    assert sampled == expected


def test_last_layer_computes_no_more_than_what_is_wanted(pair):
    """Last tokens of some spans of a mixed step, and of none; what a later step reads is complete all the same."""
    model, build = pair
    harness = build(4)
    if not harness.model.prunes_last_layer:
        pytest.skip("this kind of attention computes every token")
    prompts = [prompt(seed, length) for seed, length in ((7, 11), (8, 6), (9, 13))]
    whole = [oracle_logits(model, tokens) for tokens in prompts]
    sequences = [harness.start() for _ in prompts]
    assert len(harness.step((sequences[0], prompts[0][:10]), wanted=[])[0]) == 0
    spans = [(sequences[0], prompts[0][10:]), (sequences[1], prompts[1]), (sequences[2], prompts[2][:9])]
    decode, finished, unfinished = harness.step(*spans, wanted=[0, 1])
    torch.testing.assert_close(decode, whole[0][-1:], **TOLERANCE)
    torch.testing.assert_close(finished, whole[1][-1:], **TOLERANCE)
    assert len(unfinished) == 0
    torch.testing.assert_close(harness.step((sequences[2], prompts[2][9:]), wanted=[0])[0], whole[2][-1:], **TOLERANCE)


def test_norms_fused_with_products_change_nothing(pair, monkeypatch):
    """The fused product of few rows, in its place in every block whose norm comes first."""
    _, build = pair
    harness, fused = build(4), []
    for layer in harness.model.modules():
        if isinstance(layer, Linear):
            monkeypatch.setattr(layer, "_norm_linear", lambda *args: fused.append(len(args[0])) or norm_linear(*args))
    tokens = prompt(6, 9)
    first = harness.step((harness.start(), tokens))[0]
    sequence = harness.start()
    pieces = [harness.step((sequence, tokens[:2]))[0], *(harness.step((sequence, [token]))[0] for token in tokens[2:])]
    torch.testing.assert_close(torch.cat(pieces), first, **TOLERANCE)
    layers = harness.model.layers
    most = sum(
        isinstance(layer.attention_norm, RmsNorm) and isinstance(layer.attention, Attention) for layer in layers
    ) - 1
    assert len(fused) >= 8 * most and set(fused) <= {1, 2}


@pytest.mark.parametrize("name", ["llama-tied-biased", "gemma3", "granite", "olmo2"])
def test_bfloat16_is_as_near_as_transformers_is(name: str):
    """Both round in their own places; neither may be much further from float32 than the other."""
    model = make_oracle(*CASES[name])
    tokens = prompt(6)
    exact = oracle_logits(model, tokens)
    harness = build_harness(config_json(model), model.state_dict(), dtype=torch.bfloat16)
    ours = harness.step((harness.start(), tokens))[0]
    theirs = oracle_logits(model.bfloat16(), tokens).float()
    assert ours.dtype == torch.float32
    assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm()


@pytest.mark.parametrize(
    "name", ["dots1", "granite-moe", "granite-moe-shared", "minimax-m2", "olmoe", "phi", "qwen2-moe", "qwen3-moe"]
)
def test_tensors_as_they_are_published(name: str, tmp_path: Path):
    """transformers renames and stacks tensors when it loads a model, and undoes that when it saves one."""
    model = make_oracle(*CASES[name])
    model.save_pretrained(tmp_path)
    harness = build_harness(config_json(model), load_file(tmp_path / "model.safetensors"))
    tokens = prompt(8)
    torch.testing.assert_close(harness.step((harness.start(), tokens))[0], oracle_logits(model, tokens), **TOLERANCE)


def test_minimax_m2_without_its_norms_and_with_another_routing_is_mixtral():
    """Fields of published files that transformers does not read."""
    model = make_oracle("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2})
    plain = {"head_dim": 12, "use_qk_norm": False, "scoring_func": "softmax", "use_routing_bias": False}
    harness = build_harness(
        {**config_json(model), **plain, "architectures": ["MiniMaxM2ForCausalLM"]}, model.state_dict()
    )
    tokens = prompt(8)
    torch.testing.assert_close(harness.step((harness.start(), tokens))[0], oracle_logits(model, tokens), **TOLERANCE)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "name", [name for name in CASES if name.startswith(("mixtral", "qwen3-moe", "gpt-oss", "deepseek"))]
)
def test_mixtures_of_experts_on_a_gpu(name: str):
    """In float32 as on a CPU, chunked and step by step; in bfloat16 about as near as transformers is: rounding makes
    some token choose another expert, here as there."""
    model, tokens, device = make_oracle(*CASES[name]), prompt(0), torch.device("cuda")
    expected = oracle_logits(model, tokens)
    harness = build_harness(config_json(model), model.state_dict(), page_size=16, device=device)
    for chunk in (PROMPT_LEN, 5, 1):
        torch.testing.assert_close(prefill_in_chunks(harness, tokens, chunk)[1], expected, **TOLERANCE)
    halved = build_harness(config_json(model), model.state_dict(), page_size=16, device=device, dtype=torch.bfloat16)
    ours = halved.step((halved.start(), tokens))[0]
    theirs = oracle_logits(model.bfloat16(), tokens).float()
    assert (ours - expected).norm() <= 4 * (theirs - expected).norm()
