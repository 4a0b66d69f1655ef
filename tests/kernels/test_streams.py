"""Hyper-connections: by the definition in float64, in plain torch and in Triton."""

from __future__ import annotations

from collections import defaultdict
from itertools import count
from typing import Any

import pytest
import torch
from devices import DEVICES, check_rows, relative_error

from headrace.kernels.coded_linear.reference import quantise_rows
from headrace.kernels.streams import Pending, StreamMix, StreamShape, reference

EPS = 1e-6


def weigh_exactly(
    raw: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, iterations: int, eps: float
) -> tuple[torch.Tensor, ...]:
    streams = {8: 2, 24: 4, 80: 8}[raw.shape[1]]
    raw, scale, base = raw.double(), scale.double(), base.double()
    x = torch.cat(
        (raw[:, :streams] * scale[0], raw[:, streams : 2 * streams] * scale[1], raw[:, 2 * streams :] * scale[2]), dim=1
    ) + base
    mix = x[:, 2 * streams :].view(-1, streams, streams).softmax(2) + eps
    for i in range(2 * iterations - 1):
        mix = mix / (mix.sum(1 if i % 2 == 0 else 2, keepdim=True) + eps)
    return x[:, :streams].sigmoid() + eps, 2 * x[:, streams : 2 * streams].sigmoid(), mix


