"""Adapter files that are wrong, too large or made to harm: typed errors that name the field, module or tensor."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.base.errors import AdapterError, HeadraceError, RequestError, UnsupportedFeature
from headrace.layers.lora.contract import AdapterSite, AdapterSites
from headrace.layers.lora.memory import AdapterMemory, view_bytes
from headrace.models.adapters import contents as contents_module
from headrace.models.adapters.contents import Contents, Piece, Stored, check_parts, examine
from headrace.models.adapters.reader import AdapterSource, read_adapter
from headrace.models.adapters.tensors import AdapterTensors
from headrace.models.weights.safetensors_file import pack_tensors

Q = "base_model.model.model.layers.0.self_attn.q_proj"
SITES = AdapterSites(
    {
        "model.embed_tokens": AdapterSite("embedding", "", 32, 16, "embedding"),
        "model.layers.0.self_attn.q_proj": AdapterSite("layers.0.attention.qkv", "q", 16, 24),
        "model.layers.0.self_attn.v_proj": AdapterSite("layers.0.attention.qkv", "v", 16, 8),
        "lm_head": AdapterSite("head", "", 16, 32, "head"),
    }, lambda name: name, "gate_first", 16,
)
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


def pair(**changed: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"{Q}.lora_A.weight": torch.ones(4, 16), f"{Q}.lora_B.weight": torch.ones(24, 4), **changed}


def write(folder: Path, tensors: dict[str, torch.Tensor], **fields: Any) -> Path:
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **fields}))
    (folder / "adapter_model.safetensors").write_bytes(pack_tensors(tensors))
    return folder


def load(path: Path, *, max_rank: int = 16) -> Any:
    return read_adapter(AdapterSource("a", str(path)), SITES, max_rank=max_rank)


def test_what_is_right_is_read(tmp_path: Path):
    weights = load(write(tmp_path, pair()))
    (part,) = weights.parts
    assert (part.module, part.part, part.scale, weights.rank) == ("layers.0.attention.qkv", "q", 2.0, 4)
    assert weights.modules == ["q_proj"] and weights.num_bytes == 4 * (4 * 16 + 24 * 4)


def test_the_digest_tells_contents_apart(tmp_path: Path):
    def digest(tensors: dict[str, torch.Tensor], **fields: Any) -> str:
        return load(write(tmp_path, tensors, **fields)).digest

    first = digest(pair())
    assert first == digest(pair()) == digest(pair(), peft_version="0.1", lora_dropout=0.5)
    others = [
        digest(pair(), lora_alpha=9), digest({name: tensor * 2 for name, tensor in pair().items()}),
        digest({name: tensor.half() for name, tensor in pair().items()}),
        digest({name.replace("q_proj", "v_proj"): tensor[:8] for name, tensor in pair().items()}),
    ]
    assert len({first, *others}) == 5


def test_tensors_and_config_without_files():
    source = AdapterSource("a", tensors=pack_tensors(pair()), config=json.dumps(CONFIG))
    assert read_adapter(source, SITES, max_rank=8).rank == 4
    with pytest.raises(RequestError, match="give path, or tensors and config"):
        read_adapter(AdapterSource("a", tensors=b"x"), SITES, max_rank=8)
    with pytest.raises(AdapterError, match="no safetensors file"):
        read_adapter(AdapterSource("a", tensors=b"x" * 40, config="{}"), SITES, max_rank=8)


WRONG_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "LOHA"}, "peft_type.*LOHA"), ({"r": 0}, "r must be"), ({"r": 10**9}, "r must be"),
    ({"r": True}, "r must be"), ({"r": "4"}, "r must be"), ({"lora_alpha": "x"}, "lora_alpha"),
    ({"lora_alpha": float("nan")}, "lora_alpha"), ({"lora_alpha": 1e300}, "lora_alpha"),
    ({"target_modules": 3}, "target_modules"), ({"target_modules": ["q_proj", 3]}, "target_modules"),
    ({"target_modules": ["k_proj"]}, "target_modules.*leaves out.*q_proj"),
    ({"target_modules": r"(q_proj"}, "target_modules.*not closed"), ({"target_modules": "*"}, "nothing to repeat"),
    ({"target_modules": r"(?<=x)q"}, "target_modules.*not supported"),
    ({"target_modules": r"(q)\1"}, "target_modules.*not supported"),
    ({"exclude_modules": ["q_proj"]}, "exclude_modules.*leaves out"),
    ({"layers_to_transform": [1]}, "layers_to_transform.*leaves out"),
    ({"layers_to_transform": ["0"]}, "layers_to_transform must be"),
    ({"rank_pattern": {"q_proj": 8}}, "rank_pattern.*says rank 8"), ({"rank_pattern": {"q_proj": -1}}, "rank_pattern"),
    ({"rank_pattern": ["q_proj"]}, "rank_pattern must be"), ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern"),
    ({"modules_to_save": ["q_proj"]}, "modules_to_save.*leaves out"), ({"r": 5}, "r of .* says rank 5"),
    ({"bias": "some"}, "bias must be"), ({"use_dora": True}, "use_dora.*lora_magnitude_vector"),
    ({"use_dora": "yes"}, "use_dora must be"), ({"use_rslora": 1}, "use_rslora must be"),
    ({"trainable_token_indices": [3]}, "trainable_token_indices.*no rows"),
    ({"trainable_token_indices": [3, 3]}, "trainable_token_indices must be"),
    ({"trainable_token_indices": [-3]}, "trainable_token_indices must be"),
    ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"), ({"use_qalora": True}, "use_qalora"),
    ({"layer_replication": [[0, 1]]}, "layer_replication"), ({"lora_bias": True}, "lora_bias"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"), ({"init_lora_weights": "loftq"}, "loftq"),
    ({"kasa_config": {"x": 1}}, "kasa_config"), ({"velora_config": {"x": 1}}, "velora_config"),
    ({"use_bdlora": {"x": 1}}, "use_bdlora"), ({"arrow_config": {"x": 1}}, "arrow_config"),
    ({"megatron_config": {"x": 1}}, "megatron_config"), ({"monteclora_config": {"x": 1}}, "monteclora_config"),
    ({"brand_new_field": 1}, "brand_new_field"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG_FIELDS, ids=[str(fields)[:40] for fields, _ in WRONG_FIELDS])
def test_a_wrong_field_is_named(tmp_path: Path, fields: dict[str, Any], message: str):
    with pytest.raises(RequestError, match=message) as caught:
        load(write(tmp_path, pair(), **fields))
    assert "adapter 'a'" in str(caught.value)


@pytest.mark.parametrize("fields", [
    {"brand_new_field": None}, {"alora_invocation_tokens": None}, {"eva_config": {"rho": 2}}, {"loftq_config": {}},
    {"init_lora_weights": "gaussian"}, {"use_qalora": False, "qalora_group_size": 16}, {"layer_replication": None},
    {"target_modules": ["q_proj", "no_such_module"]}, {"modules_to_save": ["classifier", "score"]},
], ids=str)
def test_a_field_without_effect_is_no_error(tmp_path: Path, fields: dict[str, Any]):
    assert load(write(tmp_path, pair(), **fields)).rank == 4


def test_modules_that_match_nothing_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Those that are there are not."""
    load(write(tmp_path, pair(), target_modules=["q_proj", "v_proj", "no_such_module", "nor_this"]))
    (told,) = caplog.messages
    assert "no_such_module" in told and "nor_this" in told and "q_proj" not in told


