"""Plain torch: the oracle and the fallback."""

from __future__ import annotations

import torch

from headrace.kernels.decode_inputs import DecodeInputs


def decode_inputs(
    requests: torch.Tensor, last_token: torch.Tensor, tables: torch.Tensor, page_size: int, out: DecodeInputs
) -> None:
    """See `headrace.kernels.decode_inputs.DECODE_INPUTS`; copies the page tables whole."""
    rows, lens = requests.unbind()
    torch.index_select(last_token, 0, rows, out=out.token_ids)
    torch.sub(lens, 1, out=out.positions)
    out.kv_lens.copy_(lens)
    torch.index_select(tables, 1, rows, out=out.page_tables)
    pages = out.page_tables.gather(2, (out.positions // page_size).expand(len(tables), -1).unsqueeze(2)).squeeze(2)
    torch.add(pages.long() * page_size, out.positions % page_size, out=out.slots)
