"""The GGUF header reader against the gguf package's own, and against damaged files."""

from __future__ import annotations

import struct
from array import array

import gguf
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.base.errors import WeightError
from headrace.models.weights.gguf_file import read_floats, read_gguf_header, read_gguf_metadata


def write_gguf(path, *, vocabulary=("a", "é", "", "<|end|>"), alignment=None):
    writer = gguf.GGUFWriter(path, "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    writer.add_string("general.name", "tiny ✓")
    writer.add_uint32("llama.block_count", 7)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float64("x.double", 0.1)
    writer.add_bool("x.flag", True)
    writer.add_int64("x.negative", -(2**40))
    writer.add_array("tokenizer.ggml.tokens", list(vocabulary))
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0, 3.25])
    writer.add_array("tokenizer.ggml.token_type", [1, 2, 3])
    writer.add_array("x.flags", [True, False, True])
    writer.add_tensor("token_embd.weight", np.arange(12, dtype=np.float32).reshape(4, 3))
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(3, np.float32))
    writer.add_tensor("blk.0.attn_q.weight", np.arange(6, dtype=np.float16).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.mark.parametrize("alignment", [None, 64, 4096])
def test_reads_what_the_gguf_package_reads(tmp_path, alignment):
    path = write_gguf(tmp_path / "tiny.gguf", alignment=alignment)
    oracle, header = gguf.GGUFReader(path), read_gguf_header(path)
    for name, field in oracle.fields.items():
        if name.startswith("GGUF."):
            continue
        value, expected = header.metadata[name], field.contents()
        if isinstance(value, array):
            assert value.tolist() == expected
        elif isinstance(value, float):
            assert value == pytest.approx(expected, rel=1e-7)
        else:
            assert value == expected and type(value) is type(expected)
    assert len(header.metadata) == sum(not name.startswith("GGUF.") for name in oracle.fields)
    for tensor, expected in zip(header.tensors, oracle.tensors, strict=True):
        assert tensor.name == expected.name
        assert tensor.shape == tuple(reversed(expected.shape.tolist()))
        assert tensor.offset == expected.data_offset
        assert tensor.type_id == expected.tensor_type


def test_float32_scalars_are_the_decimals_that_were_written(tiny):
    assert read_gguf_metadata(tiny)["llama.attention.layer_norm_rms_epsilon"] == 1e-5


@given(st.floats(width=32, allow_nan=False, allow_subnormal=False))
@example(3.4028234663852886e38)
@example(2.0**-126)
@example(float("inf"))
def test_float32_scalars_are_numpys_shortest_decimals(tmp_path_factory, value):
    path = tmp_path_factory.getbasetemp() / "scalar.gguf"
    path.write_bytes(
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"x" + struct.pack("<If", 6, value)
    )
    read = read_gguf_metadata(path)["x"]
    assert np.float32(read) == np.float32(value) and len(repr(read)) <= len(repr(float(str(np.float32(value))))) + 1


@pytest.mark.parametrize(("type_id", "letter", "values"), [
    (0, "B", [0, 255]), (1, "b", [-128, 127]), (2, "H", [65535]), (3, "h", [-32768]), (4, "I", [2**32 - 1]),
    (5, "i", [-(2**31)]),
    (6, "f", [0.5, -3.0]), (7, "?", [True, False]), (10, "Q", [2**64 - 1]), (11, "q", [-(2**63)]), (12, "d", [1e300]),
])
def test_reads_every_type_of_number(tmp_path, type_id, letter, values):
    path, head = tmp_path / "numbers.gguf", b"GGUF" + struct.pack("<IQQ", 3, 0, 2)
    many = (
        struct.pack("<Q", 1) + b"m" + struct.pack("<IIQ", 9, type_id, len(values))
        + struct.pack(f"<{len(values)}{letter}", *values)
    )
    path.write_bytes(
        head + many + struct.pack("<Q", 1) + b"o" + struct.pack("<I", type_id) + struct.pack("<" + letter, values[0])
    )
    metadata = read_gguf_metadata(path)
    assert list(metadata["m"]) == values and metadata["o"] == values[0]
    assert [type(value) for value in (*metadata["m"], metadata["o"])] == [type(values[0])] * (len(values) + 1)


def test_reads_nested_and_empty_arrays(tmp_path):
    def text(value):
        return struct.pack("<Q", len(value)) + value

    nested = struct.pack("<IQ", 9, 2) + struct.pack("<IQ3i", 5, 3, 1, -2, 3) + struct.pack("<IQ", 8, 1) + text(b"deep")
    body = text(b"n") + struct.pack("<I", 9) + nested + text(b"e") + struct.pack("<I", 9) + struct.pack("<IQ", 8, 0)
    path = tmp_path / "nested.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + body)
    metadata = read_gguf_metadata(path)
    assert list(metadata["n"][0]) == [1, -2, 3] and metadata["n"][1] == ["deep"] and metadata["e"] == []


def test_reads_small_constants(tiny):
    tensors = {tensor.name: tensor for tensor in read_gguf_header(tiny).tensors}
    assert read_floats(tensors["blk.0.attn_norm.weight"]) == [1.0, 1.0, 1.0]
    assert read_floats(tensors["blk.0.attn_q.weight"]) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"GGML" + data[4:], "not a GGUF file"),
        (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "version 1"),
        (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "big-endian"),
        (lambda data: data[:8] + struct.pack("<Q", 2**60) + data[16:], "tensor count"),
        (lambda data: data[:16] + struct.pack("<Q", 2**63) + data[24:], "metadata count"),
        (lambda data: data[:24] + struct.pack("<Q", 2**40) + data[32:], "metadata key"),
        (lambda data: data[:12], "has 12 bytes"),
        (lambda data: data[:200], "truncated"),
        (lambda data: data.replace(b"x.flags", b"x.flag\xff"), "UTF-8"),
        (
            lambda data: data.replace(
                b"blk.0.attn_norm.weight", b"blk.0.attn_norm.weighT"
            ).replace(b"blk.0.attn_q", b"\xff" * 12),
            "UTF-8"
        ),
    ],
)
def test_damage_is_named(tiny, tmp_path, damage, message):
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damage(tiny.read_bytes()))
    with pytest.raises(WeightError, match=message):
        read_gguf_header(path)


def test_missing_file_is_a_weight_error(tmp_path):
    with pytest.raises(WeightError, match="cannot read"):
        read_gguf_header(tmp_path / "none.gguf")


def test_repeated_keys_and_tensors_are_refused(tiny, tmp_path):
    path = tmp_path / "damaged.gguf"
    path.write_bytes(tiny.read_bytes().replace(b"tokenizer.ggml.tokens", b"tokenizer.ggml.scores"))
    with pytest.raises(WeightError, match="twice"):
        read_gguf_header(path)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_mutated_headers_never_raise_anything_else(tiny, tmp_path_factory, data):
    content = bytearray(tiny.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        patch = data.draw(
            st.one_of(
                st.binary(min_size=1, max_size=8),
                st.sampled_from([b"\xff" * 8, b"\x00" * 8, struct.pack("<Q", 2**63 - 1)])
            )
        )
        content[at : at + len(patch)] = patch
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    path = tmp_path_factory.getbasetemp() / "mutated.gguf"
    path.write_bytes(content)
    try:
        header = read_gguf_header(path)
    except WeightError as error:
        assert "mutated.gguf" in str(error)
    else:
        assert all(tensor.offset < len(content) or 0 in tensor.shape for tensor in header.tensors)
