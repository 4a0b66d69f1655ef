"""The safetensors reader against the safetensors package, and against damaged files."""

from __future__ import annotations

import json
import os
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from headrace.base.errors import ConfigError, WeightError
from headrace.models.checkpoint import open_weights
from headrace.models.source import ModelSource
from headrace.models.weights.gguf_file import read_gguf_header
from headrace.models.weights.safetensors_file import read_header, read_safetensors
from headrace.service.tokenization import load_tokenizer

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8,
    torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64,
]


def same_bytes(a, b):
    return (
        a.dtype == b.dtype and a.shape == b.shape
        and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    )


@pytest.fixture(scope="module")
def tensors():
    torch.manual_seed(0)
    made = {f"t.{str(dtype)[6:]}": torch.randint(0, 2, (3, 5)).to(dtype) for dtype in DTYPES}
    return {**made, "scalar": torch.tensor(1.5), "empty": torch.empty(0, 4), "big": torch.randn(64, 33)}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, tensors):
    path = tmp_path_factory.mktemp("safetensors") / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def test_reads_what_the_safetensors_package_reads(tiny, tensors):
    loaded, oracle = dict(read_safetensors([tiny])), load_file(tiny)
    assert loaded.keys() == oracle.keys() == tensors.keys()
    assert all(same_bytes(loaded[name], oracle[name]) for name in oracle)


def test_tensors_are_views_and_the_file_never_changes(tiny):
    before = tiny.read_bytes()
    loaded = dict(read_safetensors([tiny]))
    floats = [t for t in loaded.values() if t.dtype == torch.float32 and t.numel()]
    assert len({t.untyped_storage().data_ptr() for t in floats}) == 1
    loaded["big"].zero_()
    assert tiny.read_bytes() == before


def test_shards_are_read_in_order_and_repeated_names_once(tmp_path, caplog):
    save_file({"a": torch.ones(2), "b": torch.zeros(3)}, tmp_path / "1.safetensors")
    save_file({"b": torch.ones(3), "c": torch.ones(4)}, tmp_path / "2.safetensors")
    loaded = list(read_safetensors([tmp_path / "1.safetensors", tmp_path / "2.safetensors"]))
    assert sorted(name for name, _ in loaded) == ["a", "b", "c"]
    assert dict(loaded)["b"].tolist() == [0, 0, 0]
    assert "2.safetensors holds b again" in caplog.text


def test_unaligned_tensors_are_read(tmp_path):
    header = json.dumps(
        {
            "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]}
        }
    ).encode()
    path = tmp_path / "odd.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\x07" + struct.pack("<2f", 1.5, -2))
    assert dict(read_safetensors([path]))["b"].tolist() == [1.5, -2]


def entry(**changes):
    return {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24], **changes}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ([], "no JSON object"),
        ({"a": 1}, "no description"),
        ({"a": entry(dtype="F7")}, "dtype 'F7'"),
        ({"a": entry(dtype=[1])}, "dtype"),
        ({"a": entry(shape=[2, -3])}, "shape"),
        ({"a": entry(shape=[2.0, 3])}, "shape"),
        ({"a": entry(shape=[True, 6])}, "shape"),
        ({"a": entry(shape=[2**40, 2**40, 0], data_offsets=[0, 0])}, "shape"),
        ({"a": entry(shape=[1] * 99)}, "shape"),
        ({"a": entry(data_offsets=[0])}, "data_offsets"),
        ({"a": entry(data_offsets=[24, 0])}, "lies at"),
        ({"a": entry(data_offsets=[8, 32])}, "lies at"),
        ({"a": entry(data_offsets=[0, 20])}, "said to have 20 bytes"),
    ],
)
def test_damage_is_named(tmp_path, header, message):
    path, text = tmp_path / "bad.safetensors", json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(24))
    with pytest.raises(WeightError, match=message):
        read_header(path)


