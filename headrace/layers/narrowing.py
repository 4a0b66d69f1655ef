"""`Narrowing`: cuts checkpoint tensors to what a rank needs of them before they are read and copied to its device.

Cuts what reaches its parameter as it is; tensors that quantization schemes decode pass whole, and the loader cuts what
they become.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import torch

from headrace.layers.quantization.blocks import QuantisedTensor
from headrace.parallel.cut import Cut

Named = tuple[str, torch.Tensor]


class Narrowing:
    """``cuts`` and ``elsewhere``: see `headrace.layers.loading.Targets`, whose parameters are not held here.
    ``rename``: from the checkpoint's names to those there."""

    def __init__(self, cuts: Mapping[str, Cut], elsewhere: Collection[str], rename: Callable[[str], str]):
        self._cuts, self._elsewhere, self._rename = cuts, elsewhere, rename

    def find_cut(self, name: str) -> Cut | None:
        """What is needed of the tensor of that name; None for all of it, or where it makes several weights."""
        return self._cuts.get(self._rename(name))

    def keep(self, tensors: Iterable[Named]) -> Iterator[Named]:
        """What is needed of each tensor, under names that the loader knows: views of the tensors, or copies of the
        parts where several make one."""
        for name, tensor in tensors:
            if isinstance(tensor, QuantisedTensor):  # is cut without being read
                yield name, tensor
                continue
            for own, part in self._split(name, tensor):
                target = self._rename(own)
                if not part.is_floating_point() or part.dtype.itemsize == 1:  # codes
                    yield own, part
                elif target not in self._elsewhere:
                    cut = self._cuts.get(target)
                    fits = cut is not None and tuple(part.shape) == cut.full_shape  # else the loader complains
                    yield own, cut.keep(part) if cut is not None and fits else part

    def _split(self, name: str, tensor: torch.Tensor) -> Iterable[Named]:
        """The tensors that are stacked in one."""
        return ((name, tensor),)
