"""Quantised checkpoints against transformers, which dequantises them itself: what writers of the tests make, what it
makes by other packages, gpt-oss's experts in MXFP4, and a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from layers.format_cases import CASES, LLAMA, make_checkpoint
from safetensors.torch import load_file, save_file

from headrace import LLM, SamplingParams

PROMPT = [3, 77, 150, 9, 42, 8]
PARAMS = SamplingParams(max_tokens=1, temperature=0, logprobs=8, detokenize=False, ignore_eos=True)
WIDE = {**LLAMA, "hidden_size": 256, "intermediate_size": 384, "num_key_value_heads": 4, "head_dim": 64}
"""Sizes that blocks of 128 divide: transformers divides others into blocks of other sizes."""


def find_logprobs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits[0, -1].float().log_softmax(-1)


def assert_same_logits(
    model: Path, expected: torch.Tensor, tolerance: float, quantization: str = "none", **options: Any
) -> None:
    options = {"dtype": "float32", "device": "cpu", "kv_pages": 32, "skip_tokenizer": True, **options}
    with LLM(str(model), quantization=quantization, **options) as llm:
        found = llm.generate(prompt_token_ids=[PROMPT], sampling_params=PARAMS)[0].outputs[0].logprobs[0]
    assert found.top_logprobs == pytest.approx(expected[list(found.top_ids)].tolist(), abs=tolerance)
    assert found.top_ids[0] == int(expected.argmax()) or expected[found.top_ids[0]] > expected.max() - 2 * tolerance


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("ct-") or name in (
    "fp8-block", "fp8-small-blocks", "fp8-block-powers"
)])
def test_logits_are_those_of_transformers(name: str, tmp_path: Path):
    make_checkpoint(tmp_path / "m", WIDE, CASES[name])
    settings = (
        transformers.CompressedTensorsConfig(run_compressed=False) if name.startswith("ct-")
        else transformers.FineGrainedFP8Config(dequantize=True)
    )
    expected = find_logprobs(
        transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "m", quantization_config=settings, dtype="float32"
        )
    )
    # compressed-tensors says what NVFP4 stands for in fewer bits
    assert_same_logits(tmp_path / "m", expected, 0.1 if name == "ct-nvfp4" else 1e-4)
    if CASES[name].is_packed:
        assert_same_logits(tmp_path / "m", expected, 0.1, "stored")


def torchao(name: str, **options: Any) -> transformers.TorchAoConfig:
    quantization = pytest.importorskip("torchao.quantization")
    return transformers.TorchAoConfig(getattr(quantization, name)(**options))


def torchao_groups(dtype: torch.dtype, size: int) -> transformers.TorchAoConfig:
    granularity = pytest.importorskip("torchao.quantization.granularity")
    return torchao("IntxWeightOnlyConfig", weight_dtype=dtype, granularity=granularity.PerGroup(size))


def bitsandbytes(**options: Any) -> transformers.BitsAndBytesConfig:
    pytest.importorskip("bitsandbytes")
    return transformers.BitsAndBytesConfig(**options)


PACKAGES: dict[str, Callable[[], Any]] = {
    "torchao-int8": lambda: torchao("Int8WeightOnlyConfig"),
    "torchao-int8-inputs": lambda: torchao("Int8DynamicActivationInt8WeightConfig"),
    "torchao-fp8": lambda: torchao("Float8WeightOnlyConfig"),
    "torchao-int4": lambda: torchao_groups(torch.int4, 32), "torchao-int3": lambda: torchao_groups(torch.int3, 64),
    "nf4": lambda: bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "nf4-nested": lambda: bitsandbytes(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "fp4": lambda: bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "bnb-int8": lambda: bitsandbytes(load_in_8bit=True),
}


@pytest.mark.parametrize("name", PACKAGES)
def test_checkpoints_that_transformers_quantised_and_saved(name: str, tmp_path: Path):
    """By torchao, which computes in bfloat16, and by bitsandbytes."""
    settings = PACKAGES[name]()
    make_checkpoint(tmp_path / "plain", LLAMA, None)
    dtype = torch.bfloat16 if name.startswith("torchao") else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=settings, dtype=dtype, device_map="cpu"
    )
    model.save_pretrained(tmp_path / "m")  # first: bitsandbytes rounds its tables when it multiplies on a CPU
    assert_same_logits(tmp_path / "m", find_logprobs(model), 0.02)


GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 160, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 256,
    "sliding_window": 4, "tie_word_embeddings": False, "initializer_range": 0.2, "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}


def test_experts_in_mxfp4_are_those_of_transformers(tmp_path: Path):
    """Stored as gpt-oss is: blocks and scales of all experts of a layer."""
    torch.manual_seed(3)
    config = transformers.GptOssConfig(**{k: v for k, v in GPT_OSS.items() if k != "architectures"})
    transformers.GptOssForCausalLM(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(122, 125, (experts, outputs, inputs // 32), dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config.quantization_config = {"quant_method": "mxfp4"}
    config.save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=transformers.Mxfp4Config(dequantize=True), dtype="float32"
    )
    expected = find_logprobs(model)
    assert_same_logits(tmp_path, expected, 1e-3)
    assert_same_logits(tmp_path, expected, 0.1, "stored")


def write_gguf(path: Path) -> None:
    """A Llama of two layers, with more bits in some layers than in others, as files of llama.cpp have them."""
    chance, writer = np.random.default_rng(1), gguf.GGUFWriter(path, "llama")
    for key, value in {
        "block_count": 2, "context_length": 256, "embedding_length": 256, "feed_forward_length": 512,
        "attention.head_count": 4, "attention.head_count_kv": 2, "rope.dimension_count": 64, "vocab_size": 160,
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_tensor("output_norm.weight", np.ones(256, np.float32))
    matrices = {"token_embd": (160, 256, "Q8_0"), "output": (160, 256, "Q6_K")}
    for layer, more in enumerate(("Q6_K", "Q5_0")):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", 1 + 0.1 * chance.random(256, np.float32))
        matrices |= {
            f"blk.{layer}.{name}": shape for name, shape in {
                "attn_q": (256, 256, "Q4_K"), "attn_k": (128, 256, "Q4_K"), "attn_v": (128, 256, more),
                "attn_output": (256, 256, "Q4_0"), "ffn_gate": (512, 256, "Q4_K"), "ffn_up": (512, 256, "Q5_K"),
                "ffn_down": (256, 512, more),
            }.items()
        }
    for name, (outputs, inputs, kind) in matrices.items():
        type_id = gguf.GGMLQuantizationType[kind]
        values = chance.normal(scale=0.1, size=(outputs, inputs)).astype(np.float32)
        writer.add_tensor(f"{name}.weight", encode(chance, values, type_id), raw_dtype=type_id)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def encode(chance: np.random.Generator, values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """By the package, or random codes under small scales where it writes a type not."""
    try:
        return gguf.quantize(values, kind)
    except NotImplementedError:
        size = gguf.GGML_QUANT_SIZES[kind][1]
        blocks = chance.integers(0, 256, (values.size // 256, size), dtype=np.uint8)
        if kind is gguf.GGMLQuantizationType.Q6_K:  # d last
            blocks[:, -2:] = np.array([1e-4], np.float16).view(np.uint8)
        else:  # d and dmin first
            blocks[:, :4] = np.array([4e-4, 3e-3], np.float16).view(np.uint8)
        return blocks.reshape(len(values), -1)


def test_a_gguf_file_says_what_it_says_in_transformers(tmp_path: Path):
    write_gguf(tmp_path / "tiny.gguf")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    expected = find_logprobs(model)
    assert_same_logits(tmp_path / "tiny.gguf", expected, 1e-3)
    assert_same_logits(tmp_path / "tiny.gguf", expected, 0.1, "stored")
