"""`DraftModel`: the contract between a drafter that computes on the device and what runs it.

Speculation: a drafter proposes the next tokens of a row, the target model verifies them in one step. Proposals may be
wrong, so nothing here decides what a request's output is. T tokens, D hidden size of the drafter, F size of the
target's features, n rows.

How it is run, for a row whose target step computed positions [b, e) and then sampled the token of position e:

1. ``forward`` over as many tokens, in the step's order: the token *after* each position (``token_ids[t]`` of position
   p is the row's token p + 1, the last one is the token just sampled, or the prompt's next for a chunk that does not
   reach its end), with ``combine(features)``, the target's features of position p. It writes the drafter's own cache.
2. ``compute_ids`` of the hidden state of position e - 1 is the first draft, the token of position e + 1.
3. Each further draft is a decode: ``forward`` with the latest draft as token, at the next position, and ``recycle`` of
   the latest hidden state in place of features; then ``compute_ids``.

After a step that verified drafts, entries of wrong drafts are left out of 1, or computed and overwritten: what a later
call writes at a position replaces what was there. The cache must have every position before those of a call, so a row
that was not run for a step must be run from its first missing position on.

Positions: a token that follows target position p is computed at position p + ``position_shift`` of the row: its slot,
rotary position and KV length are those of that position. 0 for heads, which read feature p; 1 for a model of its own,
whose token p + 1 belongs to position p + 1. The latter may as well be run over the step's own tokens, at their
positions, with the token just sampled as the first of the chain; or, if over the tokens after them, with one entry more
for a row that starts at 0: its first token.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch

from headrace.base.cache import CacheSpec
from headrace.layers.attention.contract import KvPages
from headrace.layers.batch import FeatureSpec, ForwardBatch
from headrace.layers.narrowing import Narrowing
from headrace.layers.quantization.storage import StorableModel


class DraftModel(StorableModel):
    """Base class of drafters that compute on the device.

    ``features``: what `combine` takes, to be asked of the target with `headrace.layers.batch.Features`; F is its
    ``count`` times the target's hidden size, and 0 for a drafter that reads none. ``input_size``: last dim of what
    `combine` returns and `forward` takes; 0 without features. ``cache_specs``: one per own layer, as a family's;
    in a layout they are numbered after the target's. ``position_shift``: see above. ``is_capturable``: `forward`,
    `compute_ids`, `combine` and `recycle` may be recorded in CUDA graphs. ``num_tokens``: drafts per step that the
    checkpoint recommends, and ``max_model_len``: tokens of context that it was made for; None where it does not say.

    Calls `bind_cache` and `load_weights` are as `headrace.layers.model.ServedModel` has them.
    """

    position_shift: ClassVar[int] = 0
    is_capturable: bool = True

    def __init__(self, features: FeatureSpec, input_size: int, cache_specs: list[CacheSpec | None]):
        super().__init__()
        self.features, self.input_size, self.cache_specs = features, input_size, cache_specs
        self.num_tokens: int | None = None
        self.max_model_len: int | None = None

    @property
    def num_layers(self) -> int:
        """Layers of its own, also those without a cache."""
        return len(self.cache_specs)

    @property
    def prunes_last_layer(self) -> bool:
        """Whether `forward` obeys ``ForwardBatch.wanted``: then it returns the hidden states [S, D] of these alone."""
        return False

    def wants(self, name: str) -> bool:
        """As `headrace.layers.model.ServedModel.wants`, of the tensors that are the drafter's."""
        return True

    def find_narrowing(self) -> Narrowing | None:
        """As `headrace.layers.model.ServedModel.find_narrowing`."""
        return None

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill every parameter; raises `WeightError`. Embedding and head that the checkpoint lacks are the target's."""
        raise NotImplementedError

    def bind_cache(self, pages: list[KvPages | None], group_of_layer: list[int | None]) -> None:
        """Attach the pages and cache groups of its own layers; may be called again with other pages."""
        raise NotImplementedError

    def combine(self, features: torch.Tensor) -> torch.Tensor:
        """The target's features [T, F] to inputs of `forward` [T, input_size]. May return its argument."""
        return features

    def forward(self, batch: ForwardBatch, inputs: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, D] of T tokens, shifted by one as above. ``inputs`` [T, input_size] are combined features
        or recycled states, and may be overwritten."""
        raise NotImplementedError

    def compute_ids(self, hidden: torch.Tensor) -> torch.Tensor:
        """The most likely next tokens of hidden states [n, D], as ids [n] int64 of the target's vocabulary."""
        raise NotImplementedError

    def recycle(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, D] to inputs [n, input_size] of the next step of a chain. May return its argument."""
        return hidden
