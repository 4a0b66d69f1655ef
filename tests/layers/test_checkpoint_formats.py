"""Quantised checkpoints as independent writers store them: read to the numbers that they stand for, whole and in a
rank's part, kept packed where a layer can, and refused by name where they are not read."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from layers import format_writers as writers
from layers.format_cases import (
    CASES,
    FLOAT,
    LLAMA,
    QWEN_MOE,
    TOKEN,
    Case,
    ct,
    draw,
    make_checkpoint,
    name_tensors,
    torchao,
)
from safetensors.torch import save_file
from torch import nn

from headrace.base.config import engine_config
from headrace.base.errors import ConfigError, WeightError
from headrace.execution.loading import LoadedModel, load_model
from headrace.kernels import native
from headrace.kernels.coded_linear.codes import Code, CodedMatrix, stack_matrices, unpack_bits
from headrace.kernels.coded_linear.quantise import quantise_float, quantise_integer
from headrace.layers.build import Build
from headrace.layers.moe.checkpoint import unstack_experts
from headrace.layers.quantization import SchemeQuery, chain_schemes, names_form
from headrace.layers.quantization.blocks import CodedTensor
from headrace.layers.quantization.coded import find_form
from headrace.layers.quantization.storage import StorableLayer, find_stored
from headrace.models.catalog import find_family
from headrace.parallel.cut import Cut
from headrace.parallel.share import Share

CPU = torch.device("cpu")
SHAPES = ((40, 64), (136, 192), (264, 320))
"""Outputs and inputs: multiples of what every writer packs, and of no block or panel."""


def query(case: Case, **own: Any) -> SchemeQuery:
    return SchemeQuery(stored=case.config["quant_method"], config=case.config, **own)


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


@pytest.mark.parametrize("name", sorted(set(CASES) - {"hqq-outputs"}))  # which is always dequantised
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
        CodedMatrix(Code.NF4, codes, scales, 32), CodedMatrix(Code.INT, codes[:, :16], scales, 16),
        CodedMatrix(Code.INT, codes, scales, 32, group_ids=torch.zeros(32).long()),
    ):
        assert stack_matrices([one, other]) is None
    signed = CodedMatrix(Code.INT, torch.full((2, 32), -3, dtype=torch.int8), torch.full((2, 1), 2.0), 32)
    expected = torch.cat([torch.full((4, 32), 10.0), torch.full((2, 32), -6.0)])
    for value, zero, bits in ((200, 190, 8), (13, 3, 4)):
        unsigned = CodedMatrix(Code.INT, codes + value, scales, 32, torch.full((4, 1), zero), bits=bits)
        both = stack_matrices([unsigned, signed])
        assert both is not None and torch.equal(both.dequantise(torch.float32), expected)


@pytest.mark.parametrize("bits", range(1, 9))
def test_streams_of_bits(bits: int):
    codes = torch.randint(0, 1 << bits, (3, 41), generator=torch.Generator().manual_seed(bits))
    words = torch.tensor([writers.pack_stream(row, bits) for row in codes.tolist()], dtype=torch.int32)
    assert torch.equal(unpack_bits(words, bits, 41).long(), codes)


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
    # kernels of experts take inputs in their order alone
    each = 2 if name == "gptq-order" and config is QWEN_MOE else 4
    assert len(packed) == (each * len(kept.model.layers) if case.is_packed else 0)
    for weight, values in weights_of(kept.model).items():
        assert_near(values, expected[weight].double(), max(case.tolerance, 2e-3 if case.is_packed else 1e-6))


@pytest.mark.parametrize(("wanted", "stored", "is_own"), [
    ("gptq", "gptq", True), ("gptq", "gptq_v2", True), ("auto-round", "intel/auto-round", True),
    ("scaled_fp8", "fbgemm_fp8", True), ("fp8", "fp8", True), ("fp8", "mxfp4", False), ("fp8", "fbgemm_fp8", False),
    ("gptq", "awq", False), ("gptq", "", False),
])
def test_names_of_a_checkpoints_own_form(wanted: str, stored: str, is_own: bool):
    assert names_form(wanted, stored) is is_own


def test_naming_the_own_form_changes_nothing(tmp_path: Path):
    if native.build().status != "ready":
        pytest.skip("no native kernels")
    make_checkpoint(tmp_path / "m", LLAMA, CASES["gptq"])
    sizes = [
        [stored.num_bytes for stored in find_stored(load(tmp_path / "m", **own).model)]
        for own in ({}, {"quantization": "gptq"})
    ]
    assert sizes[0] == sizes[1]


def test_a_layer_may_have_other_bits_or_none(tmp_path: Path):
    """GPTQ's ``dynamic``: the shapes of the tensors tell, but not how large groups are of which the last is smaller."""
    dynamic = {"+:e": {"group_size": 128}, "-:d": {}}
    case = Case(writers.gptq, {**CASES["gptq"].config, "dynamic": dynamic})
    tensors, expected = {}, {}
    for module, own in {
        "a": {}, "b": {"bits": 8}, "c": {"bits": 3, "group": 64}, "e": {"group": 128, "with_ids": False}
    }.items():
        written, expected[module] = writers.gptq(draw(64, 192), **own)
        tensors |= name_tensors(module, written)
    tensors["d.weight"] = expected["d"] = draw(8, 8)
    found = read(case, tensors)
    for module, weight in expected.items():
        assert_near(found[f"{module}.weight"], weight.double())


