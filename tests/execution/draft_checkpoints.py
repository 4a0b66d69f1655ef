"""Tiny targets with drafters that are right now and then: EAGLE-3 heads and prediction modules made of the target's own
weights, for a target that often repeats itself.

A module here says what follows from the target's last hidden state and the next token's embedding, nearly unchanged.
The target's embedding outweighs its layers, so that is often, but by no means always, what the target says too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB, WIDTH, LAYERS = 300, 48, 3
CONFIG = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 56, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}
EXPERTS = {
    "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
TARGETS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "DeepseekV3": {
        **EXPERTS, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
        "v_head_dim": 10, "q_lora_rank": 20,
    },
    "Glm4Moe": {**EXPERTS, "head_dim": 16, "attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 2.5},
}
EMBEDDING_SCALE = 3.5
"""Of the embedding, over that of the other weights: about every second token is then that before it."""
ROUTER_SCALE = 0.05
"""Of clear routing: scores then differ by some hundredths."""
HEAD_VOCAB = 200
LITTLE = 0.02
HEAD = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 40, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu",
}
HEAD_LAYERS = [0, 1, LAYERS]
ONE_FILE = {
    "architectures": ["LlamaForCausalLMEagle3"], **HEAD, "draft_vocab_size": HEAD_VOCAB,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, LAYERS - 1]},
}
SPECULATORS = {
    "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "draft_vocab_size": HEAD_VOCAB,
    "target_hidden_size": WIDTH, "eagle_aux_hidden_state_layer_ids": [1, 2, LAYERS], "transformer_layer_config": HEAD,
    "speculators_config": {
        "algorithm": "eagle3", "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
    },
}


def write_target(
    folder: Path, kind: str, *, has_module: bool = False, has_clear_routing: bool = False
) -> transformers.PreTrainedModel:
    """A checkpoint with a tokenizer of bytes; ``has_module``: and a prediction module in layer `LAYERS`;
    ``has_clear_routing``: which experts a layer's tokens go to does not depend on rounding, only with what weights."""
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**{**CONFIG, **TARGETS[kind]})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(EMBEDDING_SCALE)
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
        if has_clear_routing:
            clear_routing(model)
    stated = {**config.to_dict(), "architectures": [type(model).__name__], "num_nextn_predict_layers": int(has_module)}
    tensors = dict(model.state_dict())
    if has_module:
        tensors |= make_module(model)
    write(folder, stated, tensors)
    write_tokenizer(folder)
    return model


def clear_routing(model: Any) -> None:
    """Let biases choose among experts and among groups of them: any two sums of biases differ by more than scores."""
    for name, weight in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            weight.mul_(ROUTER_SCALE)
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.copy_(0.1 * 2.0 ** torch.randperm(len(bias)))


def make_module(model: Any) -> dict[str, torch.Tensor]:
    """A prediction module that adds up both of its inputs, and a layer that changes them little."""
    layer, same = type(model.model.layers[-1])(model.config, LAYERS - 1), torch.eye(WIDTH)
    torch.manual_seed(2)
    ones = torch.ones(WIDTH)
    tensors = {"enorm.weight": ones, "hnorm.weight": ones, "shared_head.norm.weight": model.model.norm.weight}
    tensors["eh_proj.weight"] = torch.cat((0.6 * same, 0.6 * same), dim=1)
    for name, tensor in layer.state_dict().items():
        is_norm = "norm" in name
        tensors[name] = torch.ones_like(tensor) if is_norm else LITTLE * torch.randn(tensor.shape)
    return {f"model.layers.{LAYERS}.{name}": tensor.detach() for name, tensor in tensors.items()}


def make_head(model: Any) -> dict[str, torch.Tensor]:
    """An EAGLE-3 head that passes on what enters the target's final norm, over two thirds of its vocabulary."""
    generator = torch.Generator().manual_seed(3)

    def little(*shape: int) -> torch.Tensor:
        return LITTLE * torch.randn(*shape, generator=generator)

    dim, inner = WIDTH // HEAD["num_attention_heads"], HEAD["intermediate_size"]
    rows = {"q": WIDTH, "k": 2 * dim, "v": 2 * dim}
    tensors = {f"self_attn.{name}_proj.weight": little(count, 2 * WIDTH) for name, count in rows.items()}
    tensors |= {f"mlp.{name}_proj.weight": little(inner, WIDTH) for name in ("gate", "up")}
    tensors |= {"self_attn.o_proj.weight": little(WIDTH, WIDTH), "mlp.down_proj.weight": little(WIDTH, inner)}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"{name}.weight"] = torch.ones(WIDTH)
    ids = torch.randperm(VOCAB, generator=generator)[:HEAD_VOCAB].sort().values
    tensors = {f"midlayer.{name}": tensor for name, tensor in tensors.items()}
    tensors["fc.weight"] = torch.cat((little(WIDTH, 2 * WIDTH), torch.eye(WIDTH)), dim=1)
    tensors["norm.weight"] = model.model.norm.weight.detach()
    tensors["lm_head.weight"] = model.lm_head.weight.detach()[ids]
    tensors["d2t"] = ids - torch.arange(HEAD_VOCAB)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def write_head(folder: Path, model: Any, form: str) -> Path:
    """The head of a target in one of the two forms, ``one file`` or ``speculators``."""
    tensors = make_head(model)
    if form == "one file":
        return write(folder, ONE_FILE, tensors)
    named = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    named["embed_tokens.weight"] = model.model.embed_tokens.weight.detach()
    return write(folder, SPECULATORS, named)


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def write_tokenizer(folder: Path) -> None:
    """Bytes, and three special tokens; the model's other ids have no text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={byte: i + 3 for i, byte in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
