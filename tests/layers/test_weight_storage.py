"""How layers keep weights: without loss in any form, smaller when wanted, tied ones once, blocks as they come, never
twice."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from headrace.base.config import EngineConfig, engine_config
from headrace.base.errors import ConfigError
from headrace.execution.loading import LoadedModel, load_model
from headrace.kernels import native
from headrace.kernels.operation import KernelQuery
from headrace.kernels.packed_linear import WEIGHT_FORMS
from headrace.kernels.packed_linear.blocks import WeightBlocks
from headrace.kernels.packed_linear.choice import FormChoice
from headrace.kernels.packed_linear.forms import PanelWeight, keep_in_panels
from headrace.kernels.packed_linear.layout import Format
from headrace.layers.build import Build
from headrace.layers.linear import Linear
from headrace.layers.loading import fill_targets, find_targets
from headrace.layers.moe.checkpoint import unstack_experts
from headrace.layers.moe.stored import StoredExperts
from headrace.layers.moe.weights import ExpertWeights
from headrace.layers.quantization import SchemeQuery, chain_schemes
from headrace.layers.quantization.blocks import BlockTensor
from headrace.layers.quantization.integer import W8A8, Int4, Int8
from headrace.layers.quantization.storage import (
    count_bytes,
    count_elements,
    find_storable,
    find_stored,
    store_fastest,
)
from headrace.layers.spec import MlpSpec
from headrace.layers.vocabulary import Embedding, Head

CPU = torch.device("cpu")
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 160, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "bfloat16", "eos_token_id": 2,
}


@pytest.fixture(scope="module", autouse=True)
def _native_library():
    if native.build().status != "ready":
        pytest.skip("no native library")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def load(folder: Path, **options: object) -> LoadedModel:
    config: EngineConfig = engine_config(model=str(folder), load_format="dummy", skip_tokenizer=True, **options)
    return load_model(config, CPU, lambda stage, share: None)


class Toy(torch.nn.Module):
    """A tied vocabulary and one stacked product."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        build = Build(device=CPU, dtype=dtype)
        self.embedding = Embedding(build, 160, 64)
        self.head = Head(build, 160, 64, weight=self.embedding.weight)
        self.linear = Linear(build, 64, {"a": 64, "b": 32}, bias=True)
        self.router = Linear(build, 64, 70, is_storable=False)
        draw = torch.Generator().manual_seed(3)
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=draw) * 0.1)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embedding(ids)
        return self.linear(x), self.head(x)


def run(model: Toy) -> list[torch.Tensor]:
    return [out.float() for out in model(torch.tensor([5, 159, 0, 5]))]


@pytest.mark.parametrize("form", WEIGHT_FORMS.names())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_form_multiplies_as_the_plain_weight_and_gives_it_back(form: str, dtype: torch.dtype):
    if form == "onednn" and dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN packs bfloat16 from AVX-512 on")
    toy = Toy(dtype)
    expected, plain = run(toy), {name: p.clone() for name, p in toy.named_parameters()}
    for weight in find_storable(toy):
        query = KernelQuery("cpu", "float32", shape={"has_rows": int(weight.has_rows)})
        weight.store(
            WEIGHT_FORMS.load(
                form if WEIGHT_FORMS.reason_against(form, query) is None else "panels"
            )(weight.weight.data)
        )
    assert {name for name, _ in toy.named_parameters()} == {"linear.bias", "router.weight", "router.bias"} & set(plain)
    for out, wanted in zip(run(toy), expected, strict=True):
        assert torch.allclose(out, wanted, atol=1e-4 if dtype == torch.float32 else 3e-2)
    assert toy.head.stored is toy.embedding.stored
    for name in ("embedding", "linear"):
        assert torch.equal(getattr(toy, name).stored.unpack(dtype), plain[f"{name}.weight"]), name


def test_float32_that_bfloat16_holds_takes_half_the_memory():
    toy = Toy()
    toy.linear.weight.data.copy_(toy.linear.weight.bfloat16())
    assert keep_in_panels(toy.linear.weight).matrix.format is Format.BFLOAT16
    assert keep_in_panels(toy.embedding.weight).matrix.format is Format.FLOAT32


def test_tied_weights_are_stored_once_and_counted_once():
    toy = Toy()
    elements, num_bytes = count_elements(toy), count_bytes(toy)
    store_fastest(toy)
    assert toy.head.stored is toy.embedding.stored is not None and len(find_stored(toy)) == 2
    assert toy.router.stored is None
    assert count_elements(toy) == elements and count_bytes(toy) <= num_bytes


