"""GGUF tensors of every type against the gguf package's reader and dequantisation."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from headrace.base.errors import WeightError
from headrace.layers.quantization.blocks import BlockTensor
from headrace.models.weights.gguf_file import GgufTensor, read_gguf_header
from headrace.models.weights.gguf_naming import NamedTensor
from headrace.models.weights.gguf_tensors import read_tensors

FLOATS = {"F32", "F16", "F64", "BF16"}
INTEGERS = {"I8", "I16", "I32", "I64"}


def _can_dequantise(kind: GGMLQuantizationType) -> bool:
    try:
        gguf.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


QUANTISED = [kind for kind in GGMLQuantizationType if kind.name not in FLOATS | INTEGERS and _can_dequantise(kind)]


def encode(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Rows of blocks of a type: by the package where it can, else random blocks, whose meaning is as well defined."""
    try:
        return gguf.quantize(values, kind)
    except NotImplementedError:
        block, size = GGML_QUANT_SIZES[kind]
        blocks = np.random.default_rng(kind).integers(
            0, 256, (*values.shape[:-1], values.shape[-1] // block * size), dtype=np.uint8
        )
        return blocks


def write_tensors(path, tensors):
    writer = gguf.GGUFWriter(path, "llama")
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path, *, dtype=None, threads=2, keeps_blocks=False, **changes):
    named = [NamedTensor(tensor.name, tensor, **changes) for tensor in read_gguf_header(path).tensors]
    return dict(read_tensors(named, dtype=dtype, threads=threads, keeps_blocks=keeps_blocks))


