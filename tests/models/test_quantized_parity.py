"""Quantised checkpoints against transformers, which dequantises them itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from layers.format_cases import CASES, LLAMA, make_checkpoint

from headrace import LLM, SamplingParams

PROMPT = [3, 77, 150, 9, 42, 8]


def dequantise(folder: Path) -> Any:
    settings = transformers.CompressedTensorsConfig(run_compressed=False)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings, dtype="float32")


@pytest.mark.parametrize("name", ["ct-int4-group", "ct-int4-asymmetric", "ct-int8", "ct-float-channel"])
def test_logits_are_those_of_transformers(name: str, tmp_path: Path):
    make_checkpoint(tmp_path / "m", LLAMA, CASES[name])
    with torch.no_grad():
        logits = dequantise(tmp_path / "m")(torch.tensor([PROMPT])).logits[0, -1].float()
    expected = logits.log_softmax(-1)
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=8, detokenize=False, ignore_eos=True)
    options = {"dtype": "float32", "device": "cpu", "kv_pages": 32, "skip_tokenizer": True}
    for quantization, tolerance in (("none", 1e-3), ("stored", 0.1)):
        with LLM(str(tmp_path / "m"), quantization=quantization, **options) as llm:
            found = llm.generate(prompt_token_ids=[PROMPT], sampling_params=params)[0].outputs[0].logprobs[0]
        assert found.top_logprobs == pytest.approx(expected[list(found.top_ids)].tolist(), abs=tolerance)
