"""Names of the tensors in a file of PEFT: which module of the Hugging Face model each belongs to, and what of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from headrace.base.errors import AdapterError
from headrace.layers.lora.contract import AdapterSite, AdapterSites
from headrace.layers.names import prefix_one

ROOT = "base_model.model."
LOW_RANK = frozenset({"a", "b", "embedding_a", "embedding_b", "magnitude"})
NUM_NAMED = 6
"""Most tensors that an error lists."""

_ENDINGS = (
    (re.compile(r"\.lora_A(\.default)?\.weight"), "a"),
    (re.compile(r"\.lora_B(\.default)?\.weight"), "b"),
    (re.compile(r"\.lora_embedding_A(\.default)?"), "embedding_a"),
    (re.compile(r"\.lora_embedding_B(\.default)?"), "embedding_b"),
    (re.compile(r"\.lora_magnitude_vector(\.default)?(\.weight)?"), "magnitude"),
    (re.compile(r"\.token_adapter\.trainable_tokens_delta(\.default)?"), "token_rows"),
    (re.compile(r"(\.modules_to_save(\.default)?|\.base_layer)?\.bias"), "bias"),
    (re.compile(r"\.base_layer\.weight"), "base"),
    (re.compile(r"(\.modules_to_save(\.default)?)?\.weight"), "weight"),
)
_BEGIN = re.compile(r"\.(lora_|token_adapter|modules_to_save|base_layer|bias$|weight$)")
_LAYERS = ".base_layer"


class TensorName(NamedTuple):
    """A tensor's place: ``module`` is a module of the Hugging Face model, ``kind`` what the tensor is of it. ``depth``:
    how many wrappers are around this one, where several parameters of a module have one each."""

    module: str
    kind: str
    depth: int = 0


def read_name(name: str) -> TensorName | None:
    """The place that a tensor's name says; None for a name that PEFT does not give."""
    plain = name.removeprefix(ROOT)
    begin = _BEGIN.search(plain)
    if begin is None or not begin.start():
        return None
    module, ending = plain[: begin.start()], plain[begin.start() :]
    depth = 0
    while ending.startswith(f"{_LAYERS}.lora_") or ending.startswith(_LAYERS * 2):
        ending, depth = ending.removeprefix(_LAYERS), depth + 1
    kind = _find_kind(ending)
    return None if kind is None else TensorName(module, kind, depth)


@lru_cache(maxsize=64)
def _find_kind(ending: str) -> str | None:
    return next((kind for pattern, kind in _ENDINGS if pattern.fullmatch(ending)), None)


class SiteNames:
    """Finds sites by the names that modules have in the Hugging Face model."""

    def __init__(self, sites: AdapterSites):
        self._sites, self._rename = sites.sites, sites.rename

    def normalise(self, module: str) -> str:
        """The name that the family's table has for a module, or one like it for a module that is not there."""
        # renames are written for tensors, with dots around modules
        renamed = self._rename(f"{module}.weight").removesuffix(".weight")
        return renamed if renamed in self._sites else prefix_one(renamed)

    def find(self, module: str) -> AdapterSite | None:
        """The site of a module; None if it takes no adapters, or is not there."""
        return self._sites.get(self.normalise(module))

    def number_experts(self, module: str) -> int:
        """How many experts are stacked in a module; 0 if it is none."""
        name, count = self.normalise(module), 0
        while f"{name}.{count}.down_proj" in self._sites:
            count += 1
        return count


def group_tensors(names: Iterable[str]) -> dict[str, dict[tuple[str, int], str]]:
    """Tensors by module, then by kind and depth. Raises `AdapterError` for tensors that are no part of a LoRA adapter,
    or of which there are two."""
    groups: dict[str, dict[tuple[str, int], str]] = {}
    unknown: list[str] = []
    for name in names:
        place = read_name(name)
        if place is None:
            unknown.append(name)
            continue
        group, key = groups.setdefault(place.module, {}), (place.kind, place.depth)
        if key in group:
            raise AdapterError(f"the adapter has {place.kind} of {place.module} twice: {group[key]} and {name}")
        group[key] = name
    if unknown:
        raise AdapterError(f"the adapter has tensors that are not of LoRA: {list_names(unknown)}")
    return groups


def list_names(names: Iterable[str]) -> str:
    """Some of the names, and how many more there are."""
    every = sorted(names)
    more = f" and {len(every) - NUM_NAMED} more" if len(every) > NUM_NAMED else ""
    return ", ".join(name[:200] for name in every[:NUM_NAMED]) + more


def last_parts(sites: Mapping[str, AdapterSite]) -> Iterator[str]:
    """The last parts of the names of sites, each once."""
    return iter(sorted({name.rpartition(".")[2] for name in sites}))