@pytest.mark.parametrize(("scheme", "group"), [(Int8, 32), (Int4, 32), (W8A8, 0)])
def test_quantised_layers_match_a_fake_quant_oracle(scheme: type, group: int):
    toy, x = Toy(), torch.randn(7, 64)
    plain = toy.linear.weight.clone()
    scheme(SchemeQuery(wanted="int8")).finish(toy)
    dense = toy.linear.stored.unpack(torch.float32)
    step = plain.abs().amax(1, keepdim=True) / 127
    if scheme is Int4:
        spread = plain.unflatten(1, (2, 32)).amax(2) - plain.unflatten(1, (2, 32)).amin(2)
        step = spread.repeat_interleave(32, 1) / 15
    assert ((dense - plain).abs() <= 1.6 * step).all()
    groups = x.double().unflatten(1, (-1, group or 64))
    steps = groups.abs().amax(2, keepdim=True) / 127
    expected = F.linear(((groups / steps).round() * steps).flatten(1), dense.double(), toy.linear.bias.double())
    assert torch.allclose(toy.linear(x).double(), expected, atol=2e-3)
    assert toy.embedding.stored.matrix.format is Format.INT8_GROUP, "vocabularies keep 8 bits"


@pytest.mark.parametrize(("name", "most"), [("int8", 0.36), ("int4", 0.29), ("w8a8", 0.35)])
def test_a_quantised_model_is_that_small_and_close(folder: Path, name: str, most: float):
    # beside weights alone in 8 and 4 bits ``auto`` computes in float32, norms included
    dtype = "auto" if name == "w8a8" else "float32"
    plain, small = load(folder, quantization="none", dtype=dtype), load(folder, quantization=name)
    assert small.num_parameters == plain.num_parameters
    assert small.num_bytes < most * 4 * plain.num_parameters
    assert sum(p.nbytes for p in small.model.parameters()) == sum(
        p.nbytes for n, p in plain.model.named_parameters() if "norm" in n
    )
    for mine, theirs in zip(small.model.layers, plain.model.layers, strict=True):
        x = torch.randn(9, 64)
        error = (mine.mlp(x) - theirs.mlp(x)).norm() / theirs.mlp(x).norm()
        assert error < (0.2 if name == "int4" else 0.03)


@pytest.mark.parametrize(("options", "said"), [
    ({"quantization": "int3"}, "must be one of"), ({"quantization": "int8", "dtype": "float16"}, "--dtype auto"),
])
def test_what_cannot_be_quantised_says_what_to_do(folder: Path, options: dict, said: str):
    with pytest.raises(ConfigError, match=said) as caught:
        load(folder, **options)
    assert caught.value.param == "quantization"


def test_on_a_gpu_it_is_refused():
    with pytest.raises(ConfigError, match="--device cpu"):
        chain_schemes(SchemeQuery("cuda", "bfloat16", wanted="int4"))


def test_without_a_library_rounded_values_stay_plain(monkeypatch: pytest.MonkeyPatch):
    toy, other = Toy(), Toy()
    Int8(SchemeQuery()).finish(other)
    monkeypatch.setattr(native, "build", lambda **_: native.state().__class__("unavailable"))
    Int8(SchemeQuery()).finish(toy)
    assert toy.linear.stored is None
    assert torch.equal(toy.linear.weight, other.linear.stored.unpack(torch.float32))


def make_blocks(weight: torch.Tensor) -> BlockTensor:
    """A weight as Q8_0."""
    groups = weight.unflatten(1, (-1, 32))
    scales = (groups.abs().amax(2, keepdim=True) / 127).half()
    codes = (groups / scales.float()).round().to(torch.int8)
    raw = torch.cat((scales.view(torch.uint8).view(*scales.shape[:2], 2), codes.view(torch.uint8)), dim=2).flatten(1)
    return BlockTensor(WeightBlocks("Q8_0", raw), torch.float32, lambda: (codes * scales.float()).flatten(1))


NAMES = {"words": "embedding", "first": "linear#a", "second": "linear#b", "router": "router"}


def fill(toy: Toy, *, as_blocks: set[str]) -> dict[str, torch.Tensor]:
    """Fill a toy; returns what it was given, as plain numbers."""
    targets, given, plain = find_targets(toy, NAMES), {}, {}
    for name, target in targets.items():
        blocks = make_blocks(torch.randn(target.shape)) if target.dim() == 2 else None
        plain[name] = torch.randn(target.shape) if blocks is None else blocks.make_plain()
        given[name] = blocks if name in as_blocks else plain[name]
    fill_targets(targets, given.items())
    return plain


def test_blocks_are_kept_where_a_whole_weight_comes_so():
    toy = Toy()
    plain = fill(toy, as_blocks={"words.weight", "first.weight", "second.weight", "router.weight"})
    assert isinstance(toy.linear.stored, PanelWeight) and toy.linear.stored.matrix.format is Format.INT8_GROUP
    assert torch.equal(
        toy.linear.stored.unpack(torch.float32), torch.cat((plain["first.weight"], plain["second.weight"]))
    )
    assert (
        torch.equal(toy.embedding(torch.tensor([7])), plain["words.weight"][7:8])
        and toy.head.stored is toy.embedding.stored
    )
    assert torch.equal(toy.router.weight, plain["router.weight"])


