"""A step for which a real GPU has no memory ends nobody. Takes all of the GPU's memory for a moment: run it alone."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.execution.sleep import sweep

pytestmark = pytest.mark.cuda

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 2048, "hidden_size": 1024,
    "intermediate_size": 8192, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "float32", "eos_token_id": 2,
}
SPARE_BYTES = 160 * 2**20
"""Enough for a step of a thousand tokens, not for one of eight thousand: gate and up alone are 512 MiB there."""
LEFT_BYTES = 128 * 2**20
"""What libraries keep for themselves once they have been used."""


def test_requests_finish_in_smaller_steps(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 2048) for _ in range(length)] for length in (8000, 50, 6000, 3)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    sweep(torch.device("cuda"))
    held = torch.cuda.memory_reserved()
    with LLM(
        str(tmp_path), load_format="dummy", skip_tokenizer=True, device="cuda", max_step_tokens=8192, kv_pages=600,
        prefix_cache=False
    ) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompt_token_ids=prompts, sampling_params=params)]
        limit = llm._client._engine._scheduler._limit
        assert limit.tokens == 8192
        torch.cuda.empty_cache()
        hog = torch.empty(torch.cuda.mem_get_info()[0] - SPARE_BYTES, dtype=torch.uint8, device="cuda")
        try:
            outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params)
        finally:
            del hog
            torch.cuda.empty_cache()
        assert limit.tokens < 8192, "the step had memory enough: the test proves nothing"
        assert [o.outputs[0].finish_reason for o in outputs] == ["length"] * len(prompts)
        same = sum(o.outputs[0].token_ids[0] == ids[0] for o, ids in zip(outputs, expected, strict=True))
        assert same >= 3, "sums in other orders may turn one token, not more"
        llm.check()
        assert llm.stats().num_running == 0
    assert torch.cuda.memory_reserved() - held <= LEFT_BYTES, "tensors of the failed step are still there"
