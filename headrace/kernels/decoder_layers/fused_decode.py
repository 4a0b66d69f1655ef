"""`FusedDecode`: a step of decodes alone in one call, from the tokens drawn last to the likeliest ones now.

The order of what is told to the C++ kernel is that of `Ends` in csrc/cpu/bind_decodes.h.
"""

from __future__ import annotations

import torch

from headrace.kernels.decoder_layers.parts import EndParts, Product
from headrace.kernels.decoder_layers.table import TYPES, LayerTable
from headrace.kernels.native import NATIVE


class FusedDecode:
    """Layers, and what is before and after them; as for these, tensors that move afterwards are read where they
    were."""

    def __init__(self, layers: LayerTable, ends: EndParts):
        self._layers, self._norm, self._vocab_size = layers, ends.norm, ends.head.out_width
        assert ends.norm.is_contiguous()
        products = [number for matrix in (ends.embedding, ends.head) for number in layers.describe(Product(matrix))]
        self._ends = torch.tensor([*products, ends.norm.data_ptr(), TYPES[ends.norm.dtype], TYPES[ends.dtype]])
        self._reals = torch.tensor((ends.embedding_scale, ends.eps, ends.offset), dtype=torch.float64)

    def run(
        self, requests: torch.Tensor, last_token: torch.Tensor, page_tables: torch.Tensor, *, is_greedy: bool,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """``requests`` [2, R] int64 are rows and their lengths after the step, ``last_token`` [rows] int64 what they
        drew last, ``page_tables`` [groups, rows, entries] int32. Returns logits [R, V] float32 and ``drawn`` [2, R],
        which are as `headrace.kernels.sample.KEEP_BEST` has them. Where nothing but these is wanted, logits are not
        written: None; else nothing is drawn."""
        ops, count = NATIVE.find(), requests.shape[1]
        assert ops is not None, "there are no layers together without it"
        drawn = torch.empty((2, count), dtype=torch.int64)
        logits = None if is_greedy else torch.empty((count, self._vocab_size), dtype=torch.float32)
        ops.decode_step(
            *self._layers.numbers, self._ends, self._reals, requests, last_token, page_tables, drawn, logits
        )
        return logits, drawn
