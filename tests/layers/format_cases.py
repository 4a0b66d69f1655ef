"""The quantised checkpoints that are tested: writers, their configurations, and whole models of random weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from layers import format_writers as writers
from layers.format_writers import Written
from safetensors.torch import load_file, save_file

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
MXFP4 = ct(
    "mxfp4-pack-quantized", {**FP4, "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}, is_packed=True
)


def torchao(kind: str, **data: Any) -> dict[str, Any]:
    stated = {"default": {"_type": kind, "_version": 2, "_data": data}}
    return {"quant_method": "torchao", "quant_type": stated}


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
    "ct-mxfp4": MXFP4,
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
    "nf4-in-bfloat16": Case(writers.nf4_in_bfloat16, {**BNB, "bnb_4bit_quant_storage": "bfloat16"}),
    "auto-round-fp8": Case(
        writers.fp8_block, {"quant_method": "auto-round", "packing_format": "auto_round:fp8", "data_type": "fp"}
    ),
    "auto-round-mxfp4": Case(
        MXFP4.write, {
            "quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", "data_type": "mx_fp",
            "bits": 4, "extra_config": {".*mlp\\.gate.*": {"bits": 16, "data_type": "float"}}
        }, is_packed=True
    ),
    "modelopt-mxfp4": Case(
        lambda weight: writers.rename_part(MXFP4.write(weight), "weight_packed", "weight"),
        {"quant_method": "modelopt", "quant_algo": "mxfp4"}, is_packed=True
    ),
    "mlx": Case(writers.mlx, {"quant_method": "mlx", "bits": 4, "group_size": 32}, is_packed=True),
    "mlx-3-bits": Case(
        lambda weight: writers.mlx(weight, 3, 64), {"quant_method": "mlx", "bits": 3, "group_size": 64}, is_packed=True
    ),
    "metal": Case(
        lambda weight: writers.mlx(weight, 8, biases="qbiases"), {"quant_method": "metal", "bits": 8, "group_size": 32},
        is_packed=True
    ),
    **{
        f"mlx-{mode}": Case(
            partial(writers.mlx_floats, mode=mode), {"quant_method": "mlx", "mode": mode, "group_size": group},
            is_packed=mode == "mxfp4"
        ) for mode, group in (("mxfp4", 32), ("mxfp8", 32), ("nvfp4", 16))
    },
    "torchao-fp8": Case(writers.torchao_float, torchao("Float8WeightOnlyConfig")),
    "torchao-int8": Case(writers.torchao_int8, torchao("Int8WeightOnlyConfig"), is_packed=True),
    "torchao-int8-inputs": Case(
        writers.torchao_int8, torchao("Int8DynamicActivationInt8WeightConfig"), is_packed=True
    ),
    "torchao-intx": Case(
        lambda weight: writers.torchao_integers(weight, 4, 32),
        torchao("IntxWeightOnlyConfig", intx_packing_format={"_type": "X", "_data": "UNPACKED_TO_INT8"}), is_packed=True
    ),
    "torchao-int4": Case(writers.torchao_int4, torchao("Int4WeightOnlyConfig"), is_packed=True, tolerance=2e-6),
    "hqq": Case(writers.hqq, {"quant_method": "hqq"}, is_packed=True),
    "hqq-3-bits": Case(lambda weight: writers.hqq(weight, 3, as_float=True), {"quant_method": "hqq"}, is_packed=True),
    "hqq-outputs": Case(lambda weight: writers.hqq(weight, 2, axis=0), {"quant_method": "hqq"}),
    "quanto-int8": Case(writers.quanto, {"quant_method": "quanto", "m": {"weights": "qint8"}}, is_packed=True),
    "quanto-fp8": Case(lambda weight: writers.quanto(weight, is_float=True), {"quant_method": "quanto"}),
    "bnb-int8": Case(writers.bnb_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}, is_packed=True),
}


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values * torch.linspace(0.3, 2, shape[-1])  # groups and blocks differ


def name_tensors(module: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{module}.{name}": tensor for name, tensor in tensors.items()}


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
