"""Checkpoints of a tiny decoder with weights of their own."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 199, "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "torch_dtype": "float32",
}


def write_tiny_checkpoint(folder: Path, seed: int, **changes: object) -> Path:
    """A folder with a config.json and random weights of ``seed``."""
    config = {**CONFIG, **changes}
    width, head_dim = config["hidden_size"], config["hidden_size"] // config["num_attention_heads"]
    kv_width, mlp_width = head_dim * config["num_key_value_heads"], config["intermediate_size"]
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 0.2

    tensors = {"model.embed_tokens.weight": matrix(config["vocab_size"], width), "model.norm.weight": torch.ones(width)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        tensors |= {
            f"{layer}.self_attn.{name}_proj.weight": matrix(rows, width) for name,
            rows in (("q", width), ("k", kv_width), ("v", kv_width), ("o", width))
        }
        tensors |= {f"{layer}.mlp.{name}_proj.weight": matrix(mlp_width, width) for name in ("gate", "up")}
        tensors |= {f"{layer}.mlp.down_proj.weight": matrix(width, mlp_width)}
        tensors |= {
            f"{layer}.{name}.weight": torch.ones(width) for name in ("input_layernorm", "post_attention_layernorm")
        }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
