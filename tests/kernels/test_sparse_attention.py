"""Attention over slots, index scores and the selection of entries: against float64, plain torch, and torch's topk."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from devices import DEVICES, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from test_latents import make_norm, make_slots, packing_error

from headrace.kernels.latents.slots import Slots
from headrace.kernels.sparse_attention import EntryView, Queries, SeenSlots, reference

RUNS = [pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=pytest.mark.cuda)]


def make_seen(kind: str, head_dim: int, device: str, dtype: torch.dtype, tokens: int, width: int, seed: int) -> Any:
    """Slots of random vectors, of which each token sees some, the first at least; NaN in plain slots it does not."""
    generator = torch.Generator().manual_seed(seed)
    pages = max(40, width // 8 + 2)
    slots = make_slots(kind, head_dim, device, pages=pages, dtype=dtype)
    if slots.scales is None:
        slots.values.fill_(float("nan"))
    written = torch.randperm((pages - 1) * 8, generator=generator)[:width] + 8
    slots.write(written.to(device), (torch.randn(width, head_dim, generator=generator) * 1.5).to(device, dtype))
    numbers = torch.stack([written[torch.randperm(width, generator=generator)] for _ in range(tokens)]).to(device)
    counts = torch.randint(1, width + 1, (tokens,), generator=generator).to(device)
    return slots, numbers, counts


def attend_exactly(queries: Queries, parts: list[SeenSlots], sinks: torch.Tensor, scale: float) -> torch.Tensor:
    cos_sin = queries.cos_sin.double().cpu()[queries.positions.cpu()]
    q = queries.q.double().cpu()
    q = turn(q * torch.rsqrt(q.square().mean(-1, keepdim=True) + queries.norm_eps), cos_sin, 1)
    out = torch.empty_like(q)
    for token in range(len(q)):
        kv = []
        for part in parts:
            row = token if part.rows is None else int(part.rows[token])
            seen = part.numbers[row, : int(part.counts[token])]
            kv.append(part.slots.gather(seen, torch.float32).double().cpu())
        keys = torch.cat(kv)
        weights = (q[token] @ keys.T * scale).exp()
        out[token] = weights @ keys / (weights.sum(-1, keepdim=True) + sinks.double().cpu().exp()[:, None])
    return turn(out, cos_sin, -1)


def turn(x: torch.Tensor, cos_sin: torch.Tensor, sign: int) -> torch.Tensor:
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[:, None, :half], cos_sin[:, None, half:] * sign
    even, odd = x[..., -2 * half :: 2], x[..., -2 * half + 1 :: 2]
    x = x.clone()
    x[..., -2 * half :: 2], x[..., -2 * half + 1 :: 2] = even * cos - odd * sin, odd * cos + even * sin
    return x


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
@pytest.mark.parametrize("programs", [1, 132], ids=["whole", "split"])
@pytest.mark.parametrize(("kind", "num_heads", "head_dim", "rotary_dim", "widths"), [
    ("plain", 4, 128, 64, (16, 0)), ("plain", 20, 64, 16, (40, 70)), ("vectors", 16, 128, 64, (128, 33)),
    ("vectors", 64, 512, 64, (40, 100)),
])
def test_attention(
    kind: str, num_heads: int, head_dim: int, rotary_dim: int, widths: tuple[int, int], programs: int, device: str,
    dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch,
):
    pytest.importorskip("triton")
    from headrace.kernels.sparse_attention import triton

    monkeypatch.setattr(triton, "PROGRAMS", programs)
    generator, tokens = torch.Generator().manual_seed(head_dim), 3
    if dtype == torch.float32 and head_dim == 512:
        pytest.skip("chosen for 16 bits")
    norm = make_norm(head_dim, rotary_dim, device, dtype)
    q = (torch.randn(tokens, num_heads, head_dim, generator=generator) * 3).to(device, dtype)
    queries = Queries(q, torch.tensor([0, 77, 499], device=device), norm.cos_sin, 1e-6)
    window = SeenSlots(*make_seen(kind, head_dim, device, dtype, tokens, widths[0], 1))
    entries = None
    if widths[1]:
        slots, numbers, counts = make_seen(kind, head_dim, device, dtype, 2, widths[1], 2)
        counts = torch.tensor([widths[1] + 5, 0, 7], device=device)  # all that there are, none, a few
        entries = SeenSlots(slots, numbers, counts, torch.tensor([1, 0, 1], device=device))
    sinks, scale = torch.randn(num_heads, generator=generator).to(device), head_dim**-0.5
    parts = [window] if entries is None else [window, entries]
    exact = attend_exactly(queries, parts, sinks, scale)
    for solution in (reference, triton):
        out = solution.attend_slots(queries, window, entries, sinks=sinks, scale=scale)
        assert out.dtype == dtype and relative_error(out.cpu(), exact) < 2 * tolerance


@pytest.mark.cuda
@pytest.mark.parametrize(("tokens", "num_heads", "widths", "programs"), [
    (3, 64, (128, 512), 132), (3, 64, (128, 40), 1), (3, 20, (100, 70), 132), (40, 64, (64, 0), 132),
    (200, 64, (128, 300), 132),
])
def test_attention_on_hopper(
    tokens: int, num_heads: int, widths: tuple[int, int], programs: int, monkeypatch: pytest.MonkeyPatch
):
    from headrace.kernels.sparse_attention import hopper

    device, dtype, generator = torch.device("cuda", 0), torch.bfloat16, torch.Generator().manual_seed(num_heads)
    if torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("needs compute capability 9.0")
    assert hopper.find_kernel(device) is not None
    monkeypatch.setattr(hopper, "count_programs", lambda _: programs)
    norm = make_norm(512, 64, "cuda", dtype)
    q = (torch.randn(tokens, num_heads, 512, generator=generator) * 3).to(device, dtype)
    positions = torch.randint(0, 500, (tokens,), generator=generator).to(device)
    queries = Queries(q, positions, norm.cos_sin, 1e-6)
    window = SeenSlots(*make_seen("vectors", 512, "cuda", dtype, tokens, widths[0], 1))
    entries = None
    if widths[1]:
        slots, numbers, counts = make_seen("vectors", 512, "cuda", dtype, 2, widths[1], 2)
        counts = torch.randint(0, widths[1] + 5, (tokens,), generator=generator).to(device)
        counts[:2] = torch.tensor([widths[1] + 5, 0])
        entries = SeenSlots(slots, numbers, counts, torch.randint(0, 2, (tokens,), generator=generator).to(device))
    sinks, scale = torch.randn(num_heads, generator=generator).to(device), 512**-0.5
    parts = [window] if entries is None else [window, entries]
    out = hopper.attend_slots(queries, window, entries, sinks=sinks, scale=scale)
    assert relative_error(out.cpu(), attend_exactly(queries, parts, sinks, scale)) < 1e-2
    assert torch.equal(out, hopper.attend_slots(queries, window, entries, sinks=sinks, scale=scale)), "at every run"


@pytest.mark.cuda
def test_every_code_is_unpacked_exactly_on_hopper():
    """A token that attends to one slot, without a sink, gets that slot's vector back."""
    from headrace.kernels.sparse_attention import hopper

    slots, tokens = make_slots("vectors", 512, "cuda", pages=40), 256
    assert slots.scales is not None
    numbers = torch.arange(tokens, device="cuda")[:, None] + 8
    place = (numbers[:, 0] // 8, numbers[:, 0] % 8)
    codes = torch.randint(0, 256, (tokens, 576), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    codes[:, :448][(codes[:, :448] & 127) == 127] = 3  # no NaN
    codes[:, 448:] = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(2)).bfloat16().view(torch.uint8)
    exponents = torch.randint(90, 160, (tokens, 8), generator=torch.Generator().manual_seed(3)).to(torch.uint8)
    slots.values[place], slots.scales[place] = codes.cuda(), exponents.cuda()
    still = torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), dim=1).cuda()
    q = torch.randn(tokens, 64, 512, device="cuda").bfloat16()
    positions = torch.zeros(tokens, dtype=torch.int64, device="cuda")
    queries = Queries(q, positions, still, 1e-6)
    window = SeenSlots(slots, numbers, torch.ones_like(positions))
    out = hopper.attend_slots(queries, window, None, sinks=torch.full((64,), -1e30, device="cuda"), scale=1e-30)
    expected = slots.gather(numbers[:, 0], torch.bfloat16)
    assert torch.equal(out, expected[:, None].expand_as(out))


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
@pytest.mark.parametrize(("num_heads", "value_dim", "rest", "width", "programs"), [
    (20, 32, 16, 70, 132), (5, 64, 16, 40, 1), (64, 512, 64, 200, 132),
])
def test_attention_to_rows(
    num_heads: int, value_dim: int, rest: int, width: int, programs: int, device: str, dtype: torch.dtype,
    tolerance: float, monkeypatch: pytest.MonkeyPatch,
):
    pytest.importorskip("triton")
    from headrace.kernels.sparse_attention import rows

    if device == "cpu" and value_dim == 512:
        pytest.skip("too large for the interpreter")
    monkeypatch.setattr(rows, "PROGRAMS", programs)
    generator = torch.Generator().manual_seed(value_dim)
    pages, numbers, counts = make_seen("plain", value_dim + rest + 8, device, dtype, 3, width, 1)
    slots = Slots(pages.values[..., : value_dim + rest])  # something else lies behind each row
    q = torch.randn(3, num_heads, value_dim + rest, generator=generator).to(device, dtype)
    owners = torch.tensor([1, 0, 1], device=device)
    for seen in (SeenSlots(slots, numbers, counts), SeenSlots(slots, numbers, counts, owners)):
        exact = torch.empty(3, num_heads, value_dim, dtype=torch.float64)
        for token in range(3):
            row = token if seen.rows is None else int(seen.rows[token])
            kv = slots.gather(numbers[row, : int(counts[token])], torch.float32).double().cpu()
            exact[token] = (q[token].double().cpu() @ kv.T * 0.1).softmax(-1) @ kv[:, :value_dim]
        for solution in (reference, rows):
            out = solution.attend_rows(q, seen, value_dim=value_dim, scale=0.1)
            assert out.dtype == dtype and relative_error(out.cpu(), exact) < 2 * tolerance


