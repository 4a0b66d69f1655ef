"""`StackBank`: what adapters on the device add to a stack of experts' matrices. r rank, O outputs, I inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from headrace.layers.lora.bank import AdapterBank
from headrace.layers.lora.contract import AdaptedPart
from headrace.layers.lora.parts import PreparedPart, check_range, refuse
from headrace.parallel.share import Share


class StackBank(AdapterBank):
    """Additions by slot and expert, which `headrace.layers.moe` computes for the tokens of such adapters apart.
    ``shares`` and ``columns``: this rank's outputs by part, and inputs; ``experts``: those that are here."""

    kind = "experts"

    def __init__(self, shares: Mapping[str, Share], columns: Share, experts: Share, device: torch.device):
        super().__init__()
        self._shares, self._columns, self._experts, self._device = dict(shares), columns, experts, device
        self._additions: dict[int, dict[int, list[PreparedPart]]] = {}
        self.num_experts = experts.size

    def sizes(self, part: str) -> tuple[int, int]:
        """See `AdapterBank`; of one expert."""
        shares = self._shares.values() if part == "" else [self._shares[part]]
        return self._columns.size, sum(share.size for share in shares)

    def has_extras(self, slot: int) -> bool:
        """See `AdapterBank`."""
        return slot in self._additions

    def additions(self, slot: int, expert: int) -> list[PreparedPart]:
        """Those of the adapter in a slot to one expert."""
        return self._additions.get(slot, {}).get(expert, [])

    def prepare(self, part: AdaptedPart, *, is_staged: bool = False) -> list[PreparedPart]:
        """See `AdapterBank`; ``index`` is the expert's number, ``start`` the first row in its matrix here."""
        if not self._experts.is_whole:
            raise refuse(part.module, "parts of experts", "leave out enable_expert_parallel")
        if part.a is None or part.b is None or not part.is_low_rank:
            raise refuse(part.module, "more than low-rank additions to experts", "train them without use_dora and bias")
        prepared, full, begin = [], 0, 0
        for name, share in self._shares.items():
            if part.part in ("", name):
                rows = slice(full + share.start, full + share.stop)
                a = part.a[:, self._columns.start : self._columns.stop].float().contiguous()
                b = (part.b[rows].float() * part.scale).t().contiguous()
                check_range(part, "b", b)
                prepared.append(PreparedPart(part.expert, begin, a, b))
            full += share.size if part.part == "" else 0
            begin += share.length
        return prepared

    def load(self, slot: int, parts: Sequence[PreparedPart]) -> None:
        """See `AdapterBank`."""
        self._additions.pop(slot, None)
        for part in parts:
            assert part.a is not None and part.b is not None
            own = self._additions.setdefault(slot, {}).setdefault(part.index, [])
            own.append(PreparedPart(part.index, part.start, part.a.to(self._device), part.b.to(self._device)))
