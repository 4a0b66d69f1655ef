"""`ExpertNarrowing`: a `Narrowing` for checkpoints whose experts may be stacked, also in MXFP4.

X experts, O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import torch

from headrace.kernels.block_scaled import MXFP4_BLOCK
from headrace.layers.moe.checkpoint import STACKED_EXPERTS, Named, find_codes, unstack_experts
from headrace.layers.narrowing import Narrowing
from headrace.parallel.cut import Cut


class ExpertNarrowing(Narrowing):
    """Experts that are stacked come one by one, and those of other ranks not at all. ``stacked_experts``: see
    `STACKED_EXPERTS`."""

    def __init__(
        self, cuts: Mapping[str, Cut], elsewhere: Collection[str], rename: Callable[[str], str], *,
        stacked_experts: str, hidden_size: int
    ):
        super().__init__(cuts, elsewhere, rename)
        self._stacked, self._hidden_size = stacked_experts, hidden_size

    def _split(self, name: str, tensor: torch.Tensor) -> Iterable[Named]:
        """See `Narrowing`."""
        codes = find_codes(name, self._stacked)
        if codes is not None and tensor.dim() > 2 and tensor.shape[1] % 2 == 0:  # else the loader complains
            return self._keep_codes(tensor, *codes)
        is_plain = tensor.is_floating_point() and tensor.dtype.itemsize > 1
        if not is_plain:
            return ((name, tensor),)
        return unstack_experts([(name, tensor)], self._stacked, self._hidden_size)

    def _keep_codes(self, tensor: torch.Tensor, prefix: str, last: str, kind: str) -> Iterator[Named]:
        """Of MXFP4 blocks [X, O, I / 32, 16] or scales [X, O, I / 32]."""
        split = STACKED_EXPERTS[self._stacked][last]
        # rows as they lie in the file, sent through the split as a plain tensor [1, I, O] of a single input
        rows = {matrix: ids.flatten() for matrix, ids in split(torch.arange(tensor.shape[1])[None, None]).items()}
        for expert, own in enumerate(tensor):
            targets = {matrix: self._rename(f"{prefix}.experts.{expert}.{matrix}") for matrix in rows}
            if all(target in self._elsewhere for target in targets.values()):
                continue
            cuts = {matrix: self._cuts.get(target) for matrix, target in targets.items()}
            yield f"{prefix}.experts.{expert}.{last}_{kind}", _cut_codes(own, rows, cuts)


def _cut_codes(own: torch.Tensor, rows: dict[str, torch.Tensor], cuts: dict[str, Cut | None]) -> torch.Tensor:
    """Of one expert's [O, I / 32, ...] the rows and blocks that its matrices take; all, where a matrix takes all, or a
    cut goes through blocks."""
    parts = [cut.dims for cut in cuts.values() if cut is not None]
    if len(parts) < len(cuts) or any(len(dim) != 1 for dims in parts for dim in dims):
        return own
    inputs = {dims[1][0] for dims in parts}
    fits = all(len(ids) == dims[0][0].size for ids, dims in zip(rows.values(), parts, strict=True))
    if not fits or len(inputs) != 1 or any(at % MXFP4_BLOCK for share in inputs for at in (share.start, share.stop)):
        return own
    (share,) = inputs
    taken = torch.cat([
        ids[dims[0][0].start : dims[0][0].stop] for ids, dims in zip(rows.values(), parts, strict=True)
    ]).sort().values
    first, last = int(taken[0]), int(taken[-1]) + 1
    own = own[first:last] if last - first == len(taken) else own[taken]
    return own[:, share.start // MXFP4_BLOCK : share.stop // MXFP4_BLOCK]