def make_view(device: str, lengths: list[int], chunks: list[int], per_page: int) -> EntryView:
    """Requests with that many entries at the end of their chunks; an entry a token."""
    generator = torch.Generator().manual_seed(7)
    pages = -(-max(lengths) // per_page)
    table = (torch.randperm(len(lengths) * pages, generator=generator) + 1).view(len(lengths), pages).int()
    requests = [r for r, chunk in enumerate(chunks) for _ in range(chunk)]
    visible = [n - chunk + 1 + i for n, chunk in zip(lengths, chunks, strict=True) for i in range(chunk)]
    num_decodes = next((i for i, chunk in enumerate(chunks) if chunk > 1), len(chunks))
    starts = [sum(chunks[:r]) for r in range(len(chunks))]
    return EntryView(
        table.to(device), torch.tensor(requests, device=device), torch.tensor(visible, device=device), max(lengths),
        num_decodes, [(r, starts[r], chunks[r], lengths[r]) for r in range(num_decodes, len(chunks))],
    )


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
@pytest.mark.parametrize(("kind", "num_heads", "dim", "rotary_dim"), [
    ("plain", 5, 64, 32), ("keys", 64, 128, 64), ("narrow keys", 64, 128, 64), ("narrow keys", 5, 64, 32),
])
def test_scores(
    kind: str, num_heads: int, dim: int, rotary_dim: int, device: str, dtype: torch.dtype, tolerance: float,
    monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("triton")
    from headrace.kernels.sparse_attention import few_scores, indexer

    # queries are rounded to 8 bits too: the last bit of a sum changes some codes
    tolerance = 3 * tolerance if kind == "plain" else max(3 * tolerance, packing_error(device), 2e-2)

    view = make_view(device, [90, 12, 140, 30], [1, 1, 5, 3], 8)
    generator = torch.Generator().manual_seed(1)
    keys = make_slots(kind, dim, device, pages=int(view.page_table.max()) + 1, dtype=dtype)
    every = torch.arange(8, keys.values.shape[0] * 8, device=device)
    keys.write(every, torch.randn(len(every), dim, generator=generator).to(device, dtype))
    q = torch.randn(10, num_heads, dim, generator=generator).to(device, dtype)
    norm = make_norm(dim, rotary_dim, device, dtype)
    queries = Queries(q, torch.randint(0, 500, (10,), generator=generator).to(device), norm.cos_sin, 0.0)
    # rows of a wider product
    weights = torch.randn(10, num_heads + 8, generator=generator).to(device)[:, 8:]
    for tokens, programs in ((slice(0, 10), indexer.PROGRAMS), (slice(0, 10), 1), (slice(3, 8), indexer.PROGRAMS)):
        monkeypatch.setattr(indexer, "PROGRAMS", programs)  # a tile of entries for each, or all of a token's
        seen = view.visible[tokens]
        defined = (torch.arange(140, device=device) < seen[:, None]) & (seen > 20)[:, None]
        own = [few_scores.index_scores] if device == "cuda" else []
        theirs, *ours = (
            solution(queries, weights, keys, view, scale=0.3, top_k=20, tokens=tokens)
            for solution in (reference.index_scores, indexer.index_scores, *own)
        )
        for found in ours:
            assert found.shape == theirs.shape == (len(seen), 140)
            assert relative_error(found[defined], theirs[defined]) < tolerance


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
@pytest.mark.parametrize("kind", ["keys", "narrow keys"])
@pytest.mark.parametrize("num_heads", [64, 5])
def test_scores_of_pairs(
    num_heads: int, kind: str, device: str, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
):
    """Tokens of a prompt two at a time: neighbours of two requests, an odd one, some that need no scores."""
    pytest.importorskip("triton")
    from headrace.kernels.sparse_attention import paired_scores

    monkeypatch.setattr(paired_scores, "LEAST_TOKENS", 1)
    view = make_view(device, [129, 22, 200, 64], [3, 5, 4, 1], 64)
    generator = torch.Generator().manual_seed(1)
    keys = make_slots(kind, 128, device, pages=int(view.page_table.max()) + 1, per_page=64, dtype=dtype)
    every = torch.arange(64, keys.values.shape[0] * 64, device=device)
    keys.write(every, torch.randn(len(every), 128, generator=generator).to(device, dtype))
    norm = make_norm(128, 64, device, dtype)
    q = torch.randn(13, num_heads, 128, generator=generator).to(device, dtype)
    queries = Queries(q, torch.randint(0, 500, (13,), generator=generator).to(device), norm.cos_sin, 0.0)
    weights = torch.randn(13, num_heads, generator=generator).to(device)
    for tokens, programs in ((slice(0, 13), 1), (slice(2, 12), 64)):
        monkeypatch.setattr(paired_scores, "PROGRAMS", programs)
        assert paired_scores.takes(keys, 10, num_heads)
        ours, theirs = (
            solution(queries, weights, keys, view, scale=0.3, top_k=20, tokens=tokens)
            for solution in (paired_scores.index_scores, reference.index_scores)
        )
        seen = view.visible[tokens]
        defined = (torch.arange(200, device=device) < seen[:, None]) & (seen > 20)[:, None]
        assert relative_error(ours[defined], theirs[defined]) < max(3 * tolerance, packing_error(device), 2e-2)


def check_selection(select: Any, scores: torch.Tensor, view: EntryView, top_k: int, per_page: int) -> None:
    """The sum of a row's chosen scores is that of topk, no slot is chosen twice, and none that is not visible."""
    chosen = select(scores, view, top_k=top_k, per_page=per_page, tokens=slice(0, len(scores)))
    assert chosen.shape == (len(scores), top_k)
    for token, (row, seen) in enumerate(zip(chosen.tolist(), view.visible.tolist(), strict=True)):
        table = view.page_table[int(view.requests[token])].tolist()
        slots = {table[n // per_page] * per_page + n % per_page: n for n in range(seen)}
        if seen <= top_k:
            assert row == [*slots, *[-1] * (top_k - seen)]
            continue
        numbers = [slots[slot] for slot in row]
        assert len(set(numbers)) == top_k
        best = scores[token, :seen].topk(top_k).values.sort().values
        assert torch.equal(scores[token, numbers].sort().values, best)


@pytest.mark.parametrize("device", RUNS)
@pytest.mark.parametrize("levels", [1, 2, 5, 0], ids=["equal", "two", "five", "distinct"])
@pytest.mark.parametrize("top_k", [1, 16, 48])
def test_selection_with_ties(top_k: int, levels: int, device: str, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    from headrace.kernels.sparse_attention import indexer

    monkeypatch.setattr(indexer, "SELECT_BLOCK", 64)  # several blocks a row
    view = make_view(device, [150, 16, 49, 300], [1, 1, 3, 2], 8)
    generator = torch.Generator().manual_seed(top_k + levels)
    scores = torch.randn(7, 300, generator=generator) * torch.logspace(-30, 30, 300)[torch.randperm(300)]
    if levels:  # 0 and -0 among them
        scores = torch.randint(0, levels, (7, 300), generator=generator) * -0.5
        scores[:, ::3] *= -1
    selects = [indexer.select_entries, reference.select_entries]
    if device == "cuda":
        from headrace.kernels.sparse_attention import selection

        selects.append(selection.select_entries)
        monkeypatch.setattr(selection, "MOST_HELD", 4096 if levels % 2 else 0)
    for select in selects:
        check_selection(select, scores.to(device), view, top_k, 8)


@pytest.mark.parametrize("device", RUNS)
def test_selection_of_whatever_scores(device: str, monkeypatch: pytest.MonkeyPatch):
    """Any lengths, pages, numbers of choices and ties, at the edges of blocks and of what is visible."""
    pytest.importorskip("triton")
    from headrace.kernels.sparse_attention import indexer, selection

    selects = [reference.select_entries, indexer.select_entries]
    if device == "cuda":
        selects.append(selection.select_entries)

    @settings(max_examples=20 if device == "cpu" else 300)
    @given(
        lengths=st.lists(st.integers(1, 200), min_size=1, max_size=3), top_k=st.sampled_from([1, 2, 7, 31, 64]),
        per_page=st.sampled_from([1, 8, 64]), block=st.sampled_from([16, 64]), seed=st.integers(0, 2**32 - 1),
        values=st.lists(
            st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3e38, -3e38]) | st.floats(-2, 2, width=32),
            min_size=1, max_size=6,
        ),
    )
    def check(
        lengths: list[int], top_k: int, per_page: int, block: int, seed: int, values: list[float]
    ) -> None:
        view = make_view(device, lengths, [1] * len(lengths), per_page)
        chosen = torch.randint(len(values), (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
        scores = torch.tensor(values)[chosen].to(device)
        monkeypatch.setattr(indexer, "SELECT_BLOCK", block)
        monkeypatch.setattr(selection, "MOST_HELD", 4096 if seed % 2 else 0)
        for select in selects:
            check_selection(select, scores, view, top_k, per_page)

    check()


@pytest.mark.cuda
@pytest.mark.parametrize(("top_k", "entries"), [(512, 2064), (1024, 32768), (2048, 262144), (512, 262144)])
def test_selection_of_published_sizes(top_k: int, entries: int):
    from headrace.kernels.sparse_attention import indexer, selection

    view = make_view("cuda", [entries, top_k + 1, 5], [1, 1, 1], 64)
    for scores in (
        torch.randn(3, entries, device="cuda"), torch.randint(0, 9, (3, entries), device="cuda").float(),
        torch.relu(torch.randn(3, entries, device="cuda")),
    ):
        for select in (indexer.select_entries, selection.select_entries):
            check_selection(select, scores, view, top_k, 64)
        first, again = (
            selection.select_entries(scores, view, top_k=top_k, per_page=64, tokens=slice(0, 3)) for _ in range(2)
        )
        assert torch.equal(first, again), "the same in the same order"
