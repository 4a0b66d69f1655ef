"""Nothing is compiled while a request waits: on a machine that has compiled nothing, all of it is done before the
first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import write_tiny_model

pytestmark = pytest.mark.cuda
pytest.importorskip("llguidance")

CHILD = Path(__file__).parent / "kernels_after_start.py"
BASE = {
    "vocab_size": 320, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 2,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
SHAPES = {
    "qwen3": {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128
    },
    "gemma3": {
        "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512,
        "query_pre_attn_scalar": 256, "rope_local_base_freq": 10000.0,
        "layer_types": ["sliding_attention", "full_attention"], "hidden_activation": "gelu_pytorch_tanh",
    },
}


# any token that a long prompt has, which is any token, is behind one that was sampled before
DRAFTS = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}
OPTIONS = {"qwen3": {"speculative_config": DRAFTS}, "gemma3": {}}


@pytest.mark.parametrize("name", SHAPES)
def test_requests_of_all_kinds_wait_for_no_compiler(name: str, tmp_path: Path):
    write_tiny_model(tmp_path, {**BASE, **SHAPES[name]})
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "kernels")}
    done = subprocess.run(
        [sys.executable, str(CHILD), str(tmp_path), json.dumps(OPTIONS[name])], env=environment, capture_output=True,
        text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert len(told["before"]) > 10, "the cache was not empty, or nobody takes note of what is compiled"
    assert told["after"] == []
    assert told["num_drafts"] > 0 or not OPTIONS[name]
