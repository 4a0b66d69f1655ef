"""What a step of decodes reads, from its rows and lengths: tokens, positions, slots and page tables."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.kernels.operation import Operation, requires


@dataclass(slots=True)
class DecodeInputs:
    """Of B decodes in G cache groups: ``token_ids`` and ``positions`` [B] int64, ``kv_lens`` [B] int32, ``slots`` [G,
    B] int64, ``page_tables`` [G, B, entries] int32. Allocated once; table entries beyond a row's length are left as
    they were."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    kv_lens: torch.Tensor
    slots: torch.Tensor
    page_tables: torch.Tensor

    @classmethod
    def allocate(cls, size: int, tables: torch.Tensor) -> DecodeInputs:
        """Zeros, so that an entry never written is the null page. ``tables`` [G, rows, entries] int32."""
        groups, _, entries = tables.shape
        token_ids, positions = torch.zeros((2, size), dtype=torch.int64, device=tables.device)
        kv_lens = torch.zeros(size, dtype=torch.int32, device=tables.device)
        slots = torch.zeros((groups, size), dtype=torch.int64, device=tables.device)
        return cls(
            token_ids, positions, kv_lens, slots,
            torch.zeros((groups, size, entries), dtype=torch.int32, device=tables.device)
        )


DECODE_INPUTS = Operation("decode_inputs kernel")
"""``decode_inputs(requests [2, B] int64, last_token [rows] int64, tables [G, rows, entries] int32, page_size, out:
DecodeInputs)``

``requests`` holds rows and, below, lengths after the step (at least 1): the token of row r goes to position length - 1.
Fills ``out``; no host work beyond the launch, so that it may be captured.
"""

DECODE_INPUTS.add("reference", "headrace.kernels.decode_inputs.reference:decode_inputs", doc="plain torch")
DECODE_INPUTS.add(
    "triton", "headrace.kernels.decode_inputs.triton:decode_inputs", supports=requires(device="cuda"), priority=10,
    doc="one launch"
)
