"""Compression of windows into entries, in Triton against plain torch, which the model's tests hold to transformers."""

from __future__ import annotations

import pytest
import torch
from devices import relative_error
from test_latents import copy, make_norm, make_slots, packing_error

from headrace.kernels.compressor import EntryPages, Pool, Pooling, RowNorm, StatePages, Windows, reference
from headrace.kernels.latents import LatentNorm, LatentRows
from headrace.kernels.latents.slots import Slots

RUNS = [pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=pytest.mark.cuda)]
ROWS = {4: 16, 128: 256}
"""Rows of a state page of 256 tokens."""


def make_step(device: str, ratio: int, width: int) -> tuple[torch.Tensor, Windows, StatePages]:
    """Three requests: a chunk over several windows that begins within one, a decode that ends a window, a decode that
    does not. State is NaN where no token before the step was stored."""
    generator = torch.Generator().manual_seed(ratio)
    begins, ends = [ratio + 3, 2 * ratio - 1, ratio + 1], [3 * ratio + 5, 2 * ratio, ratio + 2]
    lengths = [end - begin for begin, end in zip(begins, ends, strict=True)]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    table = (torch.randperm(12, generator=generator)[:9] + 1).view(3, 3).int()
    state = [torch.full((14, ROWS[ratio], width), float("nan")) for _ in range(2)]
    ring = 8 if ratio == 4 else 128
    for request, begin in enumerate(begins):
        for position in range(max(0, begin - 8 if ratio == 4 else 0), begin):
            number = position // 128 * ring + position % ring
            page = int(table[request, number // ROWS[ratio]])
            for part in state:
                part[page, number % ROWS[ratio]] = torch.randn(width, generator=generator)
    requests, numbers = [], []
    for request, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        own = [*range(begin // ratio, end // ratio), -1]  # and one that is none
        numbers += own
        requests += [request] * len(own)
    windows = Windows(
        torch.tensor(requests, device=device), torch.tensor(numbers, device=device), starts.to(device),
        torch.tensor(ends, dtype=torch.int32, device=device),
    )
    projected = torch.randn(sum(lengths), 2 * width, generator=generator).to(device)
    return projected, windows, StatePages(state[0].to(device), state[1].to(device), table.to(device), 128, ring)


@pytest.mark.parametrize("device", RUNS)
@pytest.mark.parametrize(("kind", "head_dim", "rotary_dim"), [
    ("plain", 64, 16), ("vectors", 128, 64), ("vectors", 512, 64), ("keys", 128, 64), ("keys", 64, 32),
    ("narrow keys", 128, 64), ("narrow keys", 64, 32),
])
@pytest.mark.parametrize("ratio", [4, 128])
def test_triton_pools_what_plain_torch_pools(ratio: int, kind: str, head_dim: int, rotary_dim: int, device: str):
    pytest.importorskip("triton")
    from headrace.kernels.compressor.triton import compress

    width = 2 * head_dim if ratio == 4 else head_dim
    projected, windows, state = make_step(device, ratio, width)
    generator = torch.Generator().manual_seed(3)
    pooling = Pooling(ratio, torch.randn(ratio, width, generator=generator).to(device))
    norm = make_norm(head_dim, rotary_dim, device, torch.float32)
    ours = make_slots(kind, head_dim, device, pages=8)
    theirs = copy(ours)
    table = (torch.randperm(7, generator=generator)[:6] + 1).view(3, 2).int().to(device)
    before = projected.clone(), state.values.clone()
    compress(projected, windows, state, pooling, norm, EntryPages(ours, table))
    reference.compress(projected, windows, state, pooling, norm, EntryPages(theirs, table))
    written = [(r, n) for r, n in zip(windows.requests.tolist(), windows.numbers.tolist(), strict=True) if n >= 0]
    slots = torch.tensor([int(table[r, n // 8]) * 8 + n % 8 for r, n in written], device=device)
    one, other = ours.gather(slots, torch.float32), theirs.gather(slots, torch.float32)
    assert len(written) >= 3 and not other.isnan().any()
    assert relative_error(one, other) < (1e-5 if kind == "plain" else packing_error(device))
    everything = torch.arange(8, 64, device=device)  # but the null page
    rest = everything[~torch.isin(everything, slots)]
    assert torch.equal(ours.values[rest // 8, rest % 8], theirs.values[rest // 8, rest % 8])
    assert torch.equal(projected, before[0]) and torch.equal(state.values.nan_to_num(), before[1].nan_to_num())


def make_pool(
    device: str, ratio: int, kind: str, head_dim: int, table: torch.Tensor, norm: LatentNorm, begins: list[int]
) -> Pool:
    """Decodes at positions ``begins``, with random state in pages of their own, of which some end a window. Rows of
    projections are those of a wider tensor, and the last token's are not stored."""
    generator = torch.Generator().manual_seed(ratio + head_dim)
    width, count = 2 * head_dim if ratio == 4 else head_dim, len(begins)
    state_table = (torch.arange(3 * count).view(count, 3) + 1).int()
    ring, per_page = 8 if ratio == 4 else 128, ROWS[ratio]
    state = [torch.randn(3 * count + 1, per_page, width, generator=generator).to(device) for _ in range(2)]
    numbers = [begin // ratio if (begin + 1) % ratio == 0 else -1 for begin in begins]
    own = [begin // 128 * ring + begin % ring for begin in begins]
    rows = [int(state_table[i, at // per_page]) * per_page + at % per_page for i, at in enumerate(own)]
    rows[-1] = 3
    windows = Windows(
        torch.arange(count, device=device), torch.tensor(numbers, device=device),
        torch.arange(count + 1, dtype=torch.int32, device=device),
        torch.tensor(begins, dtype=torch.int32, device=device) + 1,
    )
    return Pool(
        torch.randn(count, 2 * width + 24, generator=generator).to(device)[:, 8 : 8 + 2 * width], windows,
        StatePages(*state, state_table.to(device), 128, ring), torch.tensor(rows, device=device),
        Pooling(ratio, torch.randn(ratio, width, generator=generator).to(device)), norm,
        EntryPages(make_slots(kind, head_dim, device, pages=73), table),
    )


@pytest.mark.parametrize("device", RUNS)
@pytest.mark.parametrize(("ratio", "kinds"), [(4, ("vectors", "keys")), (4, ("plain", "plain")), (128, ("vectors",))])
def test_a_decode_step_in_one_kernel(ratio: int, kinds: tuple[str, ...], device: str):
    """Latents, state and entries are those of plain torch, one after the other."""
    pytest.importorskip("triton")
    from headrace.kernels.compressor.fused import finish

    begins = [ratio - 1, 2 * ratio - 1, 2 * ratio, 383, 255, 130]
    table = (torch.arange(72).view(6, 12) + 1).int().to(device)
    norm = make_norm(128, 64, device, torch.float32)
    pools = [
        make_pool(device, ratio, kind, dim, table, make_norm(dim, 64, device, torch.float32)._replace(
            cos_sin=norm.cos_sin
        ), begins)
        for kind, dim in zip(kinds, (512, 128), strict=False)
    ]
    twins = [
        pool._replace(
            state=pool.state._replace(values=pool.state.values.clone(), gates=pool.state.gates.clone()),
            entries=EntryPages(copy(pool.entries.slots), table),
        )
        for pool in pools
    ]
    x = torch.randn(6, 96 + 128, generator=torch.Generator().manual_seed(0)).to(device)
    query = RowNorm(x[:, :96], torch.rand(96, device=device), 1e-6)
    slots, numbers = make_slots("vectors", 128, device), torch.arange(8, 14, device=device)
    latents = LatentRows(x[:, 96:], norm, torch.tensor(begins, device=device), slots, numbers)
    twin = latents._replace(slots=copy(slots))
    assert relative_error(finish(query, latents, tuple(pools)), reference.finish(query, twin, tuple(twins))) < 1e-5
    assert relative_error(*(part.slots.gather(numbers, torch.float32) for part in (latents, twin))) < (
        packing_error(device)
    )
    for pool, other in zip(pools, twins, strict=True):
        for one, two in ((pool.state.values, other.state.values), (pool.state.gates, other.state.gates)):
            assert torch.equal(one[1:], two[1:])  # but the null page
        ended = pool.windows.numbers >= 0
        requests, entry = pool.windows.requests[ended], pool.windows.numbers[ended]
        written = table[requests, entry // 8].long() * 8 + entry % 8
        ours, theirs = (part.entries.slots.gather(written, torch.float32) for part in (pool, other))
        assert len(written) >= 2 and relative_error(ours, theirs) < packing_error(device)
        rest = torch.ones(73 * 8, dtype=torch.bool, device=device)
        rest[:8], rest[written] = False, False
        everything = torch.arange(73 * 8, device=device)[rest]
        assert torch.equal(*(
            part.entries.slots.values[everything // 8, everything % 8] for part in (pool, other)
        )), "other slots stay as they are"


@pytest.mark.parametrize("device", RUNS)
@pytest.mark.parametrize("width", [32, 96, 2048])
def test_state_is_stored_where_it_is_needed(width: int, device: str):
    pytest.importorskip("triton")
    from headrace.kernels.compressor.triton import store_state

    projected = torch.randn(5, 2 * width, generator=torch.Generator().manual_seed(0)).to(device)
    pages = torch.zeros(4, 16, width, device=device)
    state = StatePages(pages, pages - 1, torch.zeros(1, 1, dtype=torch.int32, device=device), 128, 8)
    store_state(projected, state, torch.tensor([17, 3, 63, 0, 40], device=device))
    expected = [torch.zeros(64, width), torch.full((64, width), -1.0)]
    for token, row in ((0, 17), (2, 63), (4, 40)):
        for part, value in zip(expected, projected[token].cpu().chunk(2), strict=True):
            part[row] = value
    for stored, part in zip((state.values, state.gates), expected, strict=True):
        assert torch.equal(stored.cpu().view(64, width)[16:], part[16:])


MILLION = 2**20
"""Tokens of the longest context."""


def make_far_slots(per_page: int, device: str) -> tuple[Slots, int]:
    """Packed vectors of 512 dims in more than 2**31 bytes of pages, and the last page. Memory that nothing touches is
    not there, but for a GPU's. Before the pages lie as many bytes: an address that overflows hits those, and no
    others."""
    page = -(-per_page * 584 // 576) * 576  # as `layout.packed_page_bytes`
    pages = 2**31 // page + 3
    raw = torch.empty(2**31 + pages * page, dtype=torch.uint8, device=device)[2**31 :].view(pages, page)
    values, scales = raw[:, : per_page * 576], raw[:, per_page * 576 : per_page * 584]
    return Slots(values.unflatten(1, (per_page, 576)), scales.unflatten(1, (per_page, 8))), pages - 1


@pytest.mark.parametrize("device", RUNS)
@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_the_last_token_of_a_million_behind_two_gigabytes(ratio: int, device: str):
    """Position 2**20 - 1 ends a window of each ratio; its slot is in the last page of a pool of over 2**31 bytes."""
    pytest.importorskip("triton")
    from headrace.kernels.compressor.fused import finish
    from headrace.kernels.compressor.triton import compress

    per_page = 256 // ratio
    slots, last = make_far_slots(per_page, device)
    table = torch.full((1, MILLION // 256), last, dtype=torch.int32, device=device)
    angles = torch.zeros(MILLION, 64, device=device)
    generator = torch.Generator().manual_seed(ratio)
    angles[MILLION - ratio :, :32] = 0.6
    angles[MILLION - ratio :, 32:] = 0.8
    norm = LatentNorm(torch.rand(512, generator=generator).to(device) + 0.5, 1e-6, angles)
    near = make_slots("vectors", 512, device, pages=2)
    x = torch.randn(1, 512, generator=generator).to(device)
    if ratio == 1:
        numbers = torch.tensor([last * per_page + 255], device=device)
        positions = torch.tensor([MILLION - 1], device=device)
        query = RowNorm(x, norm.weight, norm.eps)
        finish(query, LatentRows(x, norm, positions, slots, numbers), ())
        finish(query, LatentRows(x, norm, positions, near, torch.tensor([8], device=device)), ())
    else:
        width = 1024 if ratio == 4 else 512
        rows = ROWS[ratio]
        state = [torch.randn(2, rows, width, generator=generator).to(device) for _ in range(2)]
        pages = StatePages(*state, torch.ones_like(table), 128, 8 if ratio == 4 else 128)
        windows = Windows(
            *(torch.tensor([n], device=device) for n in (0, MILLION // ratio - 1)),
            torch.tensor([0, 1], dtype=torch.int32, device=device),
            torch.tensor([MILLION], dtype=torch.int32, device=device),
        )
        pooling = Pooling(ratio, torch.randn(ratio, width, generator=generator).to(device))
        projected = torch.randn(1, 2 * width, generator=generator).to(device)
        numbers = torch.tensor([last * per_page + per_page - 1], device=device)
        compress(projected, windows, pages, pooling, norm, EntryPages(slots, table))
        # eight slots a page: the same entry is the last of page 1 of them
        compress(
            projected, windows, pages, pooling, norm,
            EntryPages(near, torch.ones((1, MILLION // ratio // 8), dtype=torch.int32, device=device)),
        )
    written = slots.gather(numbers, torch.float32)
    expected = near.gather(torch.tensor([8 if ratio == 1 else 15], device=device), torch.float32)
    assert torch.equal(written, expected) and expected.norm() > 1