PART = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96,
    "image_size": 12, "patch_size": 4, "max_position_embeddings": 32
}


@pytest.mark.parametrize(("architecture", "stated"), [
    ("BertModel", PART), ("CLIPModel", {"text_config": PART, "vision_config": PART, "projection_dim": 32}),
])
def test_encoders_take_quantised_weights(architecture: str, stated: dict[str, Any]):
    case, family = CASES["gptq"], find_family(architecture)
    kind = getattr(transformers, architecture)
    config = {**kind.config_class(**stated).to_dict(), "architectures": [architecture]}
    stored, meant = {}, {}
    for name, tensor in kind(kind.config_class(**stated)).state_dict().items():
        module, _, last = name.rpartition(".")
        if tensor.dim() == 2 and last == "weight" and "embed" not in name:
            written, meant[name] = case.write(draw(*tensor.shape))
            stored |= name_tensors(module, written)
        else:
            stored[name] = meant[name] = tensor
    found = []
    for schemes, tensors in ((chain_schemes(query(case)), stored), (chain_schemes(SchemeQuery()), meant)):
        model = family.build_model(family.read_config(config), Build(CPU, torch.float32, schemes=schemes))
        model.load_weights(tensors.items())
        found.append(dict(model.named_parameters()))
    for name, weight in found[1].items():
        assert torch.equal(found[0][name], weight)