NAN = torch.ones(4, 16)
NAN[1, 2] = float("nan")
V = Q.replace("q_proj", "v_proj")
WRONG_TENSORS: list[tuple[dict[str, torch.Tensor | None], dict[str, Any], str]] = [
    ({f"{Q}.lora_A.weight": NAN}, {}, "not finite, in a of layers.0.attention.qkv q"),
    ({f"{Q}.lora_B.weight": torch.full((24, 4), float("inf"))}, {}, "not finite, in b"),
    ({f"{Q}.lora_A.weight": torch.ones(4, 17)}, {}, r"shape \[4, 17\], the model needs \[4, 16\]"),
    ({f"{Q}.lora_B.weight": torch.ones(4, 24)}, {}, r"needs \[24, 4\]"),
    ({f"{Q}.lora_A.weight": torch.ones(4, 16, 1)}, {}, "shape"),
    ({f"{Q}.lora_A.weight": torch.ones(())}, {}, "shape"),
    ({f"{Q}.lora_A.weight": torch.ones(4, 16, dtype=torch.int32)}, {}, "int32"),
    ({f"{Q}.lora_A.weight": torch.ones(4, 16).to(torch.float8_e4m3fn)}, {}, "float8"),
    ({f"{Q}.lora_B.weight": None}, {}, "needs lora_A and B"),
    ({f"{Q}.lora_embedding_A": torch.ones(4, 16)}, {}, "needs lora_A and B"),
    ({f"{Q}.lora_magnitude_vector": torch.ones(24)}, {}, "use_dora.*false"),
    ({f"{Q}.lora_A.default.weight": torch.ones(4, 16)}, {}, "twice"),
    ({"something.else": torch.ones(1)}, {}, "not of LoRA: something.else"),
    ({"weight": torch.ones(1)}, {}, "not of LoRA"),
    ({f"{Q.replace('.0.', '.9.')}.lora_A.weight": torch.ones(4, 16)}, {}, "take no adapters.*layers.9"),
    ({"base_model.model.model.norm.weight": torch.ones(16)}, {"modules_to_save": ["norm"]}, "take no adapters.*norm"),
    ({f"{V}.weight": torch.ones(8, 16)}, {}, "modules_to_save.*v_proj"),
    ({f"{V}.bias": torch.ones(8)}, {}, "bias of adapter_config.json is none"),
    ({f"{Q}.base_layer.weight": torch.ones(24, 16)}, {}, "weight of the base model"),
    ({"base_model.model.lm_head.weight": torch.ones(40, 16)}, {"modules_to_save": ["lm_head"]}, "was resized"),
    (
        {"base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": torch.ones(1, 16)},
        {"trainable_token_indices": [32]}, "token 32, the model's vocabulary has 32"
    ),
    (
        {"base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": torch.ones(2, 16)},
        {"trainable_token_indices": [3]}, r"needs \[1, 16\]"
    ),
    (
        {"base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": torch.ones(1, 16)}, {},
        "trainable_token_indices of adapter_config.json does not name"
    ),
    ({f"{Q}.token_adapter.trainable_tokens_delta": torch.ones(1, 16)}, {}, "no rows of tokens"),
]


