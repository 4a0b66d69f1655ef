"""Checkpoint tensors into parameters: stacked parts, tied heads, types, and errors that name the tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from headrace.base.errors import WeightError
from headrace.layers.build import Build
from headrace.layers.decoder.decoder import Decoder
from headrace.layers.loading import find_targets
from headrace.layers.moe.checkpoint import unstack_experts
from headrace.models.catalog import find_family
from headrace.models.llama.family import FAMILY as LLAMA

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
}


def build(dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
    return LLAMA.build_model(LLAMA.read_config({**CONFIG, **options}), Build(torch.device("cpu"), dtype))


def checkpoint(model: Decoder) -> dict[str, torch.Tensor]:
    return {name: torch.randn(target.shape) for name, target in find_targets(model, model.names.modules).items()}


def test_parts_land_in_their_rows():
    model = build(attention_bias=True)
    tensors = checkpoint(model)
    model.load_weights(reversed(tensors.items()))
    for layer in range(2):
        attention, mlp = model.layers[layer].attention, model.layers[layer].mlp
        at = f"model.layers.{layer}."
        for kind in ("weight", "bias"):
            stacked = torch.cat([tensors[f"{at}self_attn.{part}_proj.{kind}"] for part in "qkv"])
            assert torch.equal(getattr(attention.qkv, kind), stacked)
        assert torch.equal(
            mlp.gate_up.weight, torch.cat([tensors[f"{at}mlp.{part}_proj.weight"] for part in ("gate", "up")])
        )
    assert torch.equal(model.head.weight, tensors["lm_head.weight"])


def test_types_are_converted():
    model = build(torch.bfloat16)
    tensors = checkpoint(model)
    model.load_weights(tensors.items())
    assert model.norm.weight.dtype == torch.bfloat16
    assert torch.equal(model.norm.weight, tensors["model.norm.weight"].bfloat16())


def test_tied_head_shares_storage_and_may_be_in_the_file():
    model = build(tie_word_embeddings=True)
    tensors = checkpoint(build())
    left_over = {  # of old files, and of writers of GPTQ
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
        "model.layers.0.self_attn.q_proj.bias": torch.zeros(16),
    }
    model.load_weights([*tensors.items(), *left_over.items()])
    assert model.head.weight.data_ptr() == model.embedding.weight.data_ptr()
    assert torch.equal(model.head.weight, tensors["model.embed_tokens.weight"])
    del tensors["lm_head.weight"]
    build(tie_word_embeddings=True).load_weights(tensors.items())


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"),
            r"missing \(1\): model.layers.1.self_attn.k_proj.weight"
        ),
        (
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(1)}),
            r"not expected \(1\): model.layers.2.mlp.up_proj.weight"
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(16)}),
            r"not expected \(1\): model.layers.0.self_attn.q_proj.bias"
        ),
        (
            lambda t: t.update({"lm_head.weight": torch.ones(30, 16)}),
            r"wrong shape \(1\): lm_head.weight is \[30, 16\], not \[31, 16\]"
        ),
    ],
)
def test_faults_are_named(fault: Any, message: str):
    model = build()
    tensors = checkpoint(model)
    fault(tensors)
    with pytest.raises(WeightError, match=message):
        model.load_weights(tensors.items())


def test_a_tensor_given_twice_and_many_missing():
    model = build()
    pairs = [("model.norm.weight", torch.ones(16))] * 2
    with pytest.raises(WeightError, match=r"given twice \(1\): model.norm.weight") as caught:
        model.load_weights(pairs)
    assert "missing (20): " in str(caught.value) and "and 14 more" in str(caught.value)


MOE_CONFIG = {
    **CONFIG, "num_local_experts": 3, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "head_dim": 8
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.uint16, torch.bool, torch.complex64])
def test_floats_declared_as_something_else_are_refused(dtype: torch.dtype):
    model = build()
    tensors = checkpoint(model)
    tensors["model.norm.weight"] = torch.ones(16).to(dtype)
    with pytest.raises(WeightError, match=rf"stored as no floats \(1\): model.norm.weight is {str(dtype)[6:]}"):
        model.load_weights(tensors.items())


def test_weights_that_are_all_zero_are_told_and_a_file_of_zeros_is_refused(caplog: pytest.LogCaptureFixture):
    model = build(attention_bias=True)
    tensors = checkpoint(model)
    for name in tensors:
        if name.endswith("bias"):  # many checkpoints have such
            tensors[name].zero_()
    tensors["model.embed_tokens.weight"][0] = 0  # padding
    model.load_weights(tensors.items())
    assert not caplog.records
    tensors["model.layers.1.mlp.down_proj.weight"].zero_()
    tensors["lm_head.weight"] = torch.zeros(31, 16)
    model.load_weights(tensors.items())
    assert "may be damaged: tensors all zero (2): lm_head.weight, model.layers.1.mlp.down_proj.weight;" in caplog.text
    with pytest.raises(WeightError, match=r"no weights: tensors all zero \(21\): .* and 15 more"):
        model.load_weights((name, torch.zeros_like(tensor)) for name, tensor in tensors.items())


def build_moe(architecture: str) -> Any:
    family = find_family(architecture)
    return family.build_model(
        family.read_config({**MOE_CONFIG, "architectures": [architecture]}), Build(torch.device("cpu"), torch.float32)
    )


def moe_checkpoint(model: Any) -> dict[str, torch.Tensor]:
    """A tensor per expert and matrix."""
    return {name: torch.randn(target.shape) for name, target in find_targets(model, model.names.modules).items()}


def stack(tensors: dict[str, torch.Tensor], prefix: str, matrix: str, kind: str = "weight") -> torch.Tensor:
    return torch.stack([tensors.pop(f"{prefix}.experts.{x}.{matrix}_proj.{kind}") for x in range(3)])


def fuse_gate_first(tensors: dict[str, torch.Tensor], prefix: str) -> None:
    gate, up = (stack(tensors, prefix, matrix) for matrix in ("gate", "up"))
    tensors[f"{prefix}.experts.gate_up_proj"] = torch.cat((gate, up), dim=1)
    tensors[f"{prefix}.experts.down_proj"] = stack(tensors, prefix, "down")


def keep_matrices_apart(tensors: dict[str, torch.Tensor], prefix: str) -> None:
    for matrix in ("gate", "up", "down"):
        tensors[f"{prefix}.experts.{matrix}_proj.weight"] = stack(tensors, prefix, matrix)


def use_first_names(tensors: dict[str, torch.Tensor], prefix: str) -> None:
    words = {".mlp.": ".block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for name in [name for name in tensors if name.startswith(prefix)]:
        tensor, renamed = tensors.pop(name), name
        for ours, theirs in words.items():
            renamed = renamed.replace(ours, theirs)
        tensors[renamed] = tensor


def leave_alone(tensors: dict[str, torch.Tensor], prefix: str) -> None:
    assert f"{prefix}.experts.2.down_proj.weight" in tensors


@pytest.mark.parametrize("layout", [leave_alone, fuse_gate_first, keep_matrices_apart, use_first_names])
@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Qwen3MoeForCausalLM"])
def test_experts_in_every_layout(architecture: str, layout: Any):
    if layout is use_first_names and architecture != "MixtralForCausalLM":
        pytest.skip("Mixtral's own")
    model = build_moe(architecture)
    tensors = moe_checkpoint(model)
    expected = {
        f"layers.{i}.mlp.experts.{ours}.weight": torch.stack(
            [
                torch.cat([tensors[f"model.layers.{i}.mlp.experts.{x}.{matrix}_proj.weight"] for matrix in matrices])
                for x in range(3)
            ]
        )
        for i in range(2) for ours, matrices in {"gate_up": ("gate", "up"), "down": ("down",)}.items()
    }
    router = tensors["model.layers.1.mlp.gate.weight"]
    for i in range(2):
        layout(tensors, f"model.layers.{i}.mlp")
    model.load_weights(reversed(tensors.items()))
    parameters = dict(model.named_parameters())
    for name, tensor in expected.items():
        assert torch.equal(parameters[name], tensor), name
    assert torch.equal(model.layers[1].mlp.router.logits.weight, router)


def test_a_missing_expert_is_named():
    model = build_moe("MixtralForCausalLM")
    tensors = moe_checkpoint(model)
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    with pytest.raises(WeightError, match=r"missing \(1\): model.layers.1.mlp.experts.2.up_proj.weight"):
        model.load_weights(tensors.items())


@pytest.mark.parametrize("keeps_blocks", [False, True])
@pytest.mark.parametrize("scales_first", [False, True])
def test_experts_in_mxfp4(scales_first: bool, keeps_blocks: bool):
    """Blocks and scales in either order become what transformers makes of them, or stay what they are; other layers may
    be plain."""
    config = {
        **MOE_CONFIG, "hidden_size": 64, "intermediate_size": 32, "head_dim": 16, "architectures": ["GptOssForCausalLM"]
    }
    family = find_family("GptOssForCausalLM")
    model = family.build_model(
        family.read_config(config), Build(torch.device("cpu"), torch.float32, keeps_blocks=keeps_blocks)
    )
    oracle = transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**{k: v for k, v in config.items() if k != "architectures"})
    )
    tensors = {name: torch.randn(t.shape) for name, t in oracle.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    expected = {}
    for matrix, (outputs, blocks) in {"gate_up_proj": (64, 2), "down_proj": (64, 1)}.items():
        name = f"model.layers.1.mlp.experts.{matrix}"
        packed = torch.randint(0, 256, (3, outputs, blocks, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 130, (3, outputs, blocks), dtype=torch.uint8, generator=generator)
        expected[matrix] = convert_moe_packed_tensors(packed, scales).float()
        del tensors[name]
        pair = {f"{name}_blocks": packed, f"{name}_scales": scales}
        tensors |= dict(reversed(pair.items())) if scales_first else pair
    model.load_weights(tensors.items())
    experts = model.layers[1].mlp.experts
    assert (experts.gate_up.stored is not None) == (experts.down.stored is not None) == keeps_blocks
    gate_up, down = (
        matrix.unpack(torch.float32) if keeps_blocks else matrix.weight for matrix in (experts.gate_up, experts.down)
    )
    assert torch.equal(gate_up[:, :32], expected["gate_up_proj"].transpose(1, 2)[:, 0::2])
    assert torch.equal(gate_up[:, 32:], expected["gate_up_proj"].transpose(1, 2)[:, 1::2])
    assert torch.equal(down, expected["down_proj"].transpose(1, 2))
    assert torch.equal(
        model.layers[0].mlp.experts.down.weight, tensors["model.layers.0.mlp.experts.down_proj"].transpose(1, 2)
    )
    name = "model.layers.1.mlp.experts.down_proj"
    for kind, change, said in (
        ("scales", lambda t: t[:-1], r"has \[3, 64, 1, 16\] uint8 and \[2, 64, 1\] uint8"),
        ("scales", lambda t: torch.full_like(t, 255), "some scales are infinite or not a number"),
        ("blocks", lambda t: t.flatten(), "is stored as MXFP4, which has bytes"),
    ):
        damaged = {**tensors, f"{name}_{kind}": change(tensors[f"{name}_{kind}"])}
        with pytest.raises(WeightError, match=rf"{name}.*{said}"):
            dict(unstack_experts(damaged.items(), "alternating", 64, keeps_blocks=keeps_blocks))
    with pytest.raises(WeightError, match=r"is no stack of experts' matrices: \[3, 7, 5\]"):
        dict(unstack_experts([("m.experts.gate_up_proj", torch.ones(3, 7, 5))], "alternating", 64))
    if keeps_blocks:
        return
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    with pytest.raises(WeightError, match=r"not expected \(1\): model.layers.1.mlp.experts.down_proj_blocks"):
        model.load_weights(tensors.items())
