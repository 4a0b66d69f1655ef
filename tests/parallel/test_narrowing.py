"""A rank reads and copies only its part of a checkpoint, and gets the same weights as by cutting all of it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from parallel.test_ranked_features import write_gguf
from safetensors.torch import save_file
from service import random_models

from headrace.base.config import ModelConfig
from headrace.layers.build import Build
from headrace.models import checkpoint
from headrace.models.catalog import find_family
from headrace.models.checkpoint import open_weights
from headrace.models.source import resolve_source
from headrace.models.weights.device_copy import split_bytes
from headrace.models.weights.gguf_file import read_gguf_header
from headrace.models.weights.gguf_naming import NamedTensor
from headrace.models.weights.gguf_tensors import read_tensors
from headrace.parallel.cut import Cut
from headrace.parallel.experts import ExpertRanks
from headrace.parallel.group import Group
from headrace.parallel.share import Share

CPU = torch.device("cpu")
Named = tuple[str, torch.Tensor]


class OneOf(Group):
    """A rank that has nobody to talk to."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size


def build_rank(folder: Path, rank: int, size: int, *, divides_experts: bool = False) -> Any:
    source = resolve_source(ModelConfig(model=str(folder)))
    family, group = find_family(source.architecture), OneOf(rank, size)
    experts = ExpertRanks(group) if divides_experts else ExpertRanks()
    build = Build(CPU, torch.float32, tensor=group, experts=experts)
    return family.build_model(family.read_config(source.config), build)


def load(
    folder: Path, rank: int, size: int, monkeypatch: pytest.MonkeyPatch, *, cuts_early: bool, **own: Any
) -> tuple[dict[str, torch.Tensor], int]:
    """The parameters of a rank, and how many bytes were copied to its device."""
    model, copied = build_rank(folder, rank, size, **own), []

    def copy_ahead(tensors: Iterable[Named], device: torch.device, *, threads: int) -> Iterator[Named]:
        for name, tensor in tensors:
            copied.append(tensor.nbytes)
            parts = [part.contiguous().view(-1) for part in split_bytes(tensor, 1000)]
            yield name, torch.cat(parts).view(tensor.dtype).view(tensor.shape)

    monkeypatch.setattr(checkpoint, "copy_ahead", copy_ahead)
    source = resolve_source(ModelConfig(model=str(folder)))
    narrowing = model.find_narrowing() if cuts_early else None
    with torch.no_grad():
        model.load_weights(open_weights(source, device="cuda", narrowing=narrowing))
    return dict(model.named_parameters()), sum(copied)


def compare_ways(folder: Path, monkeypatch: pytest.MonkeyPatch, size: int = 2, **own: Any) -> list[float]:
    """Load every rank both ways; returns the share of the bytes that each copied."""
    shares = []
    for rank in range(size):
        whole, all_bytes = load(folder, rank, size, monkeypatch, cuts_early=False, **own)
        part, num_bytes = load(folder, rank, size, monkeypatch, cuts_early=True, **own)
        for name, parameter in whole.items():
            assert torch.equal(part[name], parameter), name
        shares.append(num_bytes / all_bytes)
        own_bytes = sum(parameter.nbytes for parameter in part.values())
        assert num_bytes >= own_bytes * 0.26  # bfloat16 or codes become float32
    return shares


def write(folder: Path, config: dict[str, Any]) -> None:
    """transformers' weights of a configuration."""
    torch.manual_seed(0)
    own = getattr(transformers, config["architectures"][0])
    model = own(own.config_class(**{name: value for name, value in config.items() if name != "architectures"}))
    tensors = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    save_file(tensors, folder / "model.safetensors")
    stated = {**model.config.to_dict(), "architectures": config["architectures"]}
    (folder / "config.json").write_text(json.dumps(stated))


def draw(family: str) -> dict[str, Any]:
    for seed in range(10_000):
        config = random_models.draw_config(random.Random(seed))
        if config["architectures"] == [family] and config["num_attention_heads"] >= 4:
            return {
                **config, "vocab_size": 256, "intermediate_size": 256, "mlp_bias": False, "attention_bias": False,
                "pad_token_id": 0,
            }
    raise AssertionError


@pytest.mark.parametrize("family", [
    "MistralForCausalLM", "Phi3ForCausalLM", "Olmo2ForCausalLM", "GptOssForCausalLM", "MixtralForCausalLM",
    "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM",
])
def test_a_rank_copies_its_part(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path, draw(family))
    assert max(compare_ways(tmp_path, monkeypatch)) < 0.75
    if family in random_models.MIXTURES:
        assert max(compare_ways(tmp_path, monkeypatch, divides_experts=True)) < 0.75


def test_an_encoder_copies_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path, {
        "architectures": ["BertModel"], "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 64,
    })
    assert max(compare_ways(tmp_path, monkeypatch)) < 0.75