def test_a_plain_part_makes_the_others_plain():
    toy = Toy()
    plain = fill(toy, as_blocks={"second.weight"})
    assert toy.linear.stored is None and toy.embedding.stored is None
    assert torch.equal(toy.linear.weight, torch.cat((plain["first.weight"], plain["second.weight"])))


def make_experts(expert_width: int) -> ExpertWeights:
    """Matrices of three, read by experts that take them stored."""
    build, spec = Build(CPU, torch.float32), MlpSpec(expert_width)
    weights = ExpertWeights(3, spec, 64, build)
    StoredExperts(weights, spec, build)
    return weights


@pytest.mark.parametrize("plain_part", [None, "up"])
def test_blocks_of_stacked_experts(plain_part: str | None):
    """Kept where all come so; else every one is plain, and the file's tensor is expanded once."""
    model = torch.nn.Module()
    model.experts = make_experts(24)
    expanded, whole = [], {}

    def stack(name: str, rows: int, width: int) -> torch.Tensor:
        flat = make_blocks(torch.randn(3 * rows, width))
        whole[name] = flat.make_plain().unflatten(0, (3, rows))
        if name == plain_part:
            return whole[name]
        return BlockTensor(flat.blocks, torch.float32, lambda: (expanded.append(name), whole[name])[1], num_stacked=3)
    tensors = [
        (f"mlp.experts.{name}_proj.weight", stack(name, *shape)) for name,
        shape in {"gate": (24, 64), "up": (24, 64), "down": (64, 32)}.items()
    ]
    model.experts.down = make_experts(32).down
    names = {
        f"mlp.experts.{{x}}.{theirs}_proj": f"experts.{ours}" for theirs,
        ours in {"gate": "gate_up#{x}/gate", "up": "gate_up#{x}/up", "down": "down#{x}/down"}.items()
    }
    fill_targets(find_targets(model, names), unstack_experts(tensors, "gate_first", 0))
    gate_up, down = model.experts.gate_up, model.experts.down
    assert down.stored.matrix.format is Format.INT8_GROUP
    assert torch.equal(down.stored.unpack(torch.float32), whole["down"].flatten(0, 1))
    expected = torch.cat((whole["gate"], whole["up"]), dim=1)
    if plain_part:
        assert gate_up.stored is None and torch.equal(gate_up.weight, expected) and expanded == ["gate"]
    else:
        assert torch.equal(gate_up.stored.unpack(torch.float32), expected.flatten(0, 1)) and not expanded


def test_a_choice_is_measured_once_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    query, path = (
        KernelQuery("cpu", "float32", shape={"in_features": 64, "out_features": 96, "has_rows": 0}),
        tmp_path / "deep" / "forms.json"
    )
    first = FormChoice(path)
    name = first.choose(query)
    first.save()
    monkeypatch.setattr("headrace.kernels.packed_linear.choice.measure", lambda *_: pytest.fail("measured again"))
    assert FormChoice(path).choose(query) == name
    late = FormChoice(tmp_path / "none.json", budget_s=-1.0)
    assert late.choose(query) == WEIGHT_FORMS.names()[0]
    path.write_text("{broken")
    monkeypatch.setattr(
        "headrace.kernels.packed_linear.choice.measure", lambda names, _: {n: float(n != "turned") for n in names}
    )
    assert FormChoice(path).choose(query) == "turned"


def test_weights_are_stored_when_the_library_has_been_compiled(monkeypatch: pytest.MonkeyPatch):
    toy, compiled = Toy(), threading.Event()
    expected = run(toy)
    monkeypatch.setattr(native, "state", lambda: native.NATIVE.state.__class__("compiling"))
    monkeypatch.setattr(native, "build", lambda: compiled.wait(200))
    store_fastest(toy)
    assert toy.linear.stored is None
    (thread,) = [t for t in threading.enumerate() if t.name == "weight-storing"]
    compiled.set()
    while thread.is_alive():  # products run meanwhile
        for out, wanted in zip(run(toy), expected, strict=True):
            assert torch.allclose(out, wanted, atol=1e-4)
    assert toy.linear.stored is not None and toy.embedding.stored is toy.head.stored


def test_what_has_no_layout_stays_plain_and_that_is_said(caplog: pytest.LogCaptureFixture):
    toy = Toy()
    toy.unknown = torch.nn.Parameter(torch.zeros(8, 64, 64), requires_grad=False)
    with caplog.at_level(logging.WARNING):
        Int8(SchemeQuery()).finish(toy)
    assert toy.linear.stored is not None and "stay plain" in caplog.text
