"""Keys and values in 8 bits served end to end: near the plain ones, in half the memory, with what prefixes share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.base.errors import ConfigError

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu", "torch_dtype": "bfloat16", "eos_token_id": 2, "initializer_range": 0.2,
}
SHARED = list(range(3, 83))
PROMPTS = [[*SHARED, 90 + i, 200] for i in range(5)] + [[5, 9, 300, 41], [7]]
SCORED = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def serve(folder: Path, **options: object) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Logprobs of the prompts' tokens; those of greedy continuations of prompts that begin alike; bytes of keys and
    values."""
    with LLM(str(folder), load_format="dummy", skip_tokenizer=True, kv_pages=64, **options) as llm:
        first = llm.generate(prompt_token_ids=PROMPTS[:1], sampling_params=SCORED)
        outputs = llm.generate(prompt_token_ids=PROMPTS, sampling_params=GREEDY)
        llm.check()
        num_bytes = next(line.num_bytes for line in llm.memory_plan() if line.name.startswith("KV"))
        read = torch.tensor([place.logprob for place in first[0].prompt_logprobs[1:]])
        return (
            read, torch.tensor([[place.logprob for place in output.outputs[0].logprobs] for output in outputs]),
            num_bytes
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_near_the_plain_ones_in_less_memory(folder: Path, dtype: str):
    plain, _, plain_bytes = serve(folder, dtype=dtype)
    read, made, num_bytes = serve(folder, dtype=dtype, kv_dtype="int8")
    assert 0.0 < (read - plain).abs().mean() < 0.05
    assert num_bytes * 16 * torch.finfo(getattr(torch, dtype)).bits // 8 == plain_bytes * (16 + 4)
    _, alone, _ = serve(folder, dtype=dtype, kv_dtype="int8", prefix_cache=False)
    assert (made[:, 0] - alone[:, 0]).abs().max() < 0.1, "what a prefix was read from the cache for"


def test_refused_by_name_where_nothing_reads_them(folder: Path, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": 72, "head_dim": 18}))
    message = "kv_dtype int8, which takes head dims that are multiples of 4, not 18; take kv_dtype auto"
    with pytest.raises(ConfigError, match=message):
        LLM(str(tmp_path), load_format="dummy", skip_tokenizer=True, kv_pages=64, kv_dtype="int8")
