"""GGUF adapters, written as llama.cpp's converter does, against the PEFT adapter that they were made from."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import peft_rig as rig
import pytest
import torch
import transformers

from headrace.base.errors import HeadraceError, WeightError
from headrace.layers.lora.contract import AdapterSites, AdapterWeights
from headrace.models.adapters.gguf import GgufForm
from headrace.models.catalog import find_family
from headrace.models.weights.gguf_file import read_gguf_header
from headrace.models.weights.gguf_naming import NamedTensor
from headrace.models.weights.gguf_tensors import read_copies

PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permute(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """What the converter does to the rows of q and k: from halves to pairs."""
    return rows.reshape(num_heads, 2, len(rows) // num_heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def gguf_name(name: str) -> str:
    plain = {"model.embed_tokens": "token_embd", "lm_head": "output"}.get(name)
    _, _, layer, *rest = [*name.split("."), "", ""]
    return plain or f"blk.{layer}.{PARTS['.'.join(rest).strip('.')]}"


def convert(
    weights: AdapterWeights, sites: AdapterSites, path: Path, *, alpha: float, arch: str, **options: Any
) -> None:
    """Write the adapter as a GGUF file. ``heads``: of q and k, to permute."""
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_string("general.type", options.get("kind", "adapter"))
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    by_place = {(site.module, site.part): name for name, site in sites.sites.items()}
    heads = options.get("heads", {})
    for part in weights.parts:
        name = gguf_name(by_place[part.module, part.part])
        a, b = part.a, part.b
        if part.part in heads:
            b = permute(b, heads[part.part])
        if name == "token_embd":
            a = a.T
        for ending, tensor in (("lora_a", a), ("lora_b", b)):
            data = np.ascontiguousarray(tensor.numpy())
            writer.add_tensor(f"{name}.weight.{ending}", data)
    for name, array in options.get("extra", {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_a_converted_adapter_is_that_of_peft(tmp_path: Path, arch: str):
    pytest.importorskip("peft")
    kind = transformers.LlamaConfig if arch == "llama" else transformers.Qwen2Config
    model = rig.make_model(kind(**rig.LLAMA))
    rig.adapt(model, tmp_path, target_modules=["q_proj", "k_proj", "o_proj", "up_proj", "lm_head", "embed_tokens"])
    sites = rig.find_sites(model, rig.names_of(model))
    wanted = rig.read(tmp_path, sites)
    heads = {"q": 4, "k": 2} if arch == "llama" else {}
    convert(wanted, sites, tmp_path / "a.gguf", alpha=6, arch=arch, heads=heads)
    family = find_family(type(model).__name__)
    form = GgufForm(family.gguf_architectures, family.gguf_naming, 8)
    found = rig.read(tmp_path / "a.gguf", sites, gguf=form)
    assert found.rank == wanted.rank and found.modules == wanted.modules
    assert found.digest == wanted.digest


FORM = GgufForm(("llama",), find_family("LlamaForCausalLM").gguf_naming, 8)


@pytest.fixture
def small(tmp_path: Path) -> tuple[AdapterWeights, AdapterSites]:
    pytest.importorskip("peft")
    model = rig.make_model(transformers.LlamaConfig(**{**rig.LLAMA, "num_hidden_layers": 1}))
    rig.adapt(model, tmp_path / "peft", target_modules=["o_proj"])
    sites = rig.find_sites(model, rig.names_of(model))
    return rig.read(tmp_path / "peft", sites), sites


ONES = np.ones((4, 32), np.float32)


@pytest.mark.parametrize(("options", "message"), [
    ({"arch": "gemma3"}, "is for 'gemma3'"), ({"kind": "model"}, "general.type is 'model'"),
    ({"extra": {"blk.0.attn_q.weight": ONES}}, "not of LoRA, such as blk.0.attn_q.weight"),
    ({"extra": {"blk.0.attn_q.weight.lora_a": ONES}}, "not the other, of blk.0.attn_q.weight"),
    ({"extra": {"blk.7.attn_q.weight.lora_a": ONES, "blk.7.attn_q.weight.lora_b": ONES}}, "take no adapters.*blk.7"),
    ({"extra": {"blk.0.attn_q.weight.lora_a": ONES, "blk.0.attn_q.weight.lora_b": ONES}}, "the model needs"),
    ({"alpha": float("nan")}, "adapter.lora.alpha must be"),
], ids=["architecture", "kind", "no lora", "half", "layer", "shape", "alpha"])
def test_a_wrong_file_is_refused(
    tmp_path: Path, small: tuple[AdapterWeights, AdapterSites], options: dict[str, Any], message: str
):
    weights, sites = small
    convert(weights, sites, tmp_path / "a.gguf", **{"alpha": 6, "arch": "llama", **options})
    with pytest.raises(HeadraceError, match=message):
        rig.read(tmp_path / "a.gguf", sites, gguf=FORM)


def test_a_family_without_gguf(tmp_path: Path, small: tuple[AdapterWeights, AdapterSites]):
    weights, sites = small
    convert(weights, sites, tmp_path / "a.gguf", alpha=6, arch="llama")
    with pytest.raises(HeadraceError, match="give a folder of PEFT"):
        rig.read(tmp_path / "a.gguf", sites)
    whole = (tmp_path / "a.gguf").read_bytes()
    for size in range(0, len(whole), 97):
        (tmp_path / "b.gguf").write_bytes(whole[:size])
        with pytest.raises(HeadraceError):
            rig.read(tmp_path / "b.gguf", sites, gguf=FORM)


def test_no_file_is_mapped(
    tmp_path: Path, small: tuple[AdapterWeights, AdapterSites], monkeypatch: pytest.MonkeyPatch
):
    """A mapped file that gets shorter, as one that is written anew, ends the process by a signal."""
    weights, sites = small
    convert(weights, sites, tmp_path / "a.gguf", alpha=6, arch="llama")

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("mapped")

    monkeypatch.setattr(mmap, "mmap", refuse)
    assert rig.read(tmp_path / "a.gguf", sites, gguf=FORM).digest == weights.digest


def test_a_file_that_gets_shorter_while_it_is_read(tmp_path: Path, small: tuple[AdapterWeights, AdapterSites]):
    weights, sites = small
    convert(weights, sites, tmp_path / "a.gguf", alpha=6, arch="llama")
    tensor = read_gguf_header(tmp_path / "a.gguf", most_bytes=2**20).tensors[0]
    copies = read_copies([NamedTensor("a", tensor), NamedTensor("b", tensor)], tensor.path, dtype=torch.float32)
    assert next(copies)[1].isfinite().all()
    tensor.path.write_bytes(b"")
    with pytest.raises(WeightError, match="shorter while"):
        next(copies)
