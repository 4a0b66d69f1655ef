"""One launch for all that a step of decodes reads: a program per request and cache group."""

import torch
import triton
import triton.language as tl

from headrace.kernels.decode_inputs import DecodeInputs

BLOCK = 512


@triton.jit(do_not_specialize=["num_rows", "entries"])
def _decode_inputs_kernel(
    requests_ptr, last_token_ptr, tables_ptr, token_ids_ptr, positions_ptr, kv_lens_ptr, slots_ptr, page_tables_ptr,
    num_rows, entries,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):
    request, group, size = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    row = tl.load(requests_ptr + request)
    length = tl.load(requests_ptr + size + request)
    position = length - 1
    table = tables_ptr + (group.to(tl.int64) * num_rows + row) * entries
    page = tl.load(table + position // PAGE).to(tl.int64)
    tl.store(slots_ptr + group * size + request, page * PAGE + position % PAGE)
    if group == 0:
        tl.store(token_ids_ptr + request, tl.load(last_token_ptr + row))
        tl.store(positions_ptr + request, position)
        tl.store(kv_lens_ptr + request, length.to(tl.int32))
    target = page_tables_ptr + (group.to(tl.int64) * size + request) * entries
    used = (length + PAGE - 1) // PAGE
    for at in range(0, used, BLOCK):
        entry = at + tl.arange(0, BLOCK)
        tl.store(target + entry, tl.load(table + entry, mask=entry < used, other=0), mask=entry < used)


def decode_inputs(
    requests: torch.Tensor, last_token: torch.Tensor, tables: torch.Tensor, page_size: int, out: DecodeInputs
) -> None:
    """See `headrace.kernels.decode_inputs.DECODE_INPUTS`."""
    groups, num_rows, entries = tables.shape
    _decode_inputs_kernel[(requests.shape[1], groups)](
        requests, last_token, tables, out.token_ids, out.positions, out.kv_lens, out.slots, out.page_tables, num_rows,
        entries,
        PAGE=page_size, BLOCK=BLOCK,
    )
