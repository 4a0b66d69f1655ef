"""Quantised checkpoints as independent writers store them: read to the numbers that they stand for, whole and in a
rank's part, kept packed where a layer can, and refused by name where they are not read."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import format_writers as writers
import pytest
import torch
from format_writers import Written
from safetensors.torch import save_file
from torch import nn

from headrace.base.config import engine_config
from headrace.base.errors import ConfigError, WeightError
from headrace.execution.loading import LoadedModel, load_model
from headrace.kernels import native
from headrace.kernels.coded_linear.codes import Code, CodedMatrix, stack_matrices, unpack_bits
from headrace.kernels.coded_linear.quantise import quantise_float, quantise_integer
from headrace.layers.quantization import SchemeQuery, chain_schemes
from headrace.layers.quantization.blocks import CodedTensor
from headrace.layers.quantization.coded import find_form
from headrace.layers.quantization.storage import StorableLayer, find_stored
from headrace.parallel.cut import Cut
from headrace.parallel.share import Share

CPU = torch.device("cpu")
TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
INT_TOKEN = {**TOKEN, "type": "int"}


@dataclass(frozen=True)
class Case:
    """A writer and the ``quantization_config`` of its files. ``is_packed``: layers on a CPU keep the codes.
    ``tolerance`` of the read weight, relative to its largest value: writers that say what they wrote in bfloat16 or
    float32 round on their side."""

    write: Callable[[torch.Tensor], Written]
    config: dict[str, Any]
    is_packed: bool = False
    tolerance: float = 1e-6


def ct(
    form: str, weights: dict[str, Any], activations: dict[str, Any] | None = None, *, is_packed: bool = False,
    stated_format: str | None = None, tolerance: float = 1e-6,
) -> Case:
    stated = {k: "torch.uint8" if k == "scale_dtype" else v for k, v in weights.items()}
    config = {
        "quant_method": "compressed-tensors", "format": stated_format or form, "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": stated, "input_activations": activations, "format": form}
        },
    }
    return Case(writers.compressed(form, weights, activations), config, is_packed, tolerance)


FLOAT, FP4, INT4 = ({"num_bits": bits, "type": kind} for bits, kind in ((8, "float"), (4, "float"), (4, "int")))
GPTQ = {
    "quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False, "checkpoint_format": "gptq"
}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
CASES = {
    "fp8-block": Case(
        writers.fp8_block, {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    ),
    "fp8-small-blocks": Case(
        lambda weight: writers.fp8_block(weight, (32, 16)), {"quant_method": "fp8", "weight_block_size": [32, 16]}
    ),
    "fp8-block-powers": Case(
        lambda weight: writers.fp8_block(weight, powers="e8m0"),
        {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    ),
    "fp8-static": Case(writers.fp8_tensor, {"quant_method": "fp8", "activation_scheme": "static"}),
    "fbgemm": Case(writers.fp8_channel, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "modelopt-fp8": Case(writers.fp8_tensor, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "modelopt-channel": Case(
        writers.fp8_channel, {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}}
    ),
    "modelopt-blocks": Case(writers.fp8_modelopt_blocks, {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}),
    "modelopt-nvfp4": Case(writers.nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "ct-float-channel": ct("float-quantized", {**FLOAT, "strategy": "channel"}, TOKEN),
    "ct-float-tensor": ct("float-quantized", {**FLOAT, "strategy": "tensor"}, TOKEN, stated_format="mixed-precision"),
    "ct-float-block": ct("float-quantized", {**FLOAT, "strategy": "block", "block_structure": [16, 32]}, TOKEN),
    "ct-int8": ct("int-quantized", {"num_bits": 8, "strategy": "channel"}, INT_TOKEN, is_packed=True),
    "ct-int8-asymmetric": ct(
        "int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}, INT_TOKEN, is_packed=True
    ),
    "ct-int4-group": ct("pack-quantized", {**INT4, "strategy": "group", "group_size": 32}, is_packed=True),
    "ct-int4-asymmetric": ct(
        "pack-quantized", {**INT4, "strategy": "group", "group_size": 64, "symmetric": False}, is_packed=True
    ),
    "ct-int3-channel": ct("pack-quantized", {"num_bits": 3, "type": "int", "strategy": "channel"}, is_packed=True),
    "ct-int8-weights": ct("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, is_packed=True),
    "ct-nvfp4": ct(
        "nvfp4-pack-quantized",
        {**FP4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": torch.float8_e4m3fn},
        tolerance=0.005
    ),
    "ct-mxfp4": ct(
        "mxfp4-pack-quantized",
        {**FP4, "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}, is_packed=True
    ),
    "ct-mxfp8": ct(
        "mxfp8-quantized", {**FLOAT, "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
    ),
    "gptq": Case(writers.gptq, GPTQ, is_packed=True),
    "gptq-asymmetric": Case(
        lambda weight: writers.gptq(weight, group=64, symmetric=False), {**GPTQ, "sym": False}, is_packed=True
    ),
    "gptq-order": Case(lambda weight: writers.gptq(weight, order=True), {**GPTQ, "desc_act": True}, is_packed=True),
    "gptq-2-bits": Case(lambda weight: writers.gptq(weight, 2), {**GPTQ, "bits": 2}, is_packed=True),
    "gptq-3-bits": Case(lambda weight: writers.gptq(weight, 3, symmetric=False), {**GPTQ, "bits": 3}, is_packed=True),
    "gptq-8-bits": Case(
        lambda weight: writers.gptq(weight, 8, -1), {**GPTQ, "bits": 8, "group_size": -1}, is_packed=True
    ),
    "gptq-v2": Case(
        lambda weight: writers.gptq(weight, v2=True, symmetric=False, with_ids=False),
        {**GPTQ, "checkpoint_format": "gptq_v2"}, is_packed=True
    ),
    "gptq-groups-of-16": Case(lambda weight: writers.gptq(weight, group=16), {**GPTQ, "group_size": 16}),
    "awq": Case(writers.awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, is_packed=True),
    "awq-gemv": Case(
        writers.awq_gemv, {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMV"}, is_packed=True
    ),
    "auto-round": Case(
        writers.gptq, {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq"},
        is_packed=True
    ),
    "auto-round-awq": Case(
        writers.awq, {"quant_method": "auto-round", "group_size": 32, "packing_format": "auto_round:auto_awq"},
        is_packed=True
    ),
    "nf4": Case(writers.nf4, BNB),
    "nf4-nested": Case(
        lambda weight: writers.nf4(weight, nested=True), {**BNB, "bnb_4bit_use_double_quant": True}
    ),
    "bnb-int8": Case(writers.bnb_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}, is_packed=True),
}
SHAPES = ((40, 64), (136, 192), (264, 320))
"""Outputs and inputs: multiples of what every writer packs, and of no block or panel."""


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values * torch.linspace(0.3, 2, shape[-1])  # groups and blocks differ


def query(case: Case, **own: Any) -> SchemeQuery:
    return SchemeQuery(stored=case.config["quant_method"], config=case.config, **own)


def name_tensors(module: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{module}.{name}": tensor for name, tensor in tensors.items()}


def read(case: Case, tensors: dict[str, torch.Tensor], **own: Any) -> dict[str, torch.Tensor]:
    """Through the chain, in random order."""
    pairs = list(tensors.items())
    random.Random(1).shuffle(pairs)
    return dict(chain_schemes(query(case, **own)).read(pairs))


def assert_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-6) -> None:
    assert found.shape == expected.shape
    assert (found.double() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_that_were_written(name: str):
    """In any order of tensors, beside plain weights and modules without any quantised tensor."""
    case = CASES[name]
    tensors, expected = {"lm_head.weight": draw(8, 16).bfloat16(), "n.weight": draw(8), "n.bias": draw(8)}, {}
    plain = dict(tensors)
    for seed, shape in enumerate(SHAPES):
        written, expected[f"m.{seed}"] = case.write(draw(*shape, seed=seed))
        tensors |= name_tensors(f"m.{seed}", written)
    found = read(case, tensors)
    assert set(found) == {*plain, *(f"{module}.weight" for module in expected)}
    for module, weight in expected.items():
        assert_near(found[f"{module}.weight"], weight, case.tolerance)
    assert all(torch.equal(found[kept], tensor) for kept, tensor in plain.items())


CUTS = (
    (slice(0, 40), slice(0, 64)), (slice(8, 24), slice(0, 64)), (slice(0, 40), slice(32, 64)),
    (slice(3, 40), slice(16, 48)), (slice(1, 2), slice(5, 37))
)


@pytest.mark.parametrize("name", CASES)
def test_parts_of_ranks_are_parts_of_the_weight(name: str):
    """Wherever a cut goes through blocks, groups or groups by input."""
    case = CASES[name]
    written, expected = case.write(draw(136, 192))
    (weight,) = read(case, name_tensors("m", written), keeps_codes=True).values()
    for rows, columns in (*CUTS, (slice(64, 136), slice(96, 192)), (slice(72, 136), slice(160, 184))):
        cut = Cut(((Share(136, rows.start, rows.stop),), (Share(192, columns.start, columns.stop),)))
        part = weight.keep(cut) if isinstance(weight, CodedTensor) else cut.keep(weight)
        assert type(part) is type(weight)
        assert_near(part + 0, expected[rows, columns], case.tolerance)


@pytest.mark.parametrize("name", CASES)
def test_parts_with_scales_of_their_own_are_stacked(name: str):
    case = CASES[name]
    parts = []
    for seed, outputs in enumerate((40, 136, 24)):
        written, expected = case.write(draw(outputs, 192, seed=seed) * (seed + 1))
        (weight,) = read(case, name_tensors("m", written), keeps_codes=True).values()
        parts.append((weight, expected))
    stacked = stack_matrices([weight.matrix for weight, _ in parts if isinstance(weight, CodedTensor)])
    assert stacked is not None
    assert_near(stacked.dequantise(torch.float32), torch.cat([expected for _, expected in parts]), case.tolerance)


def test_what_has_no_common_form_is_not_stacked():
    codes, scales = torch.zeros(4, 32, dtype=torch.uint8), torch.ones(4, 1)
    one = CodedMatrix(Code.INT, codes, scales, 32)
    for other in (
        CodedMatrix(Code.NF4, codes, scales, 32), CodedMatrix(Code.INT, codes.view(torch.int8), scales, 32),
        CodedMatrix(Code.INT, codes, scales, 32, group_ids=torch.zeros(32).long()),
    ):
        assert stack_matrices([one, other]) is None


@pytest.mark.parametrize("bits", range(1, 9))
def test_streams_of_bits(bits: int):
    codes = torch.randint(0, 1 << bits, (3, 41), generator=torch.Generator().manual_seed(bits))
    words = torch.tensor([writers.pack_stream(row, bits) for row in codes.tolist()], dtype=torch.int32)
    assert torch.equal(unpack_bits(words, bits, 41).long(), codes)


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 160, "hidden_size": 128,
    "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "torch_dtype": "float32", "eos_token_id": 2,
}
QWEN_MOE = {
    **LLAMA, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4, "head_dim": 32,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
KEPT_PLAIN = ("embed_tokens", "lm_head", "norm", "mlp.gate.")


def make_checkpoint(
    folder: Path, config: dict[str, Any], case: Case | None, *, plain: Iterable[str] = KEPT_PLAIN
) -> dict[str, torch.Tensor]:
    """Write a random model's checkpoint with matrices of the case's form, and return its plain weights."""
    import transformers

    torch.manual_seed(0)
    settings = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(settings)
    folder.mkdir()
    model.save_pretrained(folder)  # for the names that checkpoints have
    from safetensors.torch import load_file

    state = load_file(folder / "model.safetensors")
    stored, meant = {}, {}
    for name, tensor in state.items():
        module, _, kind = name.rpartition(".")
        if case is None or tensor.dim() != 2 or kind != "weight" or any(part in name for part in plain):
            stored[name] = meant[name] = tensor
            continue
        written, expected = case.write(tensor.float() * 20)
        stored |= name_tensors(module, {k: v.contiguous() for k, v in written.items()})
        meant[name] = expected.float()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    stated = {} if case is None else {"quantization_config": case.config}
    (folder / "config.json").write_text(json.dumps({**config, **stated}, default=str))
    return meant


def load(folder: Path, **options: Any) -> LoadedModel:
    config = engine_config(model=str(folder), skip_tokenizer=True, dtype="float32", **options)
    return load_model(config, CPU, lambda stage, share: None)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every weight in plain form, stored or not."""
    stored = {
        f"{name}.weight": layer.stored.unpack(torch.float32) for name, layer in model.named_modules()
        if isinstance(layer, StorableLayer) and layer.stored is not None
    }
    return {**{name: p.detach().flatten(0, max(0, p.dim() - 2)) for name, p in model.named_parameters()}, **stored}


