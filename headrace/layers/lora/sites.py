"""The sites of a model by a family's table of names, and `AdapterBanks`: its banks, by the modules that have them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from headrace.kernels.lora import SlotRows
from headrace.layers.lora.bank import AdapterBank, LinearBank
from headrace.layers.lora.contract import AdapterSite, AdapterSites, AdapterWeights
from headrace.layers.lora.memory import AdapterMemory
from headrace.layers.lora.parts import BankSizes, LoadBytes, PreparedPart
from headrace.layers.lora.staging import FactorBank, Stage, StagedFactors


@dataclass(frozen=True)
class PreparedAdapter:
    """An adapter in host memory as this rank's banks copy it: its parts by module, and ``staged``, what of them a GPU
    takes at once."""

    parts: Mapping[str, list[PreparedPart]] = field(default_factory=dict)
    staged: StagedFactors | None = None


def find_banks(model: nn.Module) -> dict[str, AdapterBank]:
    """By the name of the module that has the bank."""
    found = model.named_modules()
    return {name.removesuffix(".lora"): module for name, module in found if isinstance(module, AdapterBank)}


def find_sites(model: nn.Module, names: Mapping[str, str], num_layers: int) -> dict[str, AdapterSite]:
    """The sites of a model that was built with banks. ``names``: see `headrace.layers.loading`."""
    banks, sites = find_banks(model), {}
    for theirs, ours in names.items():
        for i in range(num_layers if "{i}" in theirs else 1):
            name, path = theirs.replace("{i}", str(i)), ours.replace("{i}", str(i))
            module, _, part = path.partition("#")
            bank = banks.get(module)
            if bank is None:
                continue
            experts, _, own = part.rpartition("/")
            if part and bank.part_names is not None and part not in bank.part_names:  # one of a layer of another kind
                continue
            if not experts:
                sites[name] = AdapterSite(module, part, *bank.sizes(part), bank.kind)
                continue
            for x in range(bank.num_experts):
                sites[name.replace("{x}", str(x))] = AdapterSite(module, own, *bank.sizes(own), bank.kind, x)
    return sites


class OutputContext(Protocol):
    """By which heads and classifiers find out which of their rows have which adapter."""

    output_rows: SlotRows | None


class AdapterBanks:
    """All banks of a model, of these ``sizes``, and its ``sites``; ``context``: of its steps."""

    def __init__(self, model: nn.Module, sites: AdapterSites, sizes: BankSizes, context: OutputContext):
        self._banks = find_banks(model)
        self.sites, self.context = sites, context
        self.num_slots, self.dense_counts = sizes.num_slots, sizes.dense_counts
        self._by_slot: dict[int, set[str]] = {}  # modules that the adapter in a slot changes
        self._stage: Stage | None = None

    @property
    def num_captured(self) -> int:
        """Kinds of captured steps with adapters, one for each of `BankSizes.dense_counts`."""
        return len(self.dense_counts)

    @property
    def slot_bytes(self) -> int:
        """Of the room that banks have set aside, the bytes of one adapter."""
        return sum(bank.slot_bytes for bank in self._banks.values())

    def prepare(self, adapter: AdapterWeights, memory: AdapterMemory | None = None) -> PreparedAdapter:
        """What an adapter needs here, on any thread; ``memory``: it was read into, where that is staged. Raises
        `UnsupportedFeature`."""
        parts: dict[str, list[PreparedPart]] = defaultdict(list)
        for part in adapter.parts:
            parts[part.module] += self._banks[part.module].prepare(part, is_staged=memory is not None)
        if memory is None:
            return PreparedAdapter(parts)
        return PreparedAdapter(parts, StagedFactors(parts, self._find_factor_banks(parts), memory))

    def place_behind_weights(self) -> None:
        """Move ``a`` of banks behind the weights that have room for it. Weights may get memory only when they are
        filled, and other memory when they are quantised: call it once they are all in."""
        for bank in self._banks.values():
            if isinstance(bank, LinearBank) and bank.extended is not None:
                bank.extended.place(bank)

    def stage_loads(self) -> None:
        """Have what loads of adapters from staged memory need, on the device."""
        if self._stage is None:
            self._stage = Stage(self.device)
        banks = (bank for bank in self._banks.values() if isinstance(bank, LinearBank))
        self._stage.warm_up({bank.b.dtype for bank in banks})

    def _find_factor_banks(self, parts: Mapping[str, list[PreparedPart]]) -> dict[str, FactorBank]:
        """Of the modules to which all that an adapter does is to add."""
        return {
            name: bank for name, own in sorted(parts.items()) if isinstance(bank := self._banks[name], LinearBank)
            and all(part.a is not None and part.a.numel() and not part.has_extras for part in own)
        }

    def count_bytes(self, adapter: PreparedAdapter) -> LoadBytes:
        """What an adapter takes of the device beside the room that banks have set aside: whole modules, rows of tokens,
        and what is added to embeddings and experts; while it is loaded the weights whose norms it needs."""
        found = [self._banks[name].count_bytes(parts) for name, parts in adapter.parts.items()]
        return LoadBytes(sum(one.kept for one in found), max((one.passing for one in found), default=0))

    def is_copied(self, adapter: PreparedAdapter) -> bool:
        """Whether loading an adapter is copying alone, into the room of banks."""
        return all(
            self._banks[name].kind in ("linear", "head") and not any(part.has_extras for part in parts)
            for name, parts in adapter.parts.items()
        )

    @property
    def device(self) -> torch.device:
        """Where banks are."""
        return next((buffer.device for bank in self._banks.values() for buffer in bank.buffers()), torch.device("cpu"))

    def load(self, slot: int, adapter: PreparedAdapter) -> None:
        """Take an adapter into a slot, in stream order; an empty one leaves the slot empty."""
        before, own = self._by_slot.get(slot, set()), set(adapter.parts)
        self._by_slot[slot] = before | own  # first: what fails half-way is overwritten by the next
        staged = adapter.staged
        placed = {name: self._linear_bank(name) for name in staged.modules} if staged is not None else {}
        for name in sorted(before | own):  # in the same order on all ranks, which may add up norms
            if name not in placed:
                self._banks[name].load(slot, adapter.parts.get(name, []))
        if staged is not None:
            assert self._stage is not None, "see stage_loads"
            staged.load(slot, placed, self._stage)
            for name, bank in placed.items():
                bank.load(slot, adapter.parts[name], is_placed=True)
        self._by_slot[slot] = own

    def _linear_bank(self, name: str) -> LinearBank:
        bank = self._banks[name]
        assert isinstance(bank, LinearBank)
        return bank

    def has_extras(self, slot: int) -> bool:
        """Whether the adapter in a slot changes more than captured steps compute."""
        return any(self._banks[name].has_extras(slot) for name in self._by_slot.get(slot, ()))
