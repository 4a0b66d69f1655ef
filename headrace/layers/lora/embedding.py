"""`EmbeddingBank`: what adapters on the device change in the lookup of tokens. T tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.kernels.lora import SlotRows
from headrace.layers.lora.bank import AdapterBank
from headrace.layers.lora.contract import AdaptedPart
from headrace.layers.lora.parts import PreparedPart, check_range, refuse


@dataclass(slots=True)
class _Lookup:
    """One adapter's: ``a`` [V, r], ``b`` [r, D]; ``weight`` [V, D]; rows [n, D] of single tokens, by sorted id [n]."""

    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    token_ids: torch.Tensor | None = None
    token_rows: torch.Tensor | None = None


class EmbeddingBank(AdapterBank):
    """Every rank has all of it, and applies it to the summed lookup. Computed an adapter at a time: only steps with
    adapters that change the embedding pay for it. ``find_rows``: which rows of a lookup of these ids have which
    adapter; None for lookups that are not the step's, as a drafter makes them."""

    kind = "embedding"

    def __init__(
        self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device,
        find_rows: Callable[[torch.Tensor], SlotRows | None]
    ):
        super().__init__()
        self._shape, self._dtype, self._device, self._find_rows = shape, dtype, device, find_rows
        self._lookups: dict[int, _Lookup] = {}

    def sizes(self, part: str) -> tuple[int, int]:
        """See `AdapterBank`: V and D."""
        return self._shape

    def has_extras(self, slot: int) -> bool:
        """See `AdapterBank`."""
        return slot in self._lookups

    def prepare(self, part: AdaptedPart, *, is_staged: bool = False) -> list[PreparedPart]:
        """See `AdapterBank`."""
        if part.magnitude is not None:
            raise refuse(part.module, "a DoRA magnitude", "train the embedding without use_dora")
        found = PreparedPart(0, 0)
        if part.a is not None and part.b is not None:
            found.a = part.a.t().to(self._dtype).contiguous()
            found.b = (part.b.float() * part.scale).t().to(self._dtype).contiguous()
        found.weight = None if part.weight is None else part.weight.to(self._dtype)
        if part.token_ids is not None and part.token_rows is not None:
            order = part.token_ids.argsort()
            found.token_ids, found.token_rows = part.token_ids[order], part.token_rows[order].to(self._dtype)
        for name in ("a", "b", "weight", "token_rows"):
            check_range(part, name, getattr(found, name))
        return [found]

    def load(self, slot: int, parts: Sequence[PreparedPart]) -> None:
        """See `AdapterBank`."""
        self._lookups.pop(slot, None)
        if not parts:
            return

        def find(tensors: list[torch.Tensor | None]) -> torch.Tensor | None:
            found = next((tensor for tensor in tensors if tensor is not None), None)
            return None if found is None else found.to(self._device)

        self._lookups[slot] = _Lookup(
            find([part.a for part in parts]), find([part.b for part in parts]), find([part.weight for part in parts]),
            find([part.token_ids for part in parts]), find([part.token_rows for part in parts]),
        )

    def adapt(self, token_ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, D], the rows of ``token_ids`` [T] without the embedding's scale, changed in place."""
        rows = self._find_rows(token_ids) if self._lookups else None
        if rows is None:
            return x
        for slot, first, count in rows.segments:
            if (lookup := self._lookups.get(slot)) is not None:
                own = rows.order[first : first + count]
                x.index_copy_(0, own, _look_up(lookup, token_ids.index_select(0, own), x.index_select(0, own)))
        return x


def _look_up(lookup: _Lookup, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``x`` [n, D], the base's rows of ``ids`` [n], as the adapter has them."""
    if lookup.weight is not None:
        x = F.embedding(ids, lookup.weight)
    if lookup.a is not None and lookup.b is not None:
        x = x + (F.embedding(ids, lookup.a).float() @ lookup.b.float()).to(x.dtype)
    if lookup.token_ids is not None and lookup.token_rows is not None:
        place = torch.searchsorted(lookup.token_ids, ids).clamp_(max=len(lookup.token_ids) - 1)
        is_own = (lookup.token_ids[place] == ids).unsqueeze(-1)
        x = torch.where(is_own, lookup.token_rows[place], x)
    return x