@pytest.mark.parametrize(("changed", "fields", "message"), WRONG_TENSORS, ids=[m[:30] for *_, m in WRONG_TENSORS])
def test_a_wrong_tensor_is_named(
    tmp_path: Path, changed: dict[str, torch.Tensor | None], fields: dict[str, Any], message: str
):
    tensors = {name: tensor for name, tensor in {**pair(), **changed}.items() if tensor is not None}
    with pytest.raises(RequestError, match=message):
        load(write(tmp_path, tensors, **fields))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_only_numbers_that_are_finite(tmp_path: Path, dtype: torch.dtype):
    """The largest of both signs are, whatever else is there."""
    limits = torch.finfo(torch.float32 if dtype == torch.float64 else dtype)
    edges = torch.tensor([limits.min, limits.max, limits.tiny, -0.0], dtype=dtype)
    good = torch.ones(4, 16, dtype=dtype)
    good[1, :4] = edges
    load(write(tmp_path, pair(**{f"{Q}.lora_A.weight": good})))
    for value in ("inf", "-inf", "nan", "-nan"):
        bad = good.clone()
        bad[3, 15] = torch.tensor(float(value.lstrip("-")), dtype=dtype) * (-1 if value[0] == "-" else 1)
        with pytest.raises(AdapterError, match="not finite, in a of"):
            load(write(tmp_path, pair(**{f"{Q}.lora_A.weight": bad})))


def test_a_rank_beyond_the_limit_names_the_flag(tmp_path: Path):
    with pytest.raises(RequestError, match="start with --max-lora-rank 4"):
        load(write(tmp_path, pair()), max_rank=3)


def test_an_adapter_that_changes_nothing_is_refused(tmp_path: Path):
    with pytest.raises(RequestError, match="changes no module"):
        load(write(tmp_path, {}))


