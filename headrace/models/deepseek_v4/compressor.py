"""`Compressor`: one vector for each window of tokens, a weighted sum per channel. Math in float32.

With overlapping windows a token has two series of E dims: the first is for the window after its own, the second for its
own. T tokens, C finished windows, n tokens that make an entry, r tokens of a window, W dims a token has in all series.
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
    """Writes the entries that a step finishes to ``entries``, and to ``state`` the tokens that later steps need."""

    def __init__(self, hidden_size: int, dim: int, ratio: int, *, norm_eps: float, rotary: RotaryTable, build: Build):
        super().__init__()
        build, self.is_overlapping = build.in_float32(), ratio == OVERLAPPING
        wide = 2 * dim if self.is_overlapping else dim
        self.ratio, self.dim, self.rotary = ratio, dim, rotary
        self.project = Linear(build, hidden_size, {"values": wide, "gates": wide})
        self.ape = build.parameter(ratio, wide)
        self.norm = RmsNorm(build, dim, norm_eps)
        self.entries, self.state = Place(), Place()

    def forward(self, x: torch.Tensor, batch: ForwardBatch, basis: torch.Tensor | None = None) -> None:
        """``x`` [T, D]. ``basis`` [E, E], if given, is multiplied with entries before they are written."""
        state: StateBackend = self.state.backend(batch)
        values, gates = self.project(x.float()).chunk(2, dim=-1)
        entries = self._pool(values, gates, state) if len(state.starts) else None
        for stored, new in ((self.state.pages.k, values), (self.state.pages.v, gates)):
            stored.flatten(0, 1).index_copy_(0, state.left_slots, new.index_select(0, state.left))
        if entries is None:
            return
        cos_sin = self.rotary.cos_sin.index_select(0, state.starts)
        entries = rotate_last(self.norm(entries).unsqueeze(1), cos_sin).squeeze(1)
        backend: EntriesBackend = self.entries.backend(batch)
        self.entries.slots.write(backend.write_slots, entries if basis is None else entries @ basis)

    def _pool(self, values: torch.Tensor, gates: torch.Tensor, state: StateBackend) -> torch.Tensor:
        """[T, W] twice to entries [C, E]."""
        values = self._take(values, self.state.pages.k, state, 0.0)
        gates = self._take(gates, self.state.pages.v, state, float("-inf"))
        gates = gates + self.ape.repeat(gates.shape[1] // self.ratio, 1)
        if self.is_overlapping:
            values, gates = (
                torch.cat((t[:, : self.ratio, : self.dim], t[:, self.ratio :, self.dim :]), dim=1)
                for t in (values, gates)
            )
        return (values * gates.softmax(dim=1)).sum(dim=1)

    def _take(self, new: torch.Tensor, stored: torch.Tensor, state: StateBackend, nothing: float) -> torch.Tensor:
        """[C, n, W] out of this step's tokens [T, W], rows kept from before, and rows of ``nothing``."""
        kept = stored.flatten(0, 1).index_select(0, state.kept)
        return torch.cat((new, kept, new.new_full((1, new.shape[1]), nothing)))[state.sources]


def rotate_last(x: torch.Tensor, cos_sin: torch.Tensor, *, backwards: bool = False) -> torch.Tensor:
    """The last R dims of ``x`` [T, H, E] by ``cos_sin`` [T, R] (first half cosines, second half sines), neighbours in
    pairs; a new tensor in x's dtype."""
    rotary_dim = cos_sin.shape[-1]
    if backwards:
        cos_sin = torch.cat((cos_sin[:, : rotary_dim // 2], -cos_sin[:, rotary_dim // 2 :]), dim=-1)
    rotated = rotate(x[..., -rotary_dim:], cos_sin, rotary_dim, True).to(x.dtype)
    return torch.cat((x[..., :-rotary_dim], rotated), dim=-1)
