"""Tiny random Hugging Face models with LoRA of PEFT in which every trained number is random, the sites of such a model,
and what parts of an adapter make of its weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from headrace.layers.lora.contract import AdaptedPart, AdapterSite, AdapterSites, AdapterWeights
from headrace.layers.names import SCORE_NAMES, CheckpointNames
from headrace.models.adapters.reader import AdapterSource, read_adapter
from headrace.models.catalog import find_family

LLAMA: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False, "pad_token_id": 0,
}
TOKENS = torch.tensor([[1, 5, 9, 33, 60, 2, 2, 17]])


def make_model(config: transformers.PretrainedConfig, kind: Any = transformers.AutoModelForCausalLM) -> nn.Module:
    """A random model; also biases are random."""
    torch.manual_seed(7)
    model = kind.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model


def adapt(model: nn.Module, folder: Path, **fields: Any) -> nn.Module:
    """The model with an adapter of PEFT, which is saved to ``folder``: all that is trained is random."""
    peft = __import__("peft")
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**{"r": 4, "lora_alpha": 6, **fields}))
    torch.manual_seed(11)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.2)
                if "magnitude" in name:
                    parameter.abs_()
    adapted.eval().save_pretrained(str(folder))
    # read again: the file may say less than the object, such as the order of patterns
    return peft.PeftModel.from_pretrained(copy.deepcopy(model), str(folder)).eval()


def find_sites(model: nn.Module, names: CheckpointNames, *, is_tied: bool = False) -> AdapterSites:
    """The sites of a Hugging Face model under a family's table of names."""
    own: dict[str, AdapterSite] = {}
    num_layers = getattr(model.config, "num_hidden_layers", 0)
    modules = _rename(model, names.rename_one)
    for theirs, ours in {**names.modules, **SCORE_NAMES}.items():
        for i in range(num_layers if "{i}" in theirs else 1):
            name, path = theirs.replace("{i}", str(i)), ours.replace("{i}", str(i))
            module, _, part = path.partition("#")
            if "{x}" in name:
                _add_experts(own, modules, name, module, part.rpartition("/")[2])
            elif isinstance(modules.get(name), nn.Embedding):
                size, width = modules[name].weight.shape
                own[name] = AdapterSite(module, part, size, width, "embedding")
            elif isinstance(modules.get(name), nn.Linear):
                outputs, inputs = modules[name].weight.shape
                own[name] = AdapterSite(module, part, inputs, outputs, "head" if module == "head" else "linear")
    return AdapterSites(own, names.rename_one, names.stacked_experts, model.config.hidden_size, is_tied)


def _rename(model: nn.Module, rename: Callable[[str], str]) -> dict[str, Any]:
    """The modules under the names that checkpoints have in the family's table."""
    return {rename(f"{name}.weight").removesuffix(".weight"): module for name, module in model.named_modules()}


def _add_experts(own: dict[str, AdapterSite], modules: dict[str, Any], name: str, module: str, part: str) -> None:
    prefix, _, last = name.partition(".experts.{x}.")
    experts = modules.get(f"{prefix}.experts")
    if experts is None:
        return
    parameter = experts.down_proj if last == "down_proj" else experts.gate_up_proj
    count, rows, columns = parameter.shape
    if getattr(experts, "is_transposed", False):
        rows, columns = columns, rows
    rows = rows if last == "down_proj" else rows // 2
    for x in range(count):
        own[f"{prefix}.experts.{x}.{last}"] = AdapterSite(module, part, columns, rows, "experts", x)


def read(folder: Path | str, sites: AdapterSites, *, max_rank: int = 64, **more: Any) -> AdapterWeights:
    return read_adapter(AdapterSource("test", str(folder)), sites, max_rank=max_rank, **more)


def names_of(model: nn.Module) -> CheckpointNames:
    """The table of the family that serves the model."""
    return find_family(type(model).__name__).names


@torch.no_grad()
def merge(model: nn.Module, sites: AdapterSites, weights: AdapterWeights) -> nn.Module:
    """A copy of the model with the parts of an adapter in its weights."""
    merged = copy.deepcopy(model)
    head = merged.get_output_embeddings()
    if head is not None:  # parts may change one of two tied weights
        head.weight = nn.Parameter(head.weight.clone())
    modules = _rename(merged, sites.rename)
    by_place = {(site.module, site.part, site.expert): name for name, site in sites.sites.items()}
    for part in weights.parts:
        name = by_place[part.module, part.part, part.expert]
        if part.expert >= 0:
            _merge_expert(modules, name, part, sites)
        else:
            _merge_module(modules[name], part)
    return merged


def _merge_module(module: nn.Module, part: AdaptedPart) -> None:
    weight = module.weight
    if part.weight is not None:
        weight.copy_(part.weight)
    if part.a is not None and part.b is not None:
        delta = part.scale * part.b @ part.a
        weight.add_(delta.T if isinstance(module, nn.Embedding) else delta)
    if part.magnitude is not None:
        weight.mul_((part.magnitude / weight.norm(dim=1)).unsqueeze(1))
    if part.bias is not None:
        module.bias.copy_(part.bias)
    if part.token_ids is not None:
        weight[part.token_ids] = part.token_rows


def _merge_expert(modules: dict[str, Any], name: str, part: AdaptedPart, sites: AdapterSites) -> None:
    stem, _, last = name.rpartition(".")
    experts, expert = modules[stem.rpartition(".")[0]], part.expert
    stacked = (experts.down_proj if last == "down_proj" else experts.gate_up_proj)[expert]
    matrix = stacked.T if getattr(experts, "is_transposed", False) else stacked
    assert part.a is not None and part.b is not None
    if last != "down_proj":
        half = int(last == "up_proj")
        size = len(matrix) // 2
        rows = slice(half * size, (half + 1) * size) if sites.stacked_experts == "gate_first" else slice(half, None, 2)
        matrix = matrix[rows]
    matrix.add_(part.scale * part.b @ part.a)


@torch.no_grad()
def outputs_of(model: nn.Module, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    """Logits, or the last hidden states of a model without a head."""
    found = model(tokens)
    return found.logits if "logits" in found else found.last_hidden_state
