"""Quantised checkpoints on a GPU: codes are kept and multiplied with, graphs and single steps agree, and the model says
what it says dequantised."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layers.format_cases import CASES, LLAMA, make_checkpoint

from headrace import LLM, SamplingParams
from headrace.base.config import engine_config
from headrace.execution.loading import load_model
from headrace.kernels.coded_linear import choice
from headrace.kernels.moe import RUN_EXPERTS
from headrace.layers.moe import choice as expert_choice
from headrace.layers.moe.layer import MoeMlp
from headrace.layers.quantization.storage import find_stored

pytestmark = pytest.mark.cuda

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"
SIZES = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "num_attention_heads": 8}
NAMES = [
    "fp8-block", "fp8-static", "fbgemm", "ct-float-channel", "ct-int8", "ct-int4-asymmetric", "gptq", "gptq-order",
    "awq", "ct-nvfp4", "ct-mxfp4", "nf4", "bnb-int8",
]
PARAMS = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=1, detokenize=False)
PROMPTS = [[(7 * i * j + 3) % 160 for j in range(length)] for i, length in enumerate((1, 5, 40, 200), 1)]


@pytest.fixture(autouse=True)
def _prefer_codes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Models of a test are too small for codes to pay off: their products count as faster."""

    def time(calls: list[partial[Any]]) -> float:
        calls[0]()
        return 2.0 if calls[0].func is F.linear else 1.0

    monkeypatch.setattr(choice, "time_chain", time)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))


def generate(folder: Path, **options: Any) -> list[Any]:
    with LLM(str(folder), skip_tokenizer=True, dtype="bfloat16", device="cuda", kv_pages=256, **options) as llm:
        return [o.outputs[0] for o in llm.generate(prompt_token_ids=PROMPTS, sampling_params=PARAMS)]


@pytest.mark.parametrize("name", NAMES)
def test_codes_are_kept_and_say_what_plain_weights_say(name: str, tmp_path: Path):
    if name.startswith("ct-"):
        pytest.importorskip("compressed_tensors")  # whose own packing writes these
    folder = tmp_path / "m"
    make_checkpoint(folder, {**LLAMA, **SIZES, "torch_dtype": "bfloat16"}, CASES[name])
    loaded = load_model(
        engine_config(model=str(folder), skip_tokenizer=True, dtype="bfloat16"), torch.device("cuda"), lambda *_: None
    )
    assert len(find_stored(loaded.model)) == 4 * LLAMA["num_hidden_layers"]
    del loaded
    kept, plain = generate(folder), generate(folder, quantization="none")
    for one, other in zip(kept, plain, strict=True):
        assert one.logprobs[0].top_logprobs == pytest.approx(other.logprobs[0].top_logprobs, abs=0.3)
    eager = generate(folder, graphs="off")
    assert sum(a.token_ids == b.token_ids for a, b in zip(kept, eager, strict=True)) >= len(PROMPTS) - 1


def test_any_checkpoint_is_served_in_fp8(tmp_path: Path):
    folder = tmp_path / "m"
    make_checkpoint(folder, {**LLAMA, **SIZES, "torch_dtype": "bfloat16"}, None)
    kept, plain = generate(folder, quantization="fp8"), generate(folder)
    for one, other in zip(kept, plain, strict=True):
        assert one.logprobs[0].top_logprobs == pytest.approx(other.logprobs[0].top_logprobs, abs=0.5)


SMALL = {
    "num_hidden_layers": 2, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": 512, "max_position_embeddings": 1024, "num_experts_per_tok": 2, "initializer_range": 0.05,
}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "MXFP4": ("gpt-oss-20b", {
        "intermediate_size": 288, "num_local_experts": 4, "layer_types": ["sliding_attention", "full_attention"],
        "quantization_config": {"quant_method": "mxfp4"},
    }),
    "FP8 block": ("qwen3-30b-a3b", {
        "moe_intermediate_size": 256, "num_experts": 8,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }),
    "GPTQ": ("qwen3-30b-a3b", {
        "moe_intermediate_size": 256, "num_experts": 8,
        "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 64},
    }),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_in_codes_say_what_plain_ones_say(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The same numbers both ways, as few tokens and as long prompts; graphs and single steps agree."""
    shape, own = MIXTURES[name]
    folder = tmp_path / "m"
    folder.mkdir()
    config = json.loads((MODELS / shape / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **SMALL, **own}))
    kept = {}
    for way, (coded_s, plain_s) in {"codes": (1.0, 2.0), "plain": (2.0, 1.0)}.items():

        def time(call: partial[Any], coded_s: float = coded_s, plain_s: float = plain_s) -> float:
            call()
            return plain_s if call.func is RUN_EXPERTS.load("cuda") else coded_s

        monkeypatch.setattr(expert_choice, "time_on_gpu", time)
        monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / way))
        loaded = load_model(
            engine_config(model=str(folder), skip_tokenizer=True, dtype="bfloat16", load_format="dummy"),
            torch.device("cuda"), lambda *_: None
        )
        layers = [module for module in loaded.model.modules() if isinstance(module, MoeMlp)]
        assert layers and all((layer.experts.down.stored is not None) == (way == "codes") for layer in layers)
        del loaded, layers
        kept[way] = generate(folder, load_format="dummy")
        if way == "codes":
            eager = generate(folder, load_format="dummy", graphs="off")
            assert sum(a.token_ids == b.token_ids for a, b in zip(kept[way], eager, strict=True)) >= len(PROMPTS) - 1
    for one, other in zip(kept["codes"], kept["plain"], strict=True):
        assert one.logprobs[0].top_logprobs == pytest.approx(other.logprobs[0].top_logprobs, abs=0.3)