@pytest.mark.parametrize("config", [LLAMA, QWEN_MOE], ids=["llama", "mixture"])
@pytest.mark.parametrize("name", CASES)
def test_models_are_loaded_with_these_weights(name: str, config: dict[str, Any], tmp_path: Path):
    """Layers with the stored parts of q, k and v, experts too; dequantised on request, else packed where the packed
    layout has the form, with the numbers of the file up to float16 scales."""
    case = CASES[name]
    meant = make_checkpoint(tmp_path / "coded", config, case)
    make_checkpoint(tmp_path / "plain", config, None)
    save_file(meant, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    expected = weights_of(load(tmp_path / "plain").model)
    found = weights_of(load(tmp_path / "coded", quantization="none").model)
    assert found.keys() == expected.keys()
    for weight in expected:
        assert_near(found[weight], expected[weight].double(), max(case.tolerance, 1e-6))
    if native.build().status != "ready":
        return
    kept = load(tmp_path / "coded")
    packed = [stored for stored in find_stored(kept.model) if stored.num_bytes < 2 * stored.shape[0] * stored.shape[1]]
    assert len(packed) == (4 * len(kept.model.layers) if case.is_packed else 0)
    for weight, values in weights_of(kept.model).items():
        assert_near(values, expected[weight].double(), max(case.tolerance, 2e-3 if case.is_packed else 1e-6))


def test_a_layer_may_have_other_bits_or_none(tmp_path: Path):
    """GPTQ's ``dynamic``: the shapes of the tensors tell."""
    case = CASES["gptq"]
    tensors, expected = {}, {}
    for module, own in {"a": {}, "b": {"bits": 8}, "c": {"bits": 3, "group": 64}}.items():
        written, expected[module] = writers.gptq(draw(64, 192), **own)
        tensors |= name_tensors(module, written)
    tensors["d.weight"] = expected["d"] = draw(8, 8)
    found = read(case, tensors)
    for module, weight in expected.items():
        assert_near(found[f"{module}.weight"], weight.double())


def test_groups_of_compressed_tensors_have_formats_of_their_own():
    """By name, by pattern, by class, in this order."""
    fp8, int4 = CASES["ct-float-channel"], CASES["ct-int4-group"]
    groups = {
        "by_class": fp8.config["config_groups"]["group_0"],
        "by_pattern": {**int4.config["config_groups"]["group_0"], "targets": [r"re:.*mlp\.(up|down)$"]},
        "by_name": {**fp8.config["config_groups"]["group_0"], "targets": ["l.0.mlp.down"]},
    }
    case = Case(fp8.write, {**fp8.config, "format": "mixed-precision", "config_groups": groups})
    tensors, expected = {}, {}
    for module, own in {"l.0.attn.q": fp8, "l.0.mlp.up": int4, "l.0.mlp.down": fp8, "l.1.mlp.down": int4}.items():
        written, expected[module] = own.write(draw(40, 64))
        tensors |= name_tensors(module, written)
    found = read(case, tensors)
    for module, weight in expected.items():
        assert_near(found[f"{module}.weight"], weight)


@pytest.mark.parametrize(("config", "said"), [
    ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "marlin-24.*known are float-quantized"),
    (
        {**CASES["ct-int8"].config, "sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparse weights .sparse-24-bitmask"
    ),
    ({**CASES["ct-int8"].config, "transform_config": {"config_groups": {"u": {}}}}, "transforms of activations .u."),
    ({"quant_method": "awq", "version": "gemv_fast"}, "awq.*version 'gemv_fast'.*known are gemm, gemv"),
    ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'.*gptq_v2"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "W4A8_AWQ is not read; known are FP8"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two whole numbers"),
    ({"quant_method": "aqlm"}, "quant_method is 'aqlm'.*known are .*awq, bitsandbytes, compressed-tensors"),
])
def test_what_is_not_read_is_named(config: dict[str, Any], said: str):
    if config["quant_method"] == "compressed-tensors" and "config_groups" not in config:
        config = {**config, "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4}}}}
    with pytest.raises(ConfigError, match=said) as caught:
        chain_schemes(SchemeQuery(stored=config["quant_method"], config=config))
    assert caught.value.param == "quantization_config"


@pytest.mark.parametrize(("name", "lost", "said"), [
    ("gptq", "qzeros", "m.0 is stored as GPTQ and lacks qzeros"),
    ("ct-int4-group", "weight_shape", "m.0 is stored as pack-quantized and lacks weight_shape"),
    ("fp8-block", "weight_scale_inv", "m.0 is stored as FP8 and lacks weight_scale"),
])
def test_a_weight_that_lacks_a_part_is_told(name: str, lost: str, said: str):
    written, _ = CASES[name].write(draw(40, 64))
    del written[lost]
    with pytest.raises(WeightError, match=said):
        read(CASES[name], name_tensors("m.0", written))


@pytest.mark.parametrize(("name", "broken", "said"), [
    ("gptq", {"scales": torch.ones(3, 41)}, r"m.0.* 41"), ("gptq-order", {"g_idx": torch.full((64,), 9)}, "g_idx"),
    ("awq", {"qweight": torch.zeros(64, 4, dtype=torch.int32)}, "gemm packing"),
    ("fp8-block", {"weight_scale_inv": torch.ones(2, 3)}, "needs one scale, 40 or"),
    ("ct-int4-group", {"weight_scale": torch.ones(40, 3)}, "needs scales"),
    ("modelopt-nvfp4", {"weight_scale": torch.ones(40, 3)}, "m.0"),
    ("nf4", {"weight.quant_state.bitsandbytes__nf4": torch.zeros(3, dtype=torch.uint8)}, "quant_state"),
])
def test_tables_of_a_wrong_shape_are_told(name: str, broken: dict[str, torch.Tensor], said: str):
    written, _ = CASES[name].write(draw(40, 64))
    with pytest.raises(WeightError, match=said):
        found = read(CASES[name], name_tensors("m.0", {**written, **broken}))
        assert found["m.0.weight"].shape == (40, 64)


def test_older_files_state_their_form_elsewhere(tmp_path: Path):
    """ModelOpt in hf_quant_config.json, compressed-tensors as ``compression_config``."""
    case = CASES["modelopt-fp8"]
    meant = make_checkpoint(tmp_path / "m", LLAMA, case)
    (tmp_path / "m" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "m" / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}})
    )
    found = weights_of(load(tmp_path / "m").model)["layers.0.mlp.down.weight"]
    assert_near(found, meant["model.layers.0.mlp.down_proj.weight"].double())


