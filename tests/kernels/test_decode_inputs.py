"""What decodes read: the reference against plain indexing, the Triton kernel against the reference."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.rowwise import DecodeInputs
from headrace.kernels.rowwise.reference import decode_inputs as reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def case(groups: int, size: int, page_size: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    num_rows, entries = size + 3, 700
    tables = torch.randint(0, 9000, (groups, num_rows, entries), generator=generator, dtype=torch.int32)
    last_token = torch.randint(0, 2**31, (num_rows,), generator=generator)
    lens = torch.randint(1, entries * page_size + 1, (size,), generator=generator)
    rows = torch.randperm(num_rows, generator=generator)[:size]
    return tuple(t.to(DEVICE) for t in (torch.stack((rows, lens)), last_token, tables))


@pytest.mark.parametrize(("groups", "size", "page_size"), [(1, 1, 16), (2, 5, 64), (1, 9, 4)])
def test_reference_indexes_the_tables(groups: int, size: int, page_size: int):
    requests, last_token, tables = case(groups, size, page_size, 0)
    out = DecodeInputs.allocate(size, tables)
    reference(requests, last_token, tables, page_size, out)
    for i, (row, length) in enumerate(requests.T.tolist()):
        assert out.token_ids[i] == last_token[row] and out.positions[i] == length - 1 and out.kv_lens[i] == length
        for g in range(groups):
            assert (
                out.slots[g, i] == int(tables[g, row, (length - 1) // page_size]) * page_size + (length - 1) % page_size
            )
            assert torch.equal(out.page_tables[g, i], tables[g, row])


@pytest.mark.parametrize(("groups", "size", "page_size"), [(1, 1, 16), (2, 5, 64), (1, 9, 4)])
def test_triton_agrees_where_it_must(groups: int, size: int, page_size: int):
    pytest.importorskip("triton")
    from headrace.kernels.rowwise.triton import decode_inputs

    requests, last_token, tables = case(groups, size, page_size, 1)
    out, expected = (DecodeInputs.allocate(size, tables) for _ in range(2))
    decode_inputs(requests, last_token, tables, page_size, out)
    reference(requests, last_token, tables, page_size, expected)
    for name in ("token_ids", "positions", "kv_lens", "slots"):
        assert torch.equal(getattr(out, name), getattr(expected, name)), name
    for i, length in enumerate(requests[1].tolist()):
        used = -(-length // page_size)
        assert torch.equal(out.page_tables[:, i, :used], expected.page_tables[:, i, :used])
        assert not out.page_tables[:, i, used:].any()