@pytest.mark.parametrize("divides_experts", [False, True])
@pytest.mark.parametrize(("inner", "share"), [(64, 0.6), (96, 0.95)])
def test_experts_in_mxfp4(
    inner: int, share: float, divides_experts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of 96 inputs two ranks have 48 each: their part ends in a block, so all blocks are read and cut later."""
    config = {
        **draw("GptOssForCausalLM"), "hidden_size": 64, "intermediate_size": inner, "num_local_experts": 4,
        "vocab_size": 64, "num_hidden_layers": 1, "layer_types": ["full_attention"], "head_dim": 32,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }
    write(tmp_path, config)
    from safetensors.torch import load_file

    tensors, generator = load_file(tmp_path / "model.safetensors"), torch.Generator().manual_seed(0)
    for matrix, (outputs, blocks) in {"gate_up_proj": (2 * inner, 2), "down_proj": (64, inner // 32)}.items():
        name = f"model.layers.0.mlp.experts.{matrix}"
        del tensors[name]
        shape = (4, outputs, blocks)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(120, 130, shape, dtype=torch.uint8, generator=generator)
    save_file(tensors, tmp_path / "model.safetensors")
    shares = compare_ways(tmp_path, monkeypatch, divides_experts=divides_experts)
    assert max(shares) < (0.6 if divides_experts else share), shares


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q4_K", "F32"])
@pytest.mark.parametrize("has_order", [False, True])
def test_parts_of_gguf_matrices(kind: str, has_order: bool, tmp_path: Path):
    """Rows, and columns that begin and end in blocks; also where a converter reordered the rows."""
    path = write_gguf(tmp_path / "model.gguf", kind, width=256, inner=512)
    stored = next(t for t in read_gguf_header(path).tensors if t.name == "blk.0.ffn_down.weight")
    order = torch.randperm(256, generator=torch.Generator().manual_seed(0)).numpy() if has_order else None
    tensor = NamedTensor("x.weight", stored, order)
    ((_, whole),) = read_tensors([tensor], dtype=None, threads=1)
    for rows, columns in (
        (Share(256, 64, 192), Share(512, 256, 512)), (Share(256, 0, 100), Share(512, 80, 300)),
        (Share.whole(256), Share(512, 16, 48)), (Share(256, 255, 256), Share.whole(512)),
    ):
        cut = Cut.of((rows, columns))
        ((_, part),) = read_tensors([tensor], dtype=None, threads=1, find_cut=lambda name, cut=cut: cut)
        assert torch.equal(part, cut.keep(whole))
    cut = Cut.of(((Share(128, 0, 64), Share(128, 64, 128)), Share(512, 0, 256)))
    ((_, part),) = read_tensors([tensor], dtype=None, threads=1, find_cut=lambda name: cut)
    assert torch.equal(part, cut.keep(whole))


@pytest.mark.parametrize("most", [7, 64, 1 << 20])
def test_bytes_of_columns_are_copied_without_those_between(most: int):
    whole = torch.arange(24 * 40, dtype=torch.int16).view(24, 40)
    layouts = {
        "rows": whole[3:9], "columns": whole[:, 8:24], "one column": whole[:, 5:6], "turned": whole.t(),
        "all": whole, "none": whole[:0], "a number": whole[1, 1], "a stack": whole.view(4, 6, 40)[:, :, :8],
    }
    for name, tensor in layouts.items():
        parts = list(split_bytes(tensor, most))
        assert all(part.numel() <= most for part in parts), name
        assert torch.equal(
            torch.cat([part.reshape(-1) for part in parts]), tensor.contiguous().view(-1).view(torch.uint8)
        ), name
        if name == "columns" and most >= 32:
            begin = whole.untyped_storage().data_ptr()
            assert all(begin <= part.data_ptr() < begin + whole.nbytes for part in parts), "no copy of it is made"


def resident_bytes(path: Path) -> int:
    """Of the mappings of a file by this process: what has been touched, and, up to 2 MiB around it, what the kernel
    mapped along."""
    text, found, total = Path("/proc/self/smaps").read_text(), False, 0
    for line in text.splitlines():
        if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
            found = line.endswith(str(path))
        elif found and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="counts pages as Linux does")
def test_a_rank_touches_only_the_pages_of_its_rows(tmp_path: Path):
    """On a CPU: embedding, head, and the first products are cut by rows, which are most of this model."""
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 16384, "hidden_size": 512, "intermediate_size": 1024,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False,
    }
    write(tmp_path, config)
    path, touched = tmp_path / "model.safetensors", []
    source = resolve_source(ModelConfig(model=str(tmp_path)))
    for rank in range(2):
        model = build_rank(tmp_path, rank, 2)

        def watch(tensors: Iterable[Named]) -> Iterator[Named]:
            yield from tensors
            touched.append(resident_bytes(path))

        with torch.no_grad():
            model.load_weights(watch(open_weights(source, narrowing=model.find_narrowing())))
    size = path.stat().st_size
    assert all(0.4 * size < count < 0.7 * size for count in touched), (touched, size)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="counts pages as Linux does")
def test_a_part_of_a_gguf_matrix_touches_only_its_rows(tmp_path: Path):
    path, kind = tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q8_0
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x", np.ones((4096, 4096 // 32 * 34), dtype=np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (stored,) = read_gguf_header(path).tensors
    for cut, least, most in ((None, 17 << 20, 18 << 20), (Cut.of((Share(4096, 2048, 2112), 4096)), 1, 5 << 20)):
        tensors = read_tensors([NamedTensor("x", stored)], dtype=None, threads=1, find_cut=lambda name, cut=cut: cut)
        next(tensors)
        assert least < resident_bytes(path) < most
        tensors.close()