def test_any_checkpoint_is_rounded_to_fp8(tmp_path: Path):
    """On a CPU, where no kernel takes 8-bit floats, weights stay plain; the vocabulary is not rounded."""
    meant = make_checkpoint(tmp_path / "m", LLAMA, None)
    found = weights_of(load(tmp_path / "m", quantization="fp8").model)
    assert torch.equal(found["embedding.weight"], meant["model.embed_tokens.weight"])
    weight = meant["model.layers.1.mlp.down_proj.weight"]
    scales = weight.abs().amax(1, keepdim=True) / 448
    assert torch.equal(found["layers.1.mlp.down.weight"], (weight / scales).to(torch.float8_e4m3fn).float() * scales)


@pytest.mark.parametrize(("shape", "rows", "group"), [((40, 96), 1, 0), ((40, 96), 16, 32), ((130, 200), 128, 128)])
def test_blocks_are_rounded_to_their_largest_magnitude(shape: tuple[int, int], rows: int, group: int):
    weight = draw(*shape)
    weight[:16, :32] = 0
    _, expected = writers.fp8_block(weight + 1e-30, (rows, group or shape[1]))
    matrix = quantise_float(weight, rows, group)
    assert matrix.find_fault() is None
    assert_near(matrix.dequantise(torch.float32), expected)
    whole = quantise_integer(weight, 4, 32)
    assert (whole.dequantise(torch.float32) - weight).abs().max() <= 0.51 * whole.scales.max()


@pytest.mark.parametrize("name", ["fp8-block", "ct-float-channel", "gptq", "awq"])
def test_random_weights_have_the_form_of_the_config(name: str, tmp_path: Path):
    form = find_form(CASES[name].config)
    assert form is not None
    case, matrix = CASES[name], form(draw(40, 192))
    assert matrix.code is (Code.INT if case.is_packed else Code.E4M3) and matrix.group in (32, 128, 192)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": case.config}))
    if native.build().status == "ready":
        loaded = load(tmp_path, load_format="dummy")
        packed = [s for s in find_stored(loaded.model) if s.num_bytes < 2 * s.shape[0] * s.shape[1]]
        assert len(packed) == (8 if case.is_packed else 0)
    assert find_form({"quant_method": "aqlm"}) is None