def test_groups_of_compressed_tensors_have_formats_of_their_own():
    """By name, by pattern, by class, in this order."""
    fp8, int4 = CASES["ct-float-channel"], CASES["ct-int4-group"]
    groups = {
        "by_class": fp8.config["config_groups"]["group_0"],
        "by_pattern": {**int4.config["config_groups"]["group_0"], "targets": [r"re:.*mlp\.(up|down)$"]},
        "by_name": {**fp8.config["config_groups"]["group_0"], "targets": ["l.0.mlp.down"]},
        "of_embeddings": {**CASES["ct-int8-weights"].config["config_groups"]["group_0"], "targets": ["Embedding"]},
    }
    case = Case(fp8.write, {**fp8.config, "format": "mixed-precision", "config_groups": groups})
    tensors, expected = {}, {}
    for module, own in {
        "l.0.attn.q": fp8, "l.0.mlp.up": int4, "l.0.mlp.down": fp8, "l.1.mlp.down": int4,
        "embed_tokens": CASES["ct-int8-weights"],
    }.items():
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
    ({"quant_method": "gptq", "pack_dtype": "int16"}, "pack_dtype 'int16'.*known are int32"),
    (
        {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", "data_type": "mx_fp", "bits": 6},
        "data_type mx_fp of 6 bits.*mx_fp of 4 bits, mx_fp of 8"
    ),
    ({"quant_method": "auto-round", "packing_format": "auto_round:x"}, "packing_format 'auto_round:x'.*llm_compressor"),
    ({"quant_method": "mlx", "group_size": 32, "m.0": {"mode": "int"}}, "MLX.*mode 'int' with group_size 64"),
    (torchao("NVFP4InferenceConfig"), "torchao.*NVFP4InferenceConfig is not read.*Int8WeightOnlyConfig"),
    (
        torchao("Int4WeightOnlyConfig", int4_packing_format={"_data": "TILE_PACKED_TO_4D"}),
        "Int4WeightOnlyConfig in the packing TILE_PACKED_TO_4D"
    ),
    ({"quant_method": "quanto", "m.0": {"weights": "qint4"}}, "quanto.*qint4 .m.0. are not read.*qint8"),
    ({"bits": 4, "group_size": 128}, "has no quant_method.*known are .*awq, bitsandbytes"),
    ({"quant_method": "modelopt", "quantization": "FP8"}, "config .modelopt. holds a value .* no attribute 'get'"),
    (
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["re:("], "weights": {}}}},
        "config .compressed-tensors. holds a value .* unterminated subpattern"
    ),
    ({"quant_method": "aqlm"}, "quant_method is 'aqlm'.*known are .*awq, bitsandbytes, compressed-tensors"),
])
def test_what_is_not_read_is_named(config: dict[str, Any], said: str):
    if config.get("quant_method") == "compressed-tensors" and "config_groups" not in config:
        config = {**config, "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4}}}}
    with pytest.raises(ConfigError, match=said) as caught:
        chain_schemes(SchemeQuery(stored=config.get("quant_method", ""), config=config))
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


@pytest.mark.parametrize("name", ["nf4", "bnb-int8"])
@pytest.mark.parametrize("is_backwards", [False, True])
def test_bitsandbytes_need_not_state_its_bits(name: str, is_backwards: bool):
    """Tensors say them, in whichever order they come."""
    tensors, expected = CASES[name].write(draw(40, 64))
    given = list(name_tensors("m.0", tensors).items())
    case = replace(CASES[name], config={"quant_method": "bitsandbytes"})
    found = dict(chain_schemes(query(case)).read(reversed(given) if is_backwards else given))
    assert_near(found["m.0.weight"], expected)


def test_bitsandbytes_states_that_maxima_are_quantised():
    case = replace(CASES["nf4-nested"], config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    with pytest.raises(WeightError, match=r"m\.0: .*bnb_4bit_use_double_quant"):
        read(case, name_tensors("m.0", case.write(draw(40, 64))[0]))


@pytest.mark.parametrize("name", ["fp8-static", "ct-float-tensor"])
def test_other_floats_of_8_bits_are_named(name: str):
    tensors, _ = CASES[name].write(draw(40, 64))
    tensors["weight"] = tensors["weight"].to(torch.float8_e5m2)
    with pytest.raises(WeightError, match=r"m\.q is stored as .* of type e5m2, which is not read; known is e4m3"):
        read(CASES[name], name_tensors("m.q", tensors))


@pytest.mark.parametrize(("name", "broken", "said"), [
    ("gptq", {"scales": torch.ones(3, 41)}, r"m.0.* 41"), ("gptq-order", {"g_idx": torch.full((64,), 9)}, "g_idx"),
    ("awq", {"qweight": torch.zeros(64, 4, dtype=torch.int32)}, "gemm packing"),
    ("fp8-block", {"weight_scale_inv": torch.ones(2, 3)}, "needs one scale, 40 or"),
    ("ct-int4-group", {"weight_scale": torch.ones(40, 3)}, "needs scales"),
    ("modelopt-nvfp4", {"weight_scale": torch.ones(40, 3)}, "m.0"),
    ("nf4", {"weight.quant_state.bitsandbytes__nf4": torch.zeros(3, dtype=torch.uint8)}, "quant_state"),
    ("gptq", {"scales": torch.ones(40)}, "shapes of GPTQ: .*scales .40"),
    ("gptq", {"qweight": torch.zeros(8, 40, dtype=torch.int64)}, "words of codes are torch.int64"),
    ("ct-int4-group", {"weight_shape": torch.tensor(40)}, "shapes of pack-quantized"),
    ("ct-int4-group", {"weight_packed": torch.zeros(40, 9, dtype=torch.int32)}, "64 codes of 4 bits do not take 9"),
    ("fp8-static", {"weight": torch.zeros(0, 64).to(torch.float8_e4m3fn)}, "there are no values: .0, 64"),
    ("fp8-block", {"weight_scale_inv": torch.tensor([[float("nan")]])}, "m.0, stored as FP8: some scales are infinite"),
    ("hqq-outputs", {"scale": torch.full((1, 80), float("inf"))}, "stored as HQQ: some numbers are infinite or not"),
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


CT_ORDER = Case(
    lambda weight: as_packed(*writers.gptq(weight, order=True)),
    ct("pack-quantized", {"num_bits": 4, "type": "int", "group_size": 32, "actorder": "dynamic"}).config
)


def as_packed(tensors: dict[str, torch.Tensor], expected: torch.Tensor) -> writers.Written:
    """GPTQ's tensors as those of compressed-tensors, which lie the other way round."""
    return {
        "weight_packed": tensors["qweight"].T, "weight_scale": tensors["scales"].T, "weight_g_idx": tensors["g_idx"],
        "weight_shape": torch.tensor(expected.shape)
    }, expected


@pytest.mark.parametrize(("case", "stated"), [
    (CASES["gptq-v2"], {"checkpoint_format": None, "format": "GPTQ_V2"}),
    (CASES["awq-gemv"], {"version": None, "format": "gemv"}),
    (CASES["gptq-v2"], {"quant_method": "auto-round", "backend": "auto_round:exllamav2"}),
    (CASES["gptq-v2"], {"quant_method": "auto-round", "packing_format": "auto_round"}),
    (CASES["gptq-asymmetric"], {"quant_method": "auto-round", "backend": "gptq:exllamav2"}),
    (CT_ORDER, {}), (ct("float-quantized", {**FLOAT, "strategy": "group", "group_size": 64}, TOKEN), {}),
    (CASES["ct-int8"], {"sparsity_config": {"format": None}}),
])
def test_a_form_is_stated_in_several_ways(case: Case, stated: dict[str, Any]):
    """Zero points, packing and order of inputs, which shapes do not tell."""
    written, expected = case.write(draw(40, 128))
    found = read(Case(case.write, {**case.config, **stated}), name_tensors("m", written))
    assert_near(found["m.weight"], expected)


@pytest.mark.parametrize(("name", "aside", "stated"), [
    ("gptq", "config.json", {**LLAMA, "quantization_config": {**CASES["gptq"].config, "quant_method": "GPTQ"}}),
    ("gptq", "config.json", {**LLAMA, "text_config": {"quantization_config": CASES["gptq"].config}}),
    (
        "ct-int4-group", "config.json", {**LLAMA, "quantization_config": {
            "quant_method": "compressed-tensors", "quantization_config": CASES["ct-int4-group"].config
        }}
    ),
    ("quanto-int8", "quanto_qmap.json", {"model.layers.0.mlp.down_proj": {"weights": "qint8", "activations": "none"}}),
    ("gptq", "quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False}),
    ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": 32, "version": "GEMM", "zero_point": True}),
    ("mlx", "config.json", {**LLAMA, "quantization": {"bits": 4, "group_size": 32}, "quantization_config": {"bits": 4}})
])
def test_writers_state_their_form_in_files_of_their_own(name: str, aside: str, stated: dict[str, Any], tmp_path: Path):
    meant = make_checkpoint(tmp_path / "m", LLAMA, CASES[name])
    (tmp_path / "m" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "m" / aside).write_text(json.dumps(stated))
    found = weights_of(load(tmp_path / "m", quantization="none").model)["layers.0.mlp.down.weight"]
    assert_near(found, meant["model.layers.0.mlp.down_proj.weight"].double())


def test_a_module_has_a_form_of_its_own():
    """MLX's modes by module, torchao's floats beside integers, and MLX's stacked experts."""
    for case, other in (
        (Case(writers.mlx, {**CASES["mlx"].config, "b": CASES["mlx-nvfp4"].config}), CASES["mlx-nvfp4"]),
        (Case(writers.torchao_integers, {"quant_method": "torchao", "quant_type": {
            "default": {"_type": "FqnToConfig", "_data": {"fqn_to_config": {
                "b": {"_type": "Float8WeightOnlyConfig"}, "_default": {"_type": "IntxWeightOnlyConfig"},
            }}},
        }}), CASES["torchao-fp8"]),
    ):
        (first, meant), (second, also) = case.write(draw(40, 64)), other.write(draw(40, 64, seed=1))
        found = read(case, {**name_tensors("a", first), **name_tensors("b", second)})
        assert_near(found["a.weight"], meant)
        assert_near(found["b.weight"], also)
    experts = [writers.mlx(draw(40, 64, seed=seed)) for seed in range(3)]
    stacked = {
        f"l.0.mlp.switch_mlp.up_proj.{part}": torch.stack([written[part] for written, _ in experts])
        for part in experts[0][0]
    }
    found = read(CASES["mlx"], stacked)
    for index, (_, expected) in enumerate(experts):
        assert_near(found[f"l.0.mlp.experts.{index}.up_proj.weight"], expected)


@pytest.mark.parametrize("keeps_codes", [False, True])
@pytest.mark.parametrize(("layout", "block"), [
    ("gate_first", (16, 32)), ("gate_first", None), ("transposed", (16, 32)), ("transposed", None),
    ("alternating", None)
])
def test_stacked_experts_in_fp8(layout: str, block: tuple[int, int] | None, keeps_codes: bool):
    """As transformers saves them: all experts of a layer in one tensor, with the scales of each, or one for each."""
    num_inputs, size = 64, 96
    stated = {"quant_method": "fp8", **({} if block is None else {"weight_block_size": block})}
    parts, expected = {}, {}
    for x in range(3):
        gate_up, down = draw(2 * size, num_inputs, seed=x), draw(num_inputs, size, seed=9 + x)
        if layout != "gate_first":
            gate_up, down = gate_up.T, down.T
        for name, weight in (("gate_up_proj", gate_up), ("down_proj", down)):
            written, meant = writers.fp8_block(weight, block or tuple(weight.shape))
            parts.setdefault(name, []).append(written["weight"])
            parts.setdefault(f"{name}_scale_inv", []).append(written["weight_scale_inv"])
            expected[name, x] = meant if layout == "gate_first" else meant.T
    stacks = {f"m.experts.{name}": torch.stack(own) for name, own in parts.items()}
    stacks["m.experts.down_proj_activation_scale"] = torch.ones(3)
    case = Case(writers.fp8_block, stated)
    found = dict(unstack_experts(read(case, stacks, keeps_codes=keeps_codes).items(), layout, num_inputs))
    assert len(found) == 9
    for x in range(3):
        gate_up = expected["gate_up_proj", x]
        halves = (gate_up[0::2], gate_up[1::2]) if layout == "alternating" else gate_up.split(size)
        for name, meant in zip(("gate", "up", "down"), (*halves, expected["down_proj", x]), strict=True):
            weight = found[f"m.experts.{x}.{name}_proj.weight"]
            assert isinstance(weight, CodedTensor) == (keeps_codes and layout == "gate_first")
            assert_near(weight + 0, meant)


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
    case, matrix = CASES[name], form.quantise(draw(40, 192))
    assert matrix.code is (Code.INT if case.is_packed else Code.E4M3) and matrix.group in (32, 128, 192)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": case.config}))
    if native.build().status == "ready":
        loaded = load(tmp_path, load_format="dummy")
        packed = [s for s in find_stored(loaded.model) if s.num_bytes < 2 * s.shape[0] * s.shape[1]]
        assert len(packed) == (8 if case.is_packed else 0)
    assert find_form({"quant_method": "aqlm"}) is None


@pytest.mark.parametrize("name", ["fp8-static", "modelopt-fp8", "ct-float-tensor"])
def test_scales_of_keys_and_values_are_left_out(name: str):
    """In the three places where writers put them."""
    written, expected = CASES[name].write(draw(40, 64))
    extra = {
        "l.self_attn.k_scale": torch.ones(()), "l.self_attn.attn.v_scale": torch.ones(1),
        "l.self_attn.k_proj.output_scale": torch.ones(1), "l.self_attn.k_proj.k_scale": torch.ones(1),
    }
    found = read(CASES[name], {**name_tensors("l.self_attn.k_proj", written), **extra})
    assert list(found) == ["l.self_attn.k_proj.weight"]
    assert_near(found["l.self_attn.k_proj.weight"], expected)


@pytest.mark.parametrize("scale_format", [None, "ue8m0"])
def test_blocks_that_transformers_wrote(scale_format: str | None):
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    stated = {"weight_block_size": (32, 64), "scale_fmt": scale_format}
    weight = draw(96, 192)
    written = Fp8Quantize(SimpleNamespace(quantization_config=SimpleNamespace(**stated))).convert({"m.weight": weight})
    assert written["m.weight_scale_inv"].dtype == (torch.float8_e8m0fnu if scale_format else torch.float32)
    config = {"quant_method": "fp8", **stated}
    found = read(Case(writers.fp8_block, config), written)["m.weight"]
    assert found.dtype == torch.float32 and ((found - weight).abs() <= weight.abs() / 15 + 0.01).all()
