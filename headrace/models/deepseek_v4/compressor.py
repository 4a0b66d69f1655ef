"""`Compressor`: pools each window of r tokens into one cache entry, a softmax-weighted sum per channel, in float32.

With overlapping windows (r = 4) an entry is pooled from n = 2r tokens, its own window and the one before. Each token
then has W = 2E dims: the first E are its part in the entry of the next window, the last E in that of its own window.
Otherwise n = r and W = E. T tokens, C windows that end in this step, E dims of an entry.
"""

from __future__ import annotations

import torch
from torch import nn

from headrace.kernels.rowwise.reference import rotate
from headrace.layers.batch import ForwardBatch
from headrace.layers.build import Build
from headrace.layers.linear import Linear
from headrace.layers.norm import RmsNorm
from headrace.layers.rotary import RotaryTable
from headrace.models.deepseek_v4.backends import EntriesBackend, StateBackend
from headrace.models.deepseek_v4.layout import OVERLAPPING
from headrace.models.deepseek_v4.places import Place


class Compressor(nn.Module):
    """Writes finished entries to the pages of ``entries``, and to the pages of ``state`` the projections of tokens that
    a later step's window still needs."""

    def __init__(self, hidden_size: int, dim: int, ratio: int, *, norm_eps: float, rotary: RotaryTable, build: Build):
        super().__init__()
        build, self.is_overlapping = build.in_float32(), ratio == OVERLAPPING
        wide = 2 * dim if self.is_overlapping else dim
        self.ratio, self.dim, self.rotary = ratio, dim, rotary
        self.project = Linear(build, hidden_size, {"values": wide, "gates": wide})  # [T, D] to [T, 2W]
        self.ape = build.parameter(ratio, wide)  # added to gate logits by a token's place in its window
        self.norm = RmsNorm(build, dim, norm_eps)
        self.entries, self.state = Place(), Place()

    def forward(self, x: torch.Tensor, batch: ForwardBatch, basis: torch.Tensor | None = None) -> None:
        """``x`` [T, D] is the layer's normalised input. Entries are multiplied by ``basis`` [E, E], if given, before
        they are written."""
        state: StateBackend = self.state.backend(batch)
        values, gates = self.project(x.float()).chunk(2, dim=-1)  # [T, W] each
        # Pool before the new rows are stored: they may overwrite ring rows that the first window of this step reads.
        entries = self._pool(values, gates, state) if len(state.starts) else None
        for stored, new in ((self.state.pages.k, values), (self.state.pages.v, gates)):
            stored.flatten(0, 1).index_copy_(0, state.left_slots, new.index_select(0, state.left))
        if entries is None:
            return
        cos_sin = self.rotary.cos_sin.index_select(0, state.starts)  # an entry's position is its window's first
        entries = rotate_last(self.norm(entries).unsqueeze(1), cos_sin).squeeze(1)
        backend: EntriesBackend = self.entries.backend(batch)
        self.entries.slots.write(backend.write_slots, entries if basis is None else entries @ basis)

    def _pool(self, values: torch.Tensor, gates: torch.Tensor, state: StateBackend) -> torch.Tensor:
        """Values and gate logits [T, W] to entries [C, E]."""
        values = self._take(values, self.state.pages.k, state, 0.0)
        gates = self._take(gates, self.state.pages.v, state, float("-inf"))  # padding gets softmax weight 0
        gates = gates + self.ape.repeat(gates.shape[1] // self.ratio, 1)
        if self.is_overlapping:
            # [C, 2r, 2E] to [C, 2r, E]: first dims of the window before, last dims of the own window
            values, gates = (
                torch.cat((t[:, : self.ratio, : self.dim], t[:, self.ratio :, self.dim :]), dim=1)
                for t in (values, gates)
            )
        return (values * gates.softmax(dim=1)).sum(dim=1)

    def _take(self, new: torch.Tensor, stored: torch.Tensor, state: StateBackend, nothing: float) -> torch.Tensor:
        """The rows of each window, [C, n, W]: from this step's tokens ``new`` [T, W], from the state pages ``stored``
        [P, rows, W], and a padding row filled with ``nothing``. See `StateBackend.sources`."""
        kept = stored.flatten(0, 1).index_select(0, state.kept)
        return torch.cat((new, kept, new.new_full((1, new.shape[1]), nothing)))[state.sources]


def rotate_last(x: torch.Tensor, cos_sin: torch.Tensor, *, backwards: bool = False) -> torch.Tensor:
    """Rotate the last R dims of ``x`` [T, H, E] by ``cos_sin`` [T, R] (first half cosines, second half sines), adjacent
    dims forming pairs; ``backwards`` negates the angles. Returns a new tensor in x's dtype."""
    rotary_dim = cos_sin.shape[-1]
    if backwards:
        cos_sin = torch.cat((cos_sin[:, : rotary_dim // 2], -cos_sin[:, rotary_dim // 2 :]), dim=-1)
    rotated = rotate(x[..., -rotary_dim:], cos_sin, rotary_dim, True).to(x.dtype)
    return torch.cat((x[..., :-rotary_dim], rotated), dim=-1)
