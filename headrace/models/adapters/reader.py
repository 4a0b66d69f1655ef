"""`read_adapter`: a LoRA adapter's files as the parts that layers apply. The tensors of a file decide which modules are
adapted; the configuration must agree with them.

O outputs, I inputs, r rank, V vocabulary, D hidden size, X experts, F intermediate size of an expert.
"""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from headrace.base.errors import AdapterError, HeadraceError, ModelError, RequestError, UnsupportedFeature
from headrace.layers.lora.contract import AdaptedPart, AdapterSite, AdapterSites, AdapterWeights
from headrace.layers.lora.memory import AdapterMemory
from headrace.models.adapters.config import MAX_CONFIG_BYTES, PeftConfig, parse_config
from headrace.models.adapters.contents import check_parts
from headrace.models.adapters.experts import read_experts
from headrace.models.adapters.finding import CONFIG_FILE, PICKLE_FILE, WEIGHTS_FILE, find_adapter
from headrace.models.adapters.gguf import GgufForm, read_gguf_parts
from headrace.models.adapters.naming import LOW_RANK, SiteNames, group_tensors, last_parts, list_names
from headrace.models.adapters.tensors import AdapterTensors

WHOLE = ("weight", "token_rows")
"""Kinds of tensors that replace the base's."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AdapterSource:
    """Where an adapter is: ``path``, a folder of PEFT, a GGUF file or a name on the hub; or ``tensors``, the bytes of
    adapter_model.safetensors, with ``config``, the text of adapter_config.json."""

    name: str
    path: str = ""
    tensors: bytes = b""
    config: str = ""


def read_adapter(
    source: AdapterSource, sites: AdapterSites, *, max_rank: int, gguf: GgufForm | None = None,
    memory: AdapterMemory | None = None
) -> AdapterWeights:
    """Read an adapter for a model with these sites; ``gguf``: what its GGUF files are like; ``memory``: where its
    tensors are read into, if they are of PEFT. Raises `AdapterError` or `UnsupportedFeature`, which name the adapter
    and the field, module, tensor or file."""
    try:
        return _read(source, sites, max_rank, gguf, memory)
    except HeadraceError as error:
        # whoever asked for the adapter may correct it, also where a file is wrong
        kind = type(error) if isinstance(error, RequestError) else AdapterError
        raise kind(f"adapter {source.name!r}: {error.message}", param=error.param or "lora_path") from error


def count_whole_bytes(path: str, sites: AdapterSites, item_bytes: int) -> int:
    """Bytes of the tensors of an adapter in a folder that are more than low-rank additions to linear layers, with so
    many for a number: whole modules, rows of tokens, and what is added to embeddings and experts. By the header of its
    file alone. Raises as `read_adapter`."""
    found = find_adapter(path)
    if not (found / WEIGHTS_FILE).is_file():
        return 0
    names, count = SiteNames(sites), 0
    with closing(AdapterTensors.open(found / WEIGHTS_FILE)) as tensors:
        for module, group in group_tensors(tensors.entries).items():
            site = names.find(module)
            kind = "experts" if site is None else site.kind
            is_whole = kind in ("embedding", "experts")
            own = sum(prod(tensors.shape(name)) for (what, _), name in group.items() if is_whole or what in WHOLE)
            count += 2 * own if kind == "embedding" and sites.is_tied else own  # for the head, too
    return count * item_bytes


def _read(
    source: AdapterSource, sites: AdapterSites, max_rank: int, gguf: GgufForm | None, memory: AdapterMemory | None
) -> AdapterWeights:
    path = find_adapter(source.path) if source.path else None
    if path is not None and path.suffix == ".gguf" and not path.is_dir():
        parts, modules = read_gguf_parts(path, sites, gguf)
        contents = None
    else:
        config, tensors = _open(source, path, memory)
        with closing(tensors):
            reader = _PeftReader(config, tensors, sites, max_rank)
            parts, modules, contents = reader.read(), sorted(reader.modules), tensors.contents
    rank = max((part.rank for part in parts), default=0)
    if not parts:
        raise AdapterError("it changes no module of the model")
    _check_rank(rank, max_rank)
    return AdapterWeights(parts, rank, check_parts(parts, contents), modules)


def _check_rank(rank: int, max_rank: int) -> None:
    if rank > max_rank:
        raise AdapterError(f"it has rank {rank}, more than {max_rank}; start with --max-lora-rank {rank}")


def _open(
    source: AdapterSource, path: Path | None, memory: AdapterMemory | None
) -> tuple[PeftConfig, AdapterTensors]:
    """The configuration and the tensors, of which only the header has been read."""
    if path is None:
        if not source.tensors or not source.config:
            raise AdapterError("give path, or tensors and config", param="tensors")
        return parse_config(source.config), AdapterTensors.unpack(source.tensors, "tensors", memory)
    if not path.is_dir():
        raise ModelError(f"{path} is no adapter: expected a folder with {CONFIG_FILE}, or a .gguf file")
    weights = path / WEIGHTS_FILE
    if not weights.is_file():
        if (path / PICKLE_FILE).is_file():
            raise ModelError(
                f"{path / PICKLE_FILE} is a pickle, which is never loaded; load the adapter with PEFT and save it "
                "with save_pretrained(..., safe_serialization=True)"
            )
        raise ModelError(f"{path} has no {WEIGHTS_FILE}")
    try:
        file = path / CONFIG_FILE
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise ModelError(f"{file} is larger than {MAX_CONFIG_BYTES} bytes")
        text = file.read_bytes()
    except OSError as error:
        raise ModelError(f"cannot read {path / CONFIG_FILE}: {error.strerror or error}") from error
    return parse_config(text), AdapterTensors.open(weights, memory)


class _PeftReader:
    """Makes the parts of one adapter. ``modules``: last parts of the names of adapted modules, filled by `read`."""

    def __init__(self, config: PeftConfig, tensors: AdapterTensors, sites: AdapterSites, max_rank: int):
        self.modules: set[str] = set()
        self._config, self._tensors, self._sites, self._max_rank = config, tensors, sites, max_rank
        self._names = SiteNames(sites)
        self._groups = group_tensors(tensors.entries)

    def read(self) -> list[AdaptedPart]:
        """All parts; raises `AdapterError` naming what the model or the configuration does not have."""
        self._leave_out_unused()
        self._check_modules()
        parts: list[AdaptedPart] = []
        for module in self._groups:
            found = self._read_group(module)
            if found:
                self.modules.add(module.rpartition(".")[2])
            parts += found
        self._tensors.fill()
        self._tie(parts)
        self._note_unused()
        return parts

    def _read_group(self, module: str) -> list[AdaptedPart]:
        """The parts that the tensors of one module make, most of which are still to be filled."""
        site, group = self._names.find(module), self._groups[module]
        if site is None:
            return read_experts(module, group, self._config, self._tensors, self._names, self._sites)
        return self._read_module(module, site, {kind: name for (kind, _), name in group.items()})

    def _leave_out_unused(self) -> None:
        """Drop what is of modules that the served model does not compute, such as the head of a pretraining."""
        unused = [
            module for module in self._groups
            if f"{module}.".startswith(self._sites.unused or ("\0",)) and self._names.find(module) is None
        ]
        for module in unused:
            del self._groups[module]
        if unused:
            logger.warning("the adapter changes modules that are not served: %s", list_names(unused))

    def _check_modules(self) -> None:
        unmatched = [
            module for module in self._groups
            if self._names.find(module) is None and not self._names.number_experts(module)
        ]
        if unmatched:
            raise AdapterError(
                f"it adapts modules that take no adapters in this model: {list_names(unmatched)}; the model has "
                f"{', '.join(last_parts(self._sites.sites))}"
            )

    def _read_module(self, module: str, site: AdapterSite, names: dict[str, str]) -> list[AdaptedPart]:
        part = AdaptedPart(site.module, site.part, site.expert)
        if self._config.bias == "none" and site.kind == "head" and names.get("bias", "").endswith(".base_layer.bias"):
            del names["bias"]  # the base's own, which PEFT saves beside its weight where the embedding has LoRA
        self._check_named(module, site, names)
        if LOW_RANK & names.keys():
            self._read_low_rank(module, site, names, part)
        outputs, inputs = site.out_features, site.in_features
        if "bias" in names:
            part.bias = self._tensors.place(names["bias"], (outputs,))
        if "weight" in names:
            shape = (inputs, outputs) if site.kind == "embedding" else (outputs, inputs)
            self._check_vocabulary(names["weight"], shape, site)
            part.weight = self._tensors.place(names["weight"], shape)
        if "base" in names:  # the base's own weight, which PEFT saves where the embedding has LoRA
            shape = (inputs, outputs) if site.kind == "embedding" else (outputs, inputs)
            self._check_vocabulary(names["base"], shape, site)
        if "token_rows" in names:
            self._read_token_rows(module, site, names["token_rows"], part)
        return [part] if part.tensors else []

    def _check_named(self, module: str, site: AdapterSite, names: dict[str, str]) -> None:
        """Raise `AdapterError` for tensors that the configuration does not say are there."""
        config, is_saved = self._config, self._config.saves(module)
        is_tied = config.ties_weights and self._sites.is_tied and site.kind == "head"  # follows the embedding
        why = config.why_untargeted(module) if LOW_RANK & names.keys() and not is_tied else None
        if why == "target_parameters" or (why and config.targets_parameter(f"{module}.weight")):
            why = None if config.targets_parameter(f"{module}.weight") else why
        if why:
            raise AdapterError(f"{why} of adapter_config.json leaves out {module}, and the file adapts it")
        if "weight" in names and not is_saved and site.kind not in ("embedding", "head"):
            raise AdapterError(f"modules_to_save of adapter_config.json does not name {module}, whose weight is there")
        if "base" in names and site.kind not in ("embedding", "head"):
            raise AdapterError(f"{names['base']} is a weight of the base model, which an adapter does not change")
        if "bias" in names and not is_saved and config.bias == "none":
            raise AdapterError(f"bias of adapter_config.json is none, and the file has {names['bias']}")

    def _check_vocabulary(self, name: str, shape: tuple[int, ...], site: AdapterSite) -> None:
        found = self._tensors.shape(name)
        if site.kind in ("embedding", "head") and len(found) == 2 and found[0] != shape[0]:
            raise AdapterError(
                f"{name} has {found[0]} rows, the model {shape[0]}: the vocabulary was resized; merge the adapter into "
                "the resized model and serve that"
            )

    def _read_low_rank(self, module: str, site: AdapterSite, names: dict[str, str], part: AdaptedPart) -> None:
        is_embedding = site.kind == "embedding"
        first, second = ("embedding_a", "embedding_b") if is_embedding else ("a", "b")
        others = (LOW_RANK - {first, second, "magnitude"}) & names.keys()
        if others or first not in names or second not in names:
            there = list_names(names.values())
            prefix = "lora_embedding_" if is_embedding else "lora_"
            raise AdapterError(f"{module} needs {prefix}A and B; it has {there}")
        rank = self._config.rank_of(module)
        _check_rank(rank, self._max_rank)
        found = self._tensors.shape(names[first])
        if found[:1] != (rank,):
            field = "rank_pattern" if self._config.rank_pattern else "r"
            raise AdapterError(
                f"{field} of adapter_config.json says rank {rank} for {module}, and {names[first]} has shape "
                f"{list(found)}"
            )
        part.a = self._tensors.place(names[first], (rank, site.in_features))
        part.b = self._tensors.place(names[second], (site.out_features, rank))
        part.scale = self._config.scale_of(module)
        self._read_magnitude(module, site, names, part)

    def _read_magnitude(self, module: str, site: AdapterSite, names: dict[str, str], part: AdaptedPart) -> None:
        if not self._config.has_magnitudes:
            if "magnitude" in names:
                raise AdapterError(f"use_dora of adapter_config.json is false, and the file has {names['magnitude']}")
            return
        if site.kind == "embedding":
            raise UnsupportedFeature(
                f"use_dora is not supported for an embedding ({module}); merge the adapter into its model",
                param="lora_path"
            )
        if "magnitude" not in names:
            raise AdapterError(f"use_dora of adapter_config.json is true, and {module} has no lora_magnitude_vector")
        part.magnitude = self._tensors.place(names["magnitude"], (site.out_features,))

    def _read_token_rows(self, module: str, site: AdapterSite, name: str, part: AdaptedPart) -> None:
        if site.kind not in ("embedding", "head"):
            raise AdapterError(f"{name}: {module} has no rows of tokens")
        ids = next(
            (
                ids for target, ids in self._config.token_ids.items()
                if (not target and site.kind == "embedding") or (target and f".{module}".endswith(f".{target}"))
            ), None
        )
        if ids is None:
            raise AdapterError(f"trainable_token_indices of adapter_config.json does not name {module}")
        is_embedding = site.kind == "embedding"
        size, width = (site.in_features, site.out_features)[:: 1 if is_embedding else -1]
        if ids and max(ids) >= size:
            raise AdapterError(
                f"trainable_token_indices names token {max(ids)}, the model's vocabulary has {size} tokens"
            )
        part.token_ids = torch.tensor(ids, dtype=torch.int64)
        part.token_rows = self._tensors.place(name, (len(ids), width))

    def _tie(self, parts: list[AdaptedPart]) -> None:
        """Where the head is the embedding's matrix, add what changes it there too, as PEFT does: trained rows always,
        the rest with ``ensure_weight_tying``."""
        sites = {site.kind: site for site in self._sites.sites.values() if site.kind in ("embedding", "head")}
        embedding, head = sites.get("embedding"), sites.get("head")
        if not self._sites.is_tied or embedding is None or head is None:
            return
        by_module = {part.module: part for part in parts if part.expert < 0}
        source = by_module.get(embedding.module)
        if source is None:
            return
        target = by_module.get(head.module) or AdaptedPart(head.module, head.part)
        if source.token_rows is not None and target.token_rows is None:
            target.token_ids, target.token_rows = source.token_ids, source.token_rows
        if self._config.ties_weights and target.weight is None and target.a is None:
            target.weight = source.weight
            if source.a is not None and source.b is not None:
                target.a, target.b, target.scale = source.b.T.contiguous(), source.a.T.contiguous(), source.scale
        if head.module not in by_module and target.tensors:
            parts.append(target)

    def _note_unused(self) -> None:
        unused = self._config.unmatched_targets([*self._groups, *self._sites.sites])
        if unused:
            logger.warning("target_modules names %s, which the model does not have", list_names(unused))
        has_rows = any(("token_rows", 0) in group for group in self._groups.values())
        if any(self._config.token_ids.values()) and not has_rows:
            raise AdapterError("trainable_token_indices names tokens, and the file has no rows for them")