def test_files_that_are_not_there(tmp_path: Path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(AdapterError, match=r"no adapter|no adapter_model"):
            load(path)
    (tmp_path / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(AdapterError, match=r"pickle.*safe_serialization"):
        load(tmp_path)
    write(tmp_path, pair())
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(AdapterError, match=r"cannot read.*adapter_config"):
        load(tmp_path)


@pytest.mark.parametrize("text", [
    "", "[]", "{", '{"r": 4, "r": 4}', "[" * 100_000, '{"r": 1' + "0" * 5000 + "}", "\0", '"x"', "{}" + " " * (1 << 20),
], ids=lambda text: text[:12])
def test_a_config_that_is_no_object(tmp_path: Path, text: str):
    write(tmp_path, pair())
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(RequestError, match="adapter_config"):
        load(tmp_path)


@pytest.mark.parametrize("data", [
    b"", b"\0" * 8, struct.pack("<Q", 1 << 40) + b"{}", struct.pack("<Q", 2) + b"{}" + b"x" * 9,
    struct.pack("<Q", 64 << 20) + b" " * (65 << 20), struct.pack("<Q", 4) + b"null",
], ids=["empty", "no header", "endless header", "bytes left over", "huge header", "null"])
def test_a_file_that_is_no_safetensors(tmp_path: Path, data: bytes):
    write(tmp_path, pair())
    (tmp_path / "adapter_model.safetensors").write_bytes(data)
    with pytest.raises(RequestError):
        load(tmp_path)


def test_a_truncated_file(tmp_path: Path):
    write(tmp_path, pair())
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(AdapterError, match="truncated"):
        load(tmp_path)


def test_every_prefix_of_a_file_is_an_error(tmp_path: Path):
    write(tmp_path, pair())
    file = tmp_path / "adapter_model.safetensors"
    whole = file.read_bytes()
    for size in range(0, len(whole), 7):
        file.write_bytes(whole[:size])
        with pytest.raises(HeadraceError):
            load(tmp_path)


@pytest.mark.parametrize("pattern", [
    r"(.*)*x", r"(a|a)*b", r"((((.*)*)*)*)*", r"(.+)+$", r".*.*.*.*.*.*.*.*.*.*x", r"(a?){900}b", "a?" * 400 + "b",
    "(" * 2000 + ")" * 2000, "x" * 5000, r"(model|layers|\.|[a-z0-9_])+!",
], ids=lambda pattern: pattern[:16])
def test_a_slow_pattern_takes_no_time(tmp_path: Path, pattern: str):
    name = f"base_model.model.{'a' * 60}"
    began = time.perf_counter()
    for fields in ({"target_modules": pattern}, {"alpha_pattern": {pattern: 1}}, {"modules_to_save": [pattern]}):
        with pytest.raises(RequestError):
            load(write(tmp_path, {**pair(), f"{name}.lora_A.weight": torch.ones(4, 16)}, **fields))
    assert time.perf_counter() - began < 5


def test_unsupported_kinds_are_told_from_wrong_ones(tmp_path: Path):
    with pytest.raises(UnsupportedFeature):
        load(write(tmp_path, pair(), peft_type="VERA"))
    with pytest.raises(RequestError) as caught:
        load(write(tmp_path, pair(), r=0))
    assert not isinstance(caught.value, UnsupportedFeature) and caught.value.param == "lora_path"


def test_a_file_that_gets_shorter_while_it_is_read(tmp_path: Path):
    """As a trainer's that writes it anew; through a mapping the process would end by a signal."""
    file = write(tmp_path, pair()) / "adapter_model.safetensors"
    with closing(AdapterTensors.open(file)) as tensors:
        tensors.place(f"{Q}.lora_A.weight", (4, 16))
        file.write_bytes(file.read_bytes()[:-1])
        tensors.place(f"{Q}.lora_B.weight", (24, 4))
        with pytest.raises(AdapterError, match="shorter while"):
            tensors.fill()


@pytest.mark.parametrize("is_packed", [False, True])
def test_tensors_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_packed: bool):
    """Some in one piece, some in several, with others of the file between; of several dtypes and without numbers."""
    monkeypatch.setattr(contents_module, "PIECE_BYTES", 64)
    memory = AdapterMemory(piece_bytes=256)
    generator = torch.Generator().manual_seed(1)
    shapes = [(3,), (5, 7), (0, 4), (1,), (2, 2), (90,), (3, 3), (1, 1), (200,)]
    dtypes = [torch.bfloat16, torch.float32, torch.float16, torch.float64]
    stored = {
        f"t{i}": torch.randn(shape, generator=generator).to(dtypes[i % len(dtypes)]) for i, shape in enumerate(shapes)
    }
    data, file = pack_tensors(stored), tmp_path / "file"
    file.write_bytes(data)
    with closing(
        AdapterTensors.unpack(data, "x", memory) if is_packed else AdapterTensors.open(file, memory)
    ) as tensors:
        names = [name for name in reversed(stored) if name != "t4"]
        found = {name: tensors.place(name, tuple(stored[name].shape)) for name in names}
        tensors.fill()
    for name, tensor in found.items():
        wanted = stored[name].float() if stored[name].dtype == torch.float64 else stored[name]
        assert tensor.dtype == wanted.dtype and torch.equal(tensor, wanted)


def test_pieces_change_no_digest_and_hide_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Numbers are scanned over the ends of tensors, each of which is named."""
    good, bad = torch.ones(24, 4, dtype=torch.bfloat16), torch.ones(24, 4, dtype=torch.bfloat16)
    bad[23, 3] = float("inf")
    tensors = pair(**{f"{Q}.lora_B.weight": good})
    packed = AdapterSource("a", tensors=pack_tensors(tensors), config=json.dumps(CONFIG))
    assert load(write(tmp_path, tensors)).digest == read_adapter(packed, SITES, max_rank=8).digest
    reordered = load(write(tmp_path, dict(reversed(tensors.items()))))
    assert reordered.digest == read_adapter(packed, SITES, max_rank=8).digest
    monkeypatch.setattr(contents_module, "PIECE_BYTES", 32)
    with pytest.raises(AdapterError, match="not finite, in b of"):
        load(write(tmp_path, pair(**{f"{Q}.lora_B.weight": bad})))


@pytest.mark.parametrize("num_threads", [1, 3])
def test_what_is_examined_when_it_is_read_is_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_threads: int
):
    """Content and bound are those of the parts' tensors, examined by one thread in one piece; and as kept in memory of
    several pieces, with gaps between tensors, of which some are not of whole numbers of 64 bytes."""
    generator = torch.Generator().manual_seed(2)
    tensors = {
        f"{Q}.lora_A.weight": torch.randn(3, 16, generator=generator),
        f"{Q}.lora_B.weight": torch.randn(24, 3, generator=generator).half(),
        f"{Q.replace('q_proj', 'v_proj')}.lora_A.weight": torch.randn(3, 16, generator=generator).double(),
        f"{Q.replace('q_proj', 'v_proj')}.lora_B.weight": torch.randn(8, 3, generator=generator),
    }
    tensors[f"{Q}.lora_B.weight"][7, 1] = -50.0
    folder = write(tmp_path, tensors, r=3, target_modules=["q_proj", "v_proj"])
    with monkeypatch.context() as changed:
        changed.setattr(contents_module, "PIECE_BYTES", 40)
        changed.setattr(torch, "get_num_threads", lambda: num_threads)
        source, memory = AdapterSource("a", path=str(folder)), AdapterMemory(piece_bytes=256)
        weights = read_adapter(source, SITES, max_rank=8, memory=memory)
        assert [part.bound for part in weights.parts] == [50.0, 50.0]
        assert check_parts([dataclasses.replace(part, bound=0.0) for part in weights.parts]) == weights.digest
    whole = load(folder)
    assert whole.digest != weights.digest, "large tensors are hashed in pieces"
    for part, other in zip(weights.parts, whole.parts, strict=True):
        assert torch.equal(part.a, other.a) and torch.equal(part.b, other.b) and part.b.dtype == other.b.dtype
        assert part.bound == other.bound


def test_a_piece_that_takes_longer_keeps_its_place(monkeypatch: pytest.MonkeyPatch):
    """The digest of a tensor must not depend on which thread read which part of it."""
    monkeypatch.setattr(contents_module, "PIECE_BYTES", 40)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    tensor = torch.arange(40, dtype=torch.float32)
    stored = Stored(tensor.data_ptr(), view_bytes(tensor.data_ptr(), tensor.nbytes).data, tensor.dtype)
    third_is_read = threading.Event()

    def read(piece: Piece) -> None:
        ((_, part),) = piece
        if part.at == 40:
            assert third_is_read.wait(60)
        elif part.at == 80:
            third_is_read.set()

    contents = Contents()
    examine([stored], contents, read)
    wanted = [hashlib.sha256(tensor[i : i + 10].numpy().tobytes()).digest() for i in range(0, 40, 10)]
    assert contents.digests == {(tensor.data_ptr(), tensor.nbytes): wanted} and contents.bound == 39.0


def test_one_module_by_two_names(tmp_path: Path):
    """The second would take the place of the first."""
    other = {name.replace("model.model.layers", "model.layers"): tensor for name, tensor in pair().items()}
    with pytest.raises(AdapterError, match="twice, by different names"):
        load(write(tmp_path, {**pair(), **other}))
