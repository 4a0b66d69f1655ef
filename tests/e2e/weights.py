"""Tiny checkpoints with weights of their own, so that two devices can serve the same model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def write_checkpoint(folder: Path, config: dict[str, Any], seed: int = 0) -> None:
    """Draw float32 weights by transformers' own model of the config and save them with it. Norms are not all the
    same."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    tensors = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    for vector in (tensor for tensor in tensors.values() if tensor.dim() == 1):
        vector += 0.2 * torch.randn_like(vector)
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
