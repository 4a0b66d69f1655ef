"""LoRA adapters in GGUF files, as llama.cpp converts them from PEFT: ``<tensor>.lora_a`` [r, I] and ``.lora_b`` [O, r].

O outputs, I inputs, r rank, V vocabulary, D hidden size, X experts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from headrace.base.errors import AdapterError, UnsupportedFeature
from headrace.layers.lora.contract import AdaptedPart, AdapterSite, AdapterSites
from headrace.layers.names import GgufNaming
from headrace.layers.spec import AttentionSpec, DecoderSpec
from headrace.models.adapters.naming import last_parts, list_names
from headrace.models.family import Family
from headrace.models.weights.gguf_file import GgufTensor, read_gguf_header
from headrace.models.weights.gguf_naming import BLOCK_PARTS, GLOBAL_PARTS, NamedTensor, deinterleaved_rows
from headrace.models.weights.gguf_tensors import read_copies

KIND = "general.type"
MAX_HEADER_BYTES = 32 << 20
_BLOCK = re.compile(r"blk\.(\d{1,5})\.(\w+)\.weight")
_ENDINGS = (".lora_a", ".lora_b")


@dataclass(frozen=True)
class GgufForm:
    """What converting a family's adapters to GGUF does: the values of ``general.architecture``, the tensors' names and
    row order, and the dims of a head (0: rows keep their order)."""

    architectures: tuple[str, ...]
    naming: GgufNaming
    head_dim: int = 0


def find_gguf_form(family: Family, spec: Any) -> GgufForm | None:
    """What GGUF adapters of a family are like; None if it reads no GGUF files."""
    attention = spec.attention if isinstance(spec, DecoderSpec) else None
    head_dim = attention.head_dim if isinstance(attention, AttentionSpec) else 0
    is_ordered = head_dim or not family.gguf_naming.is_rotary_interleaved
    if not family.gguf_architectures or not is_ordered:
        return None
    return GgufForm(family.gguf_architectures, family.gguf_naming, head_dim)


def read_gguf_parts(path: Path, sites: AdapterSites, base: GgufForm | None) -> tuple[list[AdaptedPart], list[str]]:
    """The parts of a GGUF adapter, and the last parts of the names of adapted modules. Raises `AdapterError` or
    `WeightError`."""
    if base is None:
        raise UnsupportedFeature("the model's family reads no GGUF files; give a folder of PEFT", param="lora_path")
    header = read_gguf_header(path, most_bytes=MAX_HEADER_BYTES)
    alpha = _read_alpha(path, header.metadata, base)
    pairs: dict[str, dict[str, GgufTensor]] = {}
    for tensor in header.tensors:
        ending = next((ending for ending in _ENDINGS if tensor.name.endswith(ending)), None)
        if ending is None:
            raise AdapterError(f"{path.name} has tensors that are not of LoRA, such as {tensor.name[:200]}")
        pairs.setdefault(tensor.name.removesuffix(ending), {})[ending] = tensor
    halves = [name for name, pair in pairs.items() if len(pair) < 2]
    if halves:
        raise AdapterError(f"{path.name} has one of lora_a and lora_b, and not the other, of {list_names(halves)}")
    targets = {name: _name_module(name, sites, base.naming) for name in pairs}
    unmatched = [name for name, module in targets.items() if module is None]
    if unmatched:
        raise AdapterError(
            f"it adapts tensors that take no adapters in this model: {list_names(unmatched)}; the model has "
            f"{', '.join(last_parts(sites.sites))}"
        )
    parts = [
        part for name, module in targets.items() if module is not None
        for part in _read_pair(name, module, pairs[name], sites, base, alpha)
    ]
    return parts, sorted({module.rpartition(".")[2] for module in targets.values() if module})


def _read_alpha(path: Path, metadata: dict[str, Any], base: GgufForm) -> float:
    """``adapter.lora.alpha``; 0 for a scale of 1."""
    architecture, alpha = metadata.get("general.architecture"), metadata.get("adapter.lora.alpha", 0.0)
    if metadata.get(KIND) != "adapter" or metadata.get("adapter.type") != "lora":
        raise AdapterError(f"{path.name} is no LoRA adapter: {KIND} is {metadata.get(KIND)!r}")
    if architecture not in base.architectures:
        raise AdapterError(
            f"{path.name} is for {architecture!r}, the model's files are {', '.join(base.architectures) or 'no GGUF'}"
        )
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 <= alpha <= 1e6:
        raise AdapterError(f"{path.name}: adapter.lora.alpha must be a number from 0 to 1e6, got {alpha!r}")
    return float(alpha)


def _name_module(tensor: str, sites: AdapterSites, naming: GgufNaming) -> str | None:
    """The checkpoint module of a GGUF tensor; None where the model has none that takes adapters."""
    match = _BLOCK.fullmatch(tensor)
    if match is None:
        stem = tensor.removesuffix(".weight")
        return next((name for name in (GLOBAL_PARTS.get(stem, ""),) if name in sites.sites), None)
    block, part = match.groups()
    # an up projection without a gate may be gate and up stacked
    homes = [naming.parts.get(part) or BLOCK_PARTS.get(part, ""), "mlp.gate_up_proj" if part == "ffn_up" else ""]
    names = [f"model.layers.{block}.{home}" for home in homes if home]
    return next((name for name in names if name in sites.sites or _first_expert(name) in sites.sites), None)


def _first_expert(name: str) -> str:
    stem, _, last = name.rpartition(".")
    return f"{stem}.0.{last}"


def _read_pair(
    name: str, module: str, pair: dict[str, GgufTensor], sites: AdapterSites, base: GgufForm, alpha: float
) -> list[AdaptedPart]:
    stem, _, last = module.rpartition(".")
    own = [sites.sites[module]] if module in sites.sites else []
    while not own or own[-1].expert >= 0:
        site = sites.sites.get(f"{stem}.{len(own)}.{last}") if module not in sites.sites else None
        if site is None:
            break
        own.append(site)
    stored_a, stored_b = (pair[ending] for ending in _ENDINGS)
    _check_shapes(name, stored_a, stored_b, own)
    order = None
    if base.naming.is_rotary_interleaved and name.endswith((".attn_q.weight", ".attn_k.weight")):
        order = deinterleaved_rows(replace(stored_b, name=name), own[0].out_features // base.head_dim)
    named = [NamedTensor("a", stored_a), NamedTensor("b", stored_b, order)]
    read = dict(read_copies(named, stored_a.path, dtype=torch.float32))
    a, b = read["a"], read["b"]
    if own[0].kind == "embedding":
        a = a.T.contiguous()  # stored as [V, r]
    stacked = zip(a, b, strict=True) if a.dim() == 3 else ((a, b),)
    return [
        AdaptedPart(
            site.module, site.part, site.expert, a=own_a.contiguous(), b=own_b.contiguous(),
            scale=alpha / len(own_a) if alpha else 1.0
        )
        for site, (own_a, own_b) in zip(own, stacked, strict=True)
    ]


def _check_shapes(name: str, a: GgufTensor, b: GgufTensor, own: list[AdapterSite]) -> None:
    """Raise `AdapterError` unless A and B fit the sites, before their content is read."""
    site, rank = own[0], b.shape[-1] if b.shape else 0
    count = (len(own),) if site.expert >= 0 else ()
    wanted_a = (*count, rank, site.in_features)
    wanted_b = (*count, site.out_features, rank)
    if site.kind == "embedding":
        wanted_a = (site.in_features, rank)
    if rank == 0 or a.shape != wanted_a or b.shape != wanted_b:
        raise AdapterError(
            f"{name[:200]} has lora_a {list(a.shape)} and lora_b {list(b.shape)}; the model needs {list(wanted_a)} and "
            f"{list(wanted_b)}"
        )