def draw(num_tokens: int, streams: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(num_tokens + streams)
    width = (2 + streams) * streams
    return tuple(torch.randn(*shape, generator=generator) for shape in ((num_tokens, width), (3,), (width,)))


@pytest.mark.parametrize("iterations", [1, 2, 20])
@pytest.mark.parametrize("streams", [2, 4, 8])
@pytest.mark.parametrize("num_tokens", [0, 1, 37])
def test_weights(num_tokens: int, streams: int, iterations: int):
    raw, scale, base = draw(num_tokens, streams)
    for ours, exact in zip(
        reference.weigh_streams(raw, scale, base, iterations=iterations, eps=EPS),
        weigh_exactly(raw, scale, base, iterations, EPS), strict=True
    ):
        torch.testing.assert_close(ours.double(), exact, atol=1e-5, rtol=1e-5)


def make(num_tokens: int, num_streams: int, width: int, dtype: torch.dtype) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(num_tokens + width)
    weights = (2 + num_streams) * num_streams
    streams = torch.randn(num_tokens, num_streams, width, generator=generator).to(dtype)
    fn = torch.randn(weights, num_streams * width, generator=generator) * width**-0.5
    mix = StreamMix(fn, torch.randn(3, generator=generator), torch.randn(weights, generator=generator))
    return streams, mix, torch.randn(width, generator=generator).to(dtype)


def read_exactly(streams: torch.Tensor, mix: StreamMix, norm: torch.Tensor, iterations: int) -> tuple[Any, ...]:
    flat = streams.double().flatten(1)
    raw = flat @ mix.fn.double().T * torch.rsqrt(flat.square().mean(1, keepdim=True) + EPS)
    pre, post, mixing = weigh_exactly(raw, mix.scale, mix.base, iterations, EPS)
    x = torch.einsum("ts,tsd->td", pre, streams.double()).to(streams.dtype).double()
    return x * torch.rsqrt(x.square().mean(1, keepdim=True) + EPS) * norm.double(), post, mixing


def put(device: str, *tensors: Any) -> list[Any]:
    return [StreamMix(*(t.to(device) for t in x)) if isinstance(x, StreamMix) else x.to(device) for x in tensors]


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
@pytest.mark.parametrize(("num_tokens", "num_streams", "width"), [(0, 4, 64), (1, 4, 96), (5, 2, 256), (70, 4, 64)])
def test_reading(
    num_tokens: int, num_streams: int, width: int, device: str, dtype: torch.dtype, tolerance: float
):
    pytest.importorskip("triton")
    from headrace.kernels.streams import triton

    streams, mix, norm = put(device, *make(num_tokens, num_streams, width, dtype))
    exact = read_exactly(*put("cpu", streams, mix, norm), 3)
    for solution in (reference, triton):
        x, post, mixing = solution.read_streams(streams, mix, norm, StreamShape(3, EPS, EPS))
        assert x.dtype == dtype and post.dtype == mixing.dtype == torch.float32
        if num_tokens:
            assert relative_error(x.cpu(), exact[0]) < tolerance
            assert relative_error(post.cpu(), exact[1]) < 1e-5 and relative_error(mixing.cpu(), exact[2]) < 1e-5


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
def test_reading_an_expanded_view(device: str, dtype: torch.dtype, tolerance: float):
    pytest.importorskip("triton")
    from headrace.kernels.streams import triton

    streams, mix, norm = put(device, *make(3, 4, 128, dtype))
    same = streams[:, :1].expand(-1, 4, -1)
    shape = StreamShape(20, EPS, EPS)
    for ours, expected in zip(
        triton.read_streams(same, mix, norm, shape), reference.read_streams(same.contiguous(), mix, norm, shape),
        strict=True,
    ):
        assert relative_error(ours, expected) < tolerance


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
@pytest.mark.parametrize(("num_tokens", "num_streams", "width"), [(0, 4, 64), (1, 4, 96), (5, 2, 2080), (9, 8, 64)])
def test_writing(
    num_tokens: int, num_streams: int, width: int, device: str, dtype: torch.dtype, tolerance: float
):
    pytest.importorskip("triton")
    from headrace.kernels.streams import triton

    generator = torch.Generator().manual_seed(1)
    streams = torch.randn(num_tokens, num_streams, width, generator=generator).to(device, dtype)
    out = torch.randn(num_tokens, width, generator=generator).to(device, dtype)
    post = torch.randn(num_tokens, num_streams, generator=generator).to(device)
    mix = torch.randn(num_tokens, num_streams, num_streams, generator=generator).to(device)
    exact = post.double()[..., None] * out.double()[:, None] + torch.einsum(
        "tjk,tjd->tkd", mix.double(), streams.double()
    )
    before = streams.clone()
    for solution in (reference, triton):
        new = solution.write_streams(streams, out, post, mix)
        assert new.shape == streams.shape and torch.equal(streams, before)
        if num_tokens:
            assert relative_error(new, exact) < tolerance


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
@pytest.mark.parametrize(("num_tokens", "num_streams", "width"), [(0, 4, 64), (1, 4, 2080), (20, 2, 96), (70, 4, 96)])
def test_writing_and_reading_at_once(
    num_tokens: int, num_streams: int, width: int, device: str, dtype: torch.dtype, tolerance: float
):
    """As one after the other, for one step of columns in a program and for several."""
    pytest.importorskip("triton")
    from headrace.kernels.streams import triton

    streams, mix, norm = put(device, *make(num_tokens, num_streams, width, dtype))
    shape = StreamShape(3, EPS, EPS)
    generator = torch.Generator().manual_seed(2)
    # a column of a wider tensor: rows of the output need not follow each other
    out = torch.randn(num_tokens, 2 * width, generator=generator).to(device, dtype)[:, width:]
    post, mixing = (
        torch.rand(num_tokens, *shape, generator=generator).to(device)
        for shape in ((num_streams,), (num_streams, num_streams))
    )
    before, more = streams.clone(), torch.randn(num_tokens, width, generator=generator).to(device, dtype)
    expected = reference.write_read_streams(streams, Pending(out + more, post, mixing), mix, norm, shape)
    ours = triton.write_read_streams(streams, Pending(out, post, mixing, more), mix, norm, shape)
    assert torch.equal(streams, before)
    for one, other in zip(ours, expected, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert not num_tokens or relative_error(one, other) < tolerance


@pytest.mark.cuda
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 8, 13, 33, 64, 300, 1100])
def test_own_cuda_code_finishes_reads(num_tokens: int):
    """Of the published widths, as the reference in float64 does; of few tokens by one kernel and by two."""
    from headrace.kernels.streams import cuda, few, groups

    for width in (4096, 7168):
        streams, mix, norm = put("cuda", *make(num_tokens, 4, width, torch.bfloat16))
        exact = read_exactly(*put("cpu", streams, mix, norm), 20)
        shape = StreamShape(20, EPS, EPS)
        x, post, mixing = cuda.read_streams(streams, mix, norm, shape)
        assert relative_error(x.cpu(), exact[0]) < 5e-3
        assert relative_error(post.cpu(), exact[1]) < 1e-4 and relative_error(mixing.cpu(), exact[2]) < 1e-4
        out, more = (torch.randn(num_tokens, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        pending = Pending(out, post, mixing, more)
        expected = reference.write_read_streams(streams, pending, mix, norm, shape)
        for one, other in zip(
            cuda.write_read_streams(streams, pending, mix, norm, shape), expected, strict=True
        ):
            assert relative_error(one, other) < 5e-3
        tile = cuda.choose_tile(num_tokens, width)
        assert cuda.find_kernels(width, tile, streams.device, writes=True) is not None
        assert few.can_run(streams) == (num_tokens <= few.MOST_TOKENS)
        assert groups.can_run(streams, pending) == (num_tokens <= groups.MOST_TOKENS)
        *again, rows = cuda.write_read_streams(streams, pending, mix, norm, shape, group=128)
        assert all(relative_error(one, other) < 5e-3 for one, other in zip(again, expected, strict=True))
        assert (rows is not None) == (few.MOST_TOKENS < num_tokens <= groups.MOST_TOKENS and width == 4096)
        if rows is not None:
            check_rows(rows, quantise_rows(again[1], 128), "cuda")
        by_two = cuda.write_read_streams(streams, pending, mix, norm, shape, tile=tile)
        assert all(relative_error(one, other) < 5e-3 for one, other in zip(by_two, expected, strict=True))


@pytest.mark.cuda
@pytest.mark.parametrize("width", [512, 4096])
def test_groups_exchange_sums_anew_in_each_call(width: int):
    """Calls of more and of fewer groups in turn, also in a graph and on several streams, have the bits of each alone,
    and rows beyond a call's tokens are left alone. Streams that cancel are normalised, too."""
    from headrace.kernels.streams import groups

    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("compiled for Hopper")
    shape, cases = StreamShape(20, EPS, EPS), []
    for turn, tokens in enumerate([33, 1, 16, 64, 2, 17, 8, 7, 48]):
        streams, mix, norm = put("cuda", *make(tokens, 4, width, torch.bfloat16))
        if turn == 2:
            streams[:, 1::2] = -streams[:, ::2]
        exact = read_exactly(*put("cpu", streams, mix, norm), 20)
        pending = Pending(torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16), *(
            torch.rand(tokens, *rest, device="cuda") for rest in ((4,), (4, 4))
        ))
        assert groups.can_run(streams, pending)
        cases.append((streams, pending, mix, norm, exact))

    def call_all() -> list[Any]:
        return [
            (
                groups.pass_streams(streams, None, mix, norm, shape),
                groups.pass_streams(streams, pending, mix, norm, shape),
            )
            for streams, pending, mix, norm, _ in cases
        ]

    first = call_all()
    for (read, written), (streams, pending, mix, norm, exact) in zip(first, cases, strict=True):
        assert read[0] is streams and relative_error(read[1].cpu(), exact[0]) < 5e-3
        assert all(relative_error(own.cpu(), wanted) < 1e-4 for own, wanted in zip(read[2:], exact[1:], strict=True))
        expected = reference.write_read_streams(streams, pending, mix, norm, shape)
        assert all(relative_error(one, other) < 5e-3 for one, other in zip(written, expected, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call_all()
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    with torch.cuda.stream(aside):
        beside = call_all()
    if width > 512:  # blocks of two such calls need not all run at once
        torch.cuda.synchronize()
    again = call_all()
    torch.cuda.synchronize()
    for results in (captured, beside, again):
        for one, other in zip(results, first, strict=True):
            for own, wanted in zip(one, other, strict=True):
                assert all(map(torch.equal, own, wanted))


def test_groups_are_divided_among_blocks_that_run_at_once():
    from headrace.kernels.streams import groups

    assert [groups.choose_warps(width, 132) for width in (512, 4096, 7168)] == [8, 8, 14]
    assert groups.choose_warps(4096, 114) is None, "not all blocks run at once"
    assert groups.choose_warps(4096 + 32, 132) is None, "no whole blocks"
    # beside 96 registers a thread, of which two blocks of 9 warps fit
    assert groups.count_shared_bytes(8) <= 52 << 10 and groups.count_shared_bytes(14) <= 100 << 10


def test_each_stream_of_a_device_has_a_place_to_exchange_sums(monkeypatch):
    pytest.importorskip("triton")
    from headrace.kernels.streams import groups

    monkeypatch.setattr(groups, "_slots", {})
    monkeypatch.setattr(groups, "_numbers", defaultdict(count))
    now = [0]
    monkeypatch.setattr(groups, "current_stream", lambda index: now[0])
    found = {}
    for turn in range(2):
        for now[0] in range(groups.SLOTS + 2):
            for index in (0, 1):
                found[turn, index, now[0]] = groups.find_slot(torch.device("cuda", index))
    expected = [*range(groups.SLOTS), None, None]
    for turn in range(2):
        for index in (0, 1):
            assert [found[turn, index, stream] for stream in range(groups.SLOTS + 2)] == expected


def test_a_token_has_room_beside_a_product():
    """Blocks begin while those of the product before are still there, in shared memory and in registers (72 and 88 at
    most of a thread, of 9 warps each, of which a quarter of a multiprocessor may have 3)."""
    pytest.importorskip("triton")
    from headrace.kernels.coded_linear import fp8_rows
    from headrace.kernels.cuda_source import RESERVED_BYTES, SM_BYTES
    from headrace.kernels.streams import few

    static_bytes, width = 4096, 4096
    own = few.count_shared_bytes(width) + static_bytes + RESERVED_BYTES
    for outputs, inputs in ((4096, 4096), (4096, 1024), (4096, 8192), (1536, 4096)):
        shape = fp8_rows.choose_shape(outputs // fp8_rows.TILE, inputs, 1)
        product = fp8_rows.keep_apart(fp8_rows.count_shared_bytes(1, inputs, shape, has_norm=False)) + RESERVED_BYTES
        assert product + own <= SM_BYTES


@pytest.mark.cuda
@pytest.mark.parametrize("num_tokens", [1, 64, 300])
def test_the_published_shape(num_tokens: int):
    from headrace.kernels.streams import triton

    streams, mix, norm = put("cuda", *make(num_tokens, 4, 4096, torch.bfloat16))
    shape = StreamShape(20, EPS, EPS)
    ours, exact = triton.read_streams(streams, mix, norm, shape), reference.read_streams(streams, mix, norm, shape)
    for one, other in zip(ours, exact, strict=True):
        assert relative_error(one, other) < 5e-3
    out = torch.randn(num_tokens, 4096, device="cuda", dtype=torch.bfloat16)
    assert relative_error(
        triton.write_streams(streams, out, *ours[1:]), reference.write_streams(streams, out, *ours[1:])
    ) < 5e-3