def test_the_list_of_types_is_the_real_one():
    names = {kind.name for kind in QUANTISED}
    assert {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"} <= names
    assert {
        "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0",
        "MXFP4"
    } <= names


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_dequantises_as_the_gguf_package_does(tmp_path, kind):
    values = np.random.default_rng(0).normal(size=(37, 768)).astype(np.float32)
    path = write_tensors(tmp_path / "one.gguf", {"w": (encode(values, kind), kind)})
    oracle = gguf.GGUFReader(path).tensors[0]
    expected = gguf.dequantize(oracle.data, oracle.tensor_type)
    got = load(path)["w"]
    assert got.shape == (37, 768) and got.dtype == torch.float32
    np.testing.assert_array_equal(got.numpy(), expected)


def test_chunks_join_without_seams(tmp_path, monkeypatch):
    kind = GGMLQuantizationType.Q8_0
    values = np.random.default_rng(0).normal(size=(100, 96)).astype(np.float32)
    path = write_tensors(tmp_path / "one.gguf", {"w": (gguf.quantize(values, kind), kind)})
    whole = load(path)["w"]
    monkeypatch.setattr("headrace.models.weights.gguf_tensors.CHUNK_ELEMENTS", 7 * 32)
    assert torch.equal(load(path)["w"], whole)
    torch.testing.assert_close(whole, torch.from_numpy(values), atol=0.02, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_matrices_arrive_in_the_wanted_type_and_vectors_in_float32(tmp_path, dtype):
    kind, values = GGMLQuantizationType.Q4_0, np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    path = write_tensors(
        tmp_path / "two.gguf", {"w": (gguf.quantize(values, kind), kind), "b": (gguf.quantize(values[0], kind), kind)}
    )
    loaded = load(path, dtype=dtype)
    assert loaded["w"].dtype == dtype and loaded["b"].dtype == torch.float32
    assert torch.equal(loaded["w"], load(path)["w"].to(dtype))


@pytest.mark.parametrize("name", sorted(FLOATS | INTEGERS))
def test_plain_types_are_views_of_the_file(tmp_path, name):
    kind = GGMLQuantizationType[name]
    values = np.random.default_rng(0).integers(-100, 100, (5, 3)).astype(np.float32)
    stored = {
        "BF16": lambda v: gguf.quantize(v, kind), "F16": lambda v: v.astype(np.float16),
        "F64": lambda v: v.astype(np.float64), "F32": lambda v: v
    }
    data = stored[name](values) if name in stored else values.astype(getattr(np, "int" + name[1:]))
    path = write_tensors(tmp_path / "one.gguf", {"w": (data, kind)})
    got = load(path, dtype=torch.bfloat16)["w"]
    assert str(got.dtype).endswith(
        {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}.get(name, "int" + name[1:])
    )
    assert got.tolist() == values.tolist()


@pytest.mark.parametrize(
    "kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.F32, GGMLQuantizationType.F16], ids=lambda kind: kind.name
)
def test_rows_are_reordered_and_offsets_taken_off(tmp_path, kind):
    values = np.random.default_rng(0).normal(size=(6, 32)).astype(np.float32)
    data = gguf.quantize(values, kind)
    path = write_tensors(tmp_path / "one.gguf", {"w": (data, kind)})
    order = np.array([3, 1, 5, 0, 2, 4])
    plain, moved = load(path)["w"], load(path, row_order=order)["w"]
    assert torch.equal(moved, plain[torch.from_numpy(order)])
    torch.testing.assert_close(load(path, offset=1.0)["w"], plain.float() - 1.0)


def test_blocks_are_kept_when_wanted_and_are_plain_to_whoever_does_not_know_them(tmp_path):
    values = np.random.default_rng(0).normal(size=(6, 256)).astype(np.float32)
    kinds = {"kept": GGMLQuantizationType.Q4_1, "plain": GGMLQuantizationType.F16}
    path = write_tensors(
        tmp_path / "one.gguf", {name: (gguf.quantize(values, kind), kind) for name, kind in kinds.items()}
    )
    order = np.array([3, 1, 5, 0, 2, 4])
    expected, got = load(path, row_order=order), load(path, row_order=order, keeps_blocks=True)
    assert isinstance(got["kept"], BlockTensor) and type(got["plain"]) is torch.Tensor
    assert got["kept"].blocks.kind == "Q4_1" and got["kept"].shape == (6, 256) and got["kept"].dtype == torch.float32
    out = torch.zeros(6, 256)
    out.copy_(got["kept"])
    for values_seen in (out, got["kept"].clone(), torch.cat(got["kept"].split(2))):
        assert torch.equal(values_seen, expected["kept"])
    assert not isinstance(load(path, offset=1.0, keeps_blocks=True)["kept"], BlockTensor)


def test_order_is_kept_whatever_the_threads_and_the_budget(tmp_path, monkeypatch):
    monkeypatch.setattr("headrace.models.weights.gguf_tensors.AHEAD_BYTES", 4096)
    kind, random = GGMLQuantizationType.Q8_0, np.random.default_rng(0)
    tensors = {
        f"w{i}": (gguf.quantize(random.normal(size=(int(random.integers(1, 40)), 32)).astype(np.float32), kind), kind)
        for i in range(40)
    }
    path = write_tensors(tmp_path / "many.gguf", tensors)
    oracle = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(path).tensors}
    loaded = load(path, threads=4)
    assert list(loaded) == list(tensors)
    for name, expected in oracle.items():
        np.testing.assert_array_equal(loaded[name].numpy(), expected)


def test_truncated_data_is_refused_before_anything_is_read(tmp_path):
    path = write_tensors(
        tmp_path / "one.gguf", {"a": (np.ones((4, 32), np.float32), None), "b": (np.ones((4, 32), np.float32), None)}
    )
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(WeightError, match="truncated: tensor b"):
        load(path)


def test_unknown_types_and_odd_rows_are_refused(tmp_path):
    path = write_tensors(tmp_path / "one.gguf", {"a": (np.ones((4, 32), np.float32), None)})
    stored = read_gguf_header(path).tensors[0]
    for changed, message in (
        (GgufTensor("a", (4, 32), 9999, path, stored.offset), "unknown"),
        (GgufTensor("a", (4, 33), 2, path, stored.offset), "multiple")
    ):
        with pytest.raises(WeightError, match=message):
            list(read_tensors([NamedTensor("a", changed)], dtype=None, threads=1))
    with pytest.raises(WeightError, match="cannot be dequantised"):
        list(
            read_tensors(
                [NamedTensor("a", GgufTensor("a", (1, 256), int(GGMLQuantizationType.Q8_K), path, stored.offset))],
                dtype=None, threads=1
            )
        )