def write_raw(path, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.mark.parametrize(
    ("spans", "size", "message"),
    [
        ({"a": (0, 24), "b": (0, 24)}, 24, "'a' and 'b' overlap, at bytes"),
        ({"a": (0, 24), "b": (20, 44)}, 44, "'a' and 'b' overlap"),
        ({"b": (0, 48), "a": (12, 36)}, 48, "'b' and 'a' overlap"),
        ({"a": (0, 24), "b": (32, 56)}, 56, "before tensor 'b', belong to no tensor"),
        ({"a": (8, 32)}, 32, "before tensor 'a', belong to no tensor"),
        ({"a": (0, 24)}, 40, "its last 16 bytes belong to no tensor"),
    ],
)
def test_bytes_belong_to_one_tensor(tmp_path, spans, size, message):
    header = {
        name: {"dtype": "F32", "shape": [(stop - start) // 4], "data_offsets": [start, stop]}
        for name, (start, stop) in spans.items()
    }
    path = write_raw(tmp_path / "bad.safetensors", header, bytes(size))
    with pytest.raises(WeightError, match=message):
        read_header(path)
    with pytest.raises(Exception, match=r"(?i)invalid|incomplete"):  # the safetensors package refuses them too
        load_file(path)


def test_empty_tensors_share_an_offset(tmp_path):
    header = {
        "a": entry(), **{n: {"dtype": "F32", "shape": [0, 4], "data_offsets": [24, 24]} for n in "bc"},
        "d": entry(data_offsets=[24, 48]),
    }
    names = [tensor.name for tensor in read_header(write_raw(tmp_path / "m.safetensors", header, bytes(48)))]
    assert names[0] == "a" and names[-1] == "d" and sorted(names) == list("abcd")


@pytest.mark.parametrize(
    "header",
    [
        b'{"a": %s, "a": %s}' % ((json.dumps(entry()).encode(),) * 2),
        b'{"a": {"dtype": "I32", "dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}',
    ],
)
def test_a_key_that_is_there_twice_is_refused(tmp_path, header):
    with pytest.raises(WeightError, match=r"bad\.safetensors has a corrupt.* is there twice"):
        read_header(write_raw(tmp_path / "bad.safetensors", header, bytes(24)))


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\x01", struct.pack("<Q", 2**63), struct.pack("<Q", 9) + b"{", struct.pack("<Q", 50000) + b"[" * 50000,
        struct.pack("<Q", 2) + b"\xff\xfe"
    ]
)
def test_broken_headers_are_weight_errors(tmp_path, content):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(WeightError, match=r"bad\.safetensors"):
        read_header(path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf", "tokenizer.json", "tokenizer.model"])
def test_what_a_clone_without_lfs_leaves_is_told_as_such(tmp_path, name):
    path = tmp_path / name
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 269060552\n")
    read = (
        {".safetensors": read_header, ".gguf": read_gguf_header}.get(path.suffix)
        or (lambda at: load_tokenizer(ModelSource("m", "folder", at.parent, {})))
    )
    with pytest.raises(WeightError, match=f"{name} is a pointer of Git LFS.* git lfs pull"):
        read(path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf", "tokenizer.json", "tokenizer.model"])
def test_pipes_are_refused_before_they_are_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    path = tmp_path / name
    read = {".safetensors": read_header, ".gguf": read_gguf_header}.get(path.suffix)
    with pytest.raises(WeightError, match=f"{name} is no regular file"):
        read(path) if read else load_tokenizer(ModelSource("m", "folder", tmp_path, {}), tokenizer=str(path))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_mutated_files_never_raise_anything_else(tiny, tmp_path_factory, data):
    content = bytearray(tiny.read_bytes())
    header_end = 8 + struct.unpack("<Q", content[:8])[0]
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, header_end - 1))
        patch = data.draw(
            st.one_of(
                st.binary(min_size=1, max_size=4),
                st.sampled_from([b"9", b"[", b'"', b"}", b"-", b"e9", b"null", b"F32"])
            )
        )
        content[at : at + len(patch)] = patch
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    path.write_bytes(content)
    try:
        for _, tensor in read_safetensors([path]):
            tensor.clone()
    except WeightError as error:
        assert "mutated.safetensors" in str(error)


def test_open_weights_of_a_folder(tiny, tmp_path):
    source = ModelSource("m", "folder", tiny.parent, {"architectures": ["LlamaForCausalLM"]}, weight_files=(tiny,))
    oracle = load_file(tiny)
    assert {
        name for name, _ in open_weights(source, load_format="auto", device="cpu", dtype=torch.float32)
    } == oracle.keys()
    with pytest.raises(ConfigError, match="load_format"):
        open_weights(source, load_format="gguf", device="cpu", dtype=torch.float32)
