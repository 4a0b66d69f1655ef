"""Own CUDA C++ for sizes of many models, on pretended GPUs: what is launched must be what the driver takes, and what no
kernel takes must be left to others. Values are tested elsewhere."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from pretended import H200, HOPPERS, OTHERS, Card, RecordedKernel, Recording, Refused, check_map, pretend

from headrace.kernels import cuda_source, nvrtc
from headrace.kernels.attention.blocks import Head
from headrace.kernels.attention.decodes import DecodeStep, DecodeWorkspace
from headrace.kernels.coded_linear import CODED_FLOAT, CODED_GATED, CODED_NORM_LINEAR, CODED_SUMS, choice
from headrace.kernels.coded_linear.codes import Code
from headrace.kernels.coded_linear.device_codes import DeviceCodes, Supers
from headrace.kernels.collective.push import PushCollectives
from headrace.kernels.few_decodes import Rotation
from headrace.kernels.latents.slots import KEY_SCALE_BYTES, Slots
from headrace.kernels.launch import ceil_div
from headrace.kernels.linear import GATED_LINEAR, LINEAR, LINEAR_SUMS, NORM_LINEAR, Norm, fits
from headrace.kernels.lora import (
    ADAPTED_LINEAR,
    ADAPTED_NORM,
    EXPAND,
    EXPAND_ADD_NORM,
    EXPAND_GATED,
    EXPAND_ROPE_WRITE,
    LowRankBank,
    Reduced,
    SlotRows,
    count_published,
    make_tiles,
)
from headrace.kernels.moe import (
    CODED_EXPERTS,
    LINEAR_ROUTE,
    MANY_CODED_EXPERTS,
    MANY_EXPERTS,
    NORM_ROUTE,
    ROUNDED_EXPERTS,
    RUN_EXPERTS,
    RouteShape,
    is_few,
)
from headrace.kernels.moe.linear_route import find_form
from headrace.kernels.operation import KernelQuery, Operation
from headrace.kernels.rowwise import Gate, HeadShape
from headrace.kernels.span_attention import SPAN_ATTENTION, Spans
from headrace.kernels.sparse_attention import (
    ATTEND_SLOTS,
    INDEX_SCORES,
    SELECT_ENTRIES,
    EntryView,
    Queries,
    SeenSlots,
)
from headrace.kernels.streams import READ_STREAMS, WRITE_READ_STREAMS, Pending, StreamMix, StreamShape

I32, I64, F32, U8, E4M3 = torch.int32, torch.int64, torch.float32, torch.uint8, torch.float8_e4m3fn
DENSE = [
    (576, 1536), (768, 3072), (896, 4864), (960, 2560), (1024, 3072), (1152, 4304), (1536, 8960), (2048, 8192),
    (2304, 9216), (2560, 9728), (2880, 2880), (3072, 8192), (3584, 18944), (4096, 14336), (4608, 36864),
    (5120, 27648), (6144, 24576), (7168, 18432), (8192, 29568), (12288, 28672), (16384, 53248),
]
"""Hidden and intermediate sizes of models, which ranks divide by 1 to 8."""
EXPERTS = [
    (8, 2, 4096, 14336), (16, 1, 5120, 8192), (32, 4, 2880, 2880), (60, 4, 2048, 1408), (62, 8, 1536, 512),
    (64, 6, 2048, 1408), (64, 8, 4096, 2560), (72, 10, 4096, 768), (96, 8, 3072, 1536), (128, 8, 2048, 768),
    (160, 6, 5120, 1536), (256, 8, 7168, 2048), (384, 8, 7168, 2048), (512, 10, 2048, 512), (512, 22, 4096, 2688),
]
"""Experts, choices, hidden and intermediate sizes."""
ROWS = [0, 1, 2, 3, 8, 16, 17, 33, 64, 65, 129, 256, 513, 1024, 4096, 16384]
SUPERS = {name: Supers(bits, name != "Q6_K") for name, bits in (("Q4_K", 4), ("Q5_K", 6), ("Q6_K", 6))}
MIXED = [*((name, 0) for name in SUPERS), ("Q4_K, Q6_K", 0)]
"""Of super-blocks; the last third of the outputs in another form."""
FORMS = [("fp8", 128), ("fp8", 0), ("int4", 128), ("int4", 32), ("int4", 0), ("int8", 0), ("int8", 128), ("mxfp4", 32)]
"""Codes, and inputs that share a scale; 0: all."""
OF_TORCH = {"reference", "triton_expand", "scaled_mm", "scaled_mm_blocks"}
"""Solutions that call torch's products."""
SILU, CLAMPED = Gate("silu"), Gate("clamped", 7.0, 1.702, 1.0)


@pytest.fixture(params=HOPPERS, ids=lambda card: card.name)
def hopper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recording]:
    with pretend(monkeypatch, request.param) as recording:
        yield recording


def find_own(card: Card, operation: Operation, **shape: int) -> Callable[..., Any] | None:
    """The kernel that an operation chooses on a card; None for the reference, which is torch's."""
    found = operation.choose(KernelQuery("cuda", "bfloat16", card.capability, shape))
    return None if found is operation.load("reference") else found


def make_codes(gpu: Recording, form: tuple[str, int], outputs: int, inputs: int) -> DeviceCodes:
    (kind, group), halves = form, ceil_div(inputs, 128) * 64
    groups, shared = (ceil_div(inputs, group), group) if group else (1, inputs)
    if kind == "fp8":
        rows, scales = (128, (ceil_div(outputs, 128), groups)) if group else (1, (outputs, 1))
        codes = gpu.empty(outputs, inputs, dtype=E4M3)
        return DeviceCodes(Code.E4M3, inputs, codes, gpu.empty(*scales, dtype=F32), shared, rows=rows)
    if kind == "mxfp4":
        codes, powers = gpu.empty(outputs, halves, dtype=U8), gpu.empty(outputs, halves // 16, dtype=U8)
        return DeviceCodes(Code.E2M1, inputs, codes, powers, group)
    if kind == "int8":
        codes = gpu.empty(outputs, inputs, dtype=torch.int8)
        return DeviceCodes(Code.INT, inputs, codes, gpu.empty(outputs, groups, dtype=F32), shared, has_whole_zeros=True)
    codes, pairs = gpu.empty(outputs, halves, dtype=U8), gpu.empty(outputs, groups, dtype=I32)
    return DeviceCodes(Code.INT, inputs, codes, pairs, shared, has_whole_zeros=True)


def make_supers(gpu: Recording, names: str, outputs: int, inputs: int) -> DeviceCodes:
    name, _, rest = names.partition(", ")
    supers, tail = SUPERS[name], None
    if rest:
        last = outputs // 48 * 16
        outputs, tail = outputs - last, make_supers(gpu, rest, last, inputs)
    codes = gpu.empty(outputs, inputs * supers.bits // 8, dtype=U8)
    scales = gpu.empty(outputs, inputs // 256 * supers.row_bytes, dtype=U8)
    return DeviceCodes(
        Code.INT, inputs, codes, scales, supers.group, has_whole_zeros=not supers.has_mins, supers=supers, tail=tail
    )


def list_weights(seed: int, count: int = 30) -> list[tuple[int, int, bool]]:
    """Outputs, inputs, and whether gate and up are stacked: some of layers, those of ranks too, and of heads."""
    draw, found = random.Random(seed), []
    for width, inner in DENSE:
        own = inner // draw.choice((1, 2, 4, 8))
        found += [(width, own, False), (2 * own, width, True), (width * 3 // draw.choice((1, 2, 4)), width, False)]
    return [*draw.sample(found, count), (262208, 1152, False), (32001, 4096, False), (64, 2048, False)]


def test_products_of_plain_weights(hopper: Recording):
    for outputs, inputs, is_gated in list_weights(1):
        weight, norm = hopper.empty(outputs, inputs), Norm(hopper.empty(inputs), 1e-5)
        shape = {"in_features": inputs, "out_features": outputs}
        linear, sums, gated, normalised = (
            find_own(hopper.card, own, **shape) for own in (LINEAR, LINEAR_SUMS, GATED_LINEAR, NORM_LINEAR)
        )
        for rows in ROWS:
            x = hopper.empty(rows, inputs)
            if linear is not None:
                assert linear(x, weight, None).shape == (rows, outputs)
            if sums is not None:
                out = sums(x, weight, None, hopper.empty(rows, outputs))
                assert out is None or out.shape[-2:] == (rows, outputs)
            if gated is not None and is_gated:
                out = gated(x, weight, None, "silu")
                assert out is None or out.shape == (rows, outputs // 2)
            if normalised is not None and fits(rows):
                activation = "silu" if is_gated else ""
                out, total = normalised(x, x, norm, weight, None, activation)
                assert out.shape == (rows, outputs // (1 + is_gated)) and total.shape == x.shape
    assert {"plain_rows", "gated_product"} <= set(hopper.own)


@pytest.mark.parametrize("form", FORMS + MIXED, ids=str)
def test_products_of_weights_in_codes(form: tuple[str, int], hopper: Recording):
    """By every solution that says it takes them, not only by the fastest."""
    draw = random.Random(str(form))
    for outputs, inputs, is_gated in list_weights(len(str(form)), 12):
        norm = Norm(hopper.empty(inputs), 1e-5)
        if form in MIXED:
            supers = make_supers(hopper, form[0], outputs, inputs // 256 * 256)
            weights = [] if inputs % 256 or supers.fault_of_tiles else [supers.tile()]
        else:
            whole = make_codes(hopper, form, outputs, inputs)
            weights = [whole, *([whole.tile()] if whole.fault_of_tiles is None else [])]
        for weight in weights:
            query = choice.describe_codes(weight, torch.bfloat16, hopper.card.capability)
            for rows in draw.sample(ROWS, 4):
                x = hopper.empty(rows, inputs)
                for name in choice.find_solutions(query, rows):
                    if name in OF_TORCH:
                        continue
                    assert choice.load_solution(name, in_float=False)(x, weight).shape == (rows, outputs)
                    if name in CODED_FLOAT.names():
                        assert CODED_FLOAT.load(name)(x, weight).dtype == F32
                    if name in CODED_SUMS.names():
                        assert CODED_SUMS.load(name)(x, weight).shape[-2:] == (rows, outputs)
                    if name in CODED_GATED.names() and is_gated:
                        for gate in (SILU, CLAMPED):
                            out = CODED_GATED.load(name)(x, weight, None, gate)
                            assert out is None or out.shape == (rows, outputs // 2)
                    if name in CODED_NORM_LINEAR.names():
                        has_gate = is_gated and weight.tail is None
                        out, _ = CODED_NORM_LINEAR.load(name)(x, x, norm, weight, None, "silu" if has_gate else "")
                        assert out.shape == (rows, outputs // (1 + has_gate))


def list_experts() -> Iterator[tuple[int, int, int, int]]:
    """Those of all ranks, of one of several that divide each, and of one of several that have some."""
    for num_experts, top_k, width, inner in EXPERTS:
        for ranks in (1, 2, 4, 8):
            if inner % (8 * ranks) == 0:
                yield num_experts, top_k, width, inner // ranks
        if num_experts % 4 == 0 and num_experts // 4 >= top_k:
            yield num_experts // 4, top_k, width, inner


def test_experts(hopper: Recording):
    draw, own = random.Random(3), set[str]()
    for num_experts, top_k, width, inner in list_experts():
        shape = {"width": width, "expert_width": inner, "num_experts": num_experts, "top_k": top_k}
        few, many, coded, many_coded, rounded = (
            find_own(hopper.card, operation, **shape)
            for operation in (RUN_EXPERTS, MANY_EXPERTS, CODED_EXPERTS, MANY_CODED_EXPERTS, ROUNDED_EXPERTS)
        )
        assert few is not None and coded is not None and many is not None and many_coded is not None
        assert rounded is not None
        sizes = (2 * inner, width), (width, inner)
        plain = [(hopper.empty(num_experts, *size), None) for size in sizes]
        for rows in draw.sample(ROWS, 3):
            x, ids = hopper.empty(rows, width), hopper.empty(rows, top_k, dtype=I64)
            factors, gate = hopper.empty(rows, top_k, dtype=F32), draw.choice((SILU, CLAMPED))
            found = [many(x, ids, factors, *plain, gate)]
            if is_few(rows, top_k, num_experts):
                found.append(few(x, ids, factors, *plain, gate))
            form = draw.choice(FORMS)
            stacks = [(make_codes(hopper, form, num_experts * outputs, inputs), None) for outputs, inputs in sizes]
            if not any(codes.fault_of_stack(size[0]) for (codes, _), size in zip(stacks, sizes, strict=True)):
                kernels = (coded, many_coded, rounded) if form[0] == "mxfp4" else (coded, many_coded)
                found += [own_kernel(x, ids, factors, *stacks, gate) for own_kernel in kernels]
            assert all(out is None or out.shape == (rows, width) for out in found)
        own.update(hopper.own)
    assert own >= {
        "plain_experts", "sorted_product", "coded_experts", "mxfp4_parts", "mxfp4_product", "fp8_few", "fp8_product",
        "sort_pairs",
    }


def test_routers(hopper: Recording):
    linear_route, norm_route = (find_own(hopper.card, operation) for operation in (LINEAR_ROUTE, NORM_ROUTE))
    assert linear_route is not None and norm_route is not None
    routers = [(num_experts, top_k, width) for num_experts, top_k, width, _ in EXPERTS]
    for num_experts, top_k, width in [*routers, (1, 1, 64), (130, 9, 2048), (512, 8, 1024), (1024, 8, 512)]:
        router, norm = hopper.empty(num_experts, width), Norm(hopper.empty(width), 1e-5)
        shape = RouteShape(
            top_k=top_k, score="softmax", renormalise=True, scale=1.0, num_groups=1, top_groups=1, group_best=1
        )
        for rows in ROWS:
            x = hopper.empty(rows, width)
            for found in (
                linear_route(x, router, None, None, **shape), norm_route(x, x, norm, router, None, None, **shape)
            ):
                assert found is None or found[-1].shape == found[-2].shape == (rows, top_k)
    assert set(hopper.own) == {"linear_route", "norm_route"}
    # 69,640 bytes of sums and logits in shared memory, of which a source may declare 48 KiB
    assert find_form(512, 1024, 200) is None and find_form(512, 1024, 100) is not None


HEADS = [
    (1, 1), (7, 1), (9, 3), (12, 12), (14, 2), (15, 5), (16, 2), (20, 20), (28, 4), (32, 8), (40, 8), (71, 1), (64, 4)
]
"""Query heads and kv heads."""


def list_attention(gpu: Recording, page_type: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Pages of keys and of values, and query heads."""
    draw = random.Random(5)
    for (heads, kv_heads), head_dim in product(HEADS, (64, 64, 80, 128, 128)):
        page_size = draw.choice((1, 8, 16, 64, 256))
        k, v = (gpu.empty(64, page_size, kv_heads, head_dim, dtype=page_type) for _ in range(2))
        yield k, v, heads


@pytest.mark.parametrize("page_type", [torch.bfloat16, E4M3], ids=str)
def test_decodes(page_type: torch.dtype, hopper: Recording):
    from headrace.kernels.attention.fp8_decodes import fp8_decodes
    from headrace.kernels.few_decodes.hopper import few_decodes

    for k, v, heads in list_attention(hopper, page_type):
        _, page_size, kv_heads, dim = k.shape
        workspace = DecodeWorkspace.allocate(hopper.card.num_sms, heads // kv_heads, dim, hopper.card.device)
        for rows, longest, head in ((1, 300, Head(0.1)), (4, 8192, Head(0.1, 128, 30.0)), (64, 4096, Head(0.1))):
            table = hopper.empty(rows, ceil_div(longest, page_size), dtype=I32)
            step = DecodeStep(hopper.empty(rows, dtype=I32), table, rows, longest)
            q, qkv = hopper.empty(rows, heads, dim), hopper.empty(rows, (heads + 2 * kv_heads) * dim)
            fp8_decodes(q, (k, v), torch.empty_like(q), workspace, head, step, pdl=True)
            for rotary, norms in ((dim, (hopper.empty(dim), hopper.empty(dim))), (dim // 4, None)):
                numbers = hopper.empty(rows, dtype=I64)
                rotation = Rotation(numbers, hopper.empty(99, rotary, dtype=F32), numbers, norms, dict(
                    num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, rotary_dim=rotary, interleaved=norms is None,
                    norm_eps=1e-5, norm_offset=0.0,
                ))
                out = few_decodes(qkv, rotation, (k, v), head, step)
                assert out is None or out.shape == q.shape
    assert "few_decodes" in hopper.own  # of four or eight blocks where no cluster of 16 runs
    assert ("fp8_decodes" in hopper.own) == (page_type == E4M3)


def test_chunks(hopper: Recording):
    from headrace.kernels.attention import hopper as own
    from headrace.kernels.attention.prefill import plan_open_prefill, plan_prefill
    from headrace.kernels.attention.splits import Splitting, SplitWorkspace
    from headrace.layers.attention import reason_against_hopper
    from headrace.layers.attention.contract import AttentionGeometry

    card = hopper.card
    for k, v, heads in list_attention(hopper, torch.bfloat16):
        _, page_size, kv_heads, dim = k.shape
        half, group = "bfloat16", heads // kv_heads
        about = AttentionGeometry("cuda", half, half, card.capability, heads, kv_heads, dim, dim, page_size)
        if reason_against_hopper(about):
            continue
        assert own.is_compiled(dim, torch.bfloat16, False, card.device)
        room = SplitWorkspace.allocate(card.num_sms, kv_heads, max(own.HOPPER_ROWS[dim]), dim, card.device)
        for lengths in ([1], [17, 300], [4096], [1] * 64 + [16320]):
            starts, kv_lens = (hopper.empty(len(lengths) + more, dtype=I32) for more in (1, 0))
            step = starts, kv_lens, hopper.empty(len(lengths), 512, dtype=I32)
            q = hopper.empty(sum(lengths), heads, dim)
            tile = own.choose_tile(dim, group, kv_heads, len(q), card.num_sms)
            for splitting in (None, room and Splitting(kv_lens, 0, room)):
                plans = (
                    plan_prefill(starts, lengths, first=0, group=group, tile=tile, splitting=splitting),
                    plan_open_prefill(starts, len(q), group=group, tile=tile, splitting=splitting),
                )
                for plan in plans:
                    own.prefill(q, (k, v), torch.empty_like(q), plan, Head(0.1), step)
    assert set(hopper.own) == {"prefill"}


def test_spans(hopper: Recording, monkeypatch: pytest.MonkeyPatch):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(varlen, "varlen_attn", lambda q, *_: torch.empty_like(q))  # torch's, for GPUs alone
    for heads, head_dim in ((1, 64), (6, 64), (12, 64), (16, 72), (16, 80), (16, 88), (20, 96), (25, 128), (16, 144)):
        attend = find_own(hopper.card, SPAN_ATTENTION, head_dim=head_dim)
        assert attend is not None
        for lengths in ([1], [65], [64] * 99, [1500] * 3, [196] * 256, [16384], [4, 999]):
            q, k, v = hopper.empty(sum(lengths), 3, heads, head_dim).unbind(1)
            spans = Spans(lengths, hopper.empty(len(lengths) + 1, dtype=I32))
            for angles in (None, hopper.empty(len(q), head_dim, dtype=F32)):
                assert attend(q, k, v, spans, head_dim**-0.5, angles).shape == q.shape
    assert set(hopper.own) == {"span_attention"}


def test_streams(hopper: Recording):
    for width in [*sorted({width for width, _ in DENSE} | {own[2] for own in EXPERTS}), 32, 512, 3520]:
        read = find_own(hopper.card, READ_STREAMS, streams=4, width=width)
        write = find_own(hopper.card, WRITE_READ_STREAMS, streams=4, width=width)
        if read is None or write is None:
            continue
        mix = StreamMix(hopper.empty(24, 4 * width, dtype=F32), hopper.empty(3, dtype=F32), hopper.empty(24, dtype=F32))
        norm, shape = hopper.empty(width), StreamShape(20, 1e-6, 1e-6)
        for rows in ROWS:
            streams, out = hopper.empty(rows, 4, width), hopper.empty(rows, width)
            posts, mixes = hopper.empty(rows, 4, dtype=F32), hopper.empty(rows, 4, 4, dtype=F32)
            x, *_ = read(streams, mix, norm, shape)
            new, also, *_ = write(streams, Pending(out, posts, mixes), mix, norm, shape)
            assert x.shape == also.shape == out.shape and new.shape == streams.shape
    assert ("streams_few" in hopper.own) == (hopper.card.clusters > 0)


def make_bank(gpu: Recording, ends: tuple[int, ...], ranks: int, inputs: int) -> LowRankBank:
    parts = len(ends)
    a, b = gpu.empty(4, parts, ranks, inputs), gpu.empty(4, ranks, ends[-1])
    tiles = gpu.empty(3, make_tiles(ends, torch.device("cpu")).shape[1], dtype=I64)
    published = gpu.empty(count_published(parts, ranks), dtype=I64)
    return LowRankBank(a, b, gpu.empty(4, parts, dtype=I64), ends, tiles, None, published)


def make_rows(gpu: Recording, count: int) -> SlotRows:
    numbers = gpu.empty(count, dtype=I64)
    return SlotRows(numbers, gpu.empty(3, ceil_div(count, 16) + 4, dtype=I64), numbers, 16, [])


def test_adapters(hopper: Recording):
    expand, gated, normed = (find_own(hopper.card, own) for own in (EXPAND, EXPAND_GATED, EXPAND_ADD_NORM))
    assert expand is not None and gated is not None and normed is not None
    for (width, inner), ranks in product(DENSE[::3], (16, 64, 256)):
        for ends in ((width,), (inner, 2 * inner), (width, width + 128, width + 256)):
            bank, norm = make_bank(hopper, ends, ranks, width), Norm(hopper.empty(width), 1e-5)
            for count in (1, 16, 64, 512, 4096):
                rows = make_rows(hopper, count)
                for sums in (hopper.empty(1, count, len(ends) * ranks, dtype=F32), hopper.empty(1, count, 4 * ranks)):
                    reduced, out = Reduced(sums, sums.dtype == torch.bfloat16), hopper.empty(count, ends[-1])
                    expand(reduced, out, bank, rows)
                    if len(ends) == 2:
                        assert gated(reduced, out, bank, rows, "silu").shape == (count, inner)
                    if len(ends) == 1:
                        normed(reduced, out, torch.empty_like(out), norm, bank, rows)
    assert set(hopper.own) == {"expand", "expand_norm", "expand_norm_many"}


def test_adapters_before_attention(hopper: Recording):
    write = find_own(hopper.card, EXPAND_ROPE_WRITE)
    assert write is not None
    for (heads, kv_heads, head_dim), ranks in product(((32, 8, 128), (32, 8, 64), (4, 1, 128), (8, 4, 256)), (16, 64)):
        ends = tuple(count * head_dim for count in (heads, heads + kv_heads, heads + 2 * kv_heads))
        shape = HeadShape(
            num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, rotary_dim=head_dim, interleaved=False,
            norm_eps=1e-5, norm_offset=0.0,
        )
        pages = [hopper.empty(9, 16, kv_heads, head_dim) for _ in range(2)]
        for count, norms in product((17, 256, 8192), (None, (hopper.empty(head_dim), hopper.empty(head_dim)))):
            numbers = hopper.empty(count, dtype=I64)
            rotation = Rotation(numbers, hopper.empty(99, head_dim, dtype=F32), numbers, norms, shape)
            reduced = Reduced(hopper.empty(1, count, 3 * ranks, dtype=F32))
            bank, rows = make_bank(hopper, ends, ranks, 4096), make_rows(hopper, count)
            q = write(reduced, hopper.empty(count, ends[-1]), rotation, *pages, bank, rows)
            assert (q is None) == (head_dim > 128 and norms is not None)
            assert q is None or q.shape == (count, heads, head_dim)
    assert set(hopper.own) == {"expand_rope"}


def test_products_with_adapters(hopper: Recording):
    """Of a row or two, and what is between two products."""
    product_with, chained = (find_own(hopper.card, own) for own in (ADAPTED_LINEAR, ADAPTED_NORM))
    assert product_with is not None and chained is not None
    for (width, inner), ranks in product(DENSE[::3], (16, 32, 256)):
        gate_up, down = (make_bank(hopper, ends, ranks, size) for ends, size in (
            ((inner, 2 * inner), width), ((width,), inner)
        ))
        for count in (1, 2, 200, 512):
            x, residual, norm = hopper.empty(count, width), hopper.empty(count, width), Norm(hopper.empty(width), 1e-5)
            hidden, rows = hopper.empty(count, inner), make_rows(hopper, count)
            for before in (None, (residual, norm)):
                found = product_with(x, hopper.empty(2 * inner, width), None, gate_up, rows, "silu", before)
                assert found is None or found[0].shape == (count, inner)
            for following in (None, gate_up):
                found = chained(hidden, x, residual, norm, down, following, rows)
                assert found is None or (found[0].shape == x.shape and (found[2] is None) == (following is None))
    assert {"plain_rows", "adapted_norm"} <= set(hopper.own)


def test_sparse_attention(hopper: Recording):
    shape = {"head_dim": 512, "rotary_dim": 64, "packed": 1}
    attend = find_own(hopper.card, ATTEND_SLOTS, **shape)
    score, select = (find_own(hopper.card, own, **shape | {"head_dim": 128}) for own in (INDEX_SCORES, SELECT_ENTRIES))
    assert attend is not None and score is not None and select is not None
    slots = Slots(hopper.empty(9, 64, 576, dtype=U8), hopper.empty(9, 64, 8, dtype=U8))
    angles = hopper.empty(99, 64, dtype=F32)
    keys = Slots(hopper.empty(9, 64, 128, dtype=U8), hopper.empty(9, 64, KEY_SCALE_BYTES, dtype=U8))
    for heads, rows in product((1, 8, 16, 64, 65, 128), ROWS):
        numbers, everything = hopper.empty(rows, dtype=I64), slice(None)
        queries = Queries(hopper.empty(rows, heads, 512), numbers, angles, 1e-6)
        for seen, others in ((128, 0), (128, 512), (1, 2048)):
            window, entries = (SeenSlots(slots, hopper.empty(rows, own, dtype=I64), numbers) for own in (seen, others))
            out = attend(
                queries, window, entries if others else None, sinks=hopper.empty(heads, dtype=F32), scale=0.04
            )
            assert out.shape == queries.q.shape
        for longest in (1, 4096, 4097, 1 << 18):
            view = EntryView(hopper.empty(8, ceil_div(longest, 64), dtype=I32), numbers, numbers, longest, rows, None)
            weights, about = hopper.empty(rows, heads, dtype=F32), dict(top_k=512, tokens=everything)
            scores = score(queries._replace(q=hopper.empty(rows, heads, 128)), weights, keys, view, scale=1.0, **about)
            assert scores.shape == (rows, longest) and select(scores, view, per_page=64, **about).shape == (rows, 512)
    assert set(hopper.own) == {"sparse_attention", "index_scores", "select_entries"}


@pytest.mark.parametrize("card", [*HOPPERS, *OTHERS], ids=lambda card: card.name)
def test_collectives(card: Card, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    for dtype, ranks in product((torch.bfloat16, F32), (2, 3, 8)):
        with pretend(monkeypatch, card) as gpu:
            group = PushCollectives([1 << 41] * ranks, 0, card.device)
            for (width, _), rows in product(DENSE[::4], ROWS[::2]):
                x, weight = gpu.empty(rows, width, dtype=dtype), gpu.empty(width, dtype=dtype)
                sums = gpu.empty(4, rows, width, dtype=F32)
                for out in (group.all_reduce(x), group.all_reduce(x, torch.empty_like(x)), group.broadcast(x)):
                    assert out is None or out.shape == x.shape
                for pending in (x, sums):
                    found = group.reduce_add_norm(pending, torch.empty_like(x), weight, eps=1e-5, offset=0.0)
                    assert found is None or found[0].shape == x.shape
                gathered, parts = group.all_gather(x), group.exchange(gpu.empty(ranks, rows, dtype=dtype))
                assert gathered is None or gathered.shape == (rows, ranks * width)
                assert parts is None or parts.shape == (ranks, rows)
            assert set(gpu.own) == {"collective"}


@pytest.mark.parametrize("card", OTHERS, ids=lambda card: card.name)
def test_nothing_of_hopper_is_compiled_elsewhere(card: Card, monkeypatch: pytest.MonkeyPatch):
    with pretend(monkeypatch, card) as gpu:
        for outputs, inputs, _ in list_weights(4, 8):
            linear = find_own(card, LINEAR, in_features=inputs, out_features=outputs)
            for rows, form in product((1, 16, 256, 4096), FORMS):
                x, weight = gpu.empty(rows, inputs), make_codes(gpu, form, outputs, inputs)
                if linear is not None:
                    linear(x, gpu.empty(outputs, inputs), None)
                query = choice.describe_codes(weight, torch.bfloat16, card.capability)
                for name in set(choice.find_solutions(query, rows)) - OF_TORCH:
                    choice.load_solution(name, in_float=False)(x, weight)
        for (num_experts, top_k, width, inner), rows in product(EXPERTS, (1, 16, 256)):
            x, ids = gpu.empty(rows, width), gpu.empty(rows, top_k, dtype=I64)
            factors, sizes = gpu.empty(rows, top_k, dtype=F32), ((2 * inner, width), (width, inner))
            plain = [(gpu.empty(num_experts, *size), None) for size in sizes]
            coded = [(make_codes(gpu, ("mxfp4", 32), num_experts * outputs, own), None) for outputs, own in sizes]
            for operation, stacks in (
                (RUN_EXPERTS, plain), (MANY_EXPERTS, plain), (CODED_EXPERTS, coded), (MANY_CODED_EXPERTS, coded)
            ):
                run = find_own(card, operation, width=width, expert_width=inner)
                if run is not None:
                    run(x, ids, factors, *stacks, SILU)
        assert bool(gpu.sources) == (card.capability[0] == 10)
        for name, options in gpu.sources:
            assert b"wgmma.mma_async" not in nvrtc.read_source(name) and options[0] == "-arch=sm_100a"


def test_what_a_driver_refuses_is_refused(monkeypatch: pytest.MonkeyPatch):
    with pretend(monkeypatch, H200) as gpu:
        kernel = cuda_source.load_kernel("few_decodes", H200.device, 200 << 10, CLUSTER=16)
        assert isinstance(kernel, RecordedKernel)
        for blocks, threads in ((0, 32), (16, 2048), (16, 33)):
            with pytest.raises(Refused, match="grid or block"):
                kernel.launch(blocks, threads)
        with pytest.raises(Refused, match="clusters"):
            kernel.launch(16, 128)
        kernel.count_clusters(16, 128)
        kernel.launch(32, 128)
        with pytest.raises(Refused, match="clusters"):
            kernel.launch(24, 128)
        with pytest.raises(Refused, match="shared memory"):
            kernel.launch(16, 128, shared_bytes=210 << 10)
        with pytest.raises(Refused, match="shared memory"):
            cuda_source.load_kernel("few_decodes", H200.device, 228 << 10)
        with pytest.raises(Refused, match="strides"):
            cuda_source.describe_boxes(gpu.empty(16, 100), (16, 64))
        assert len(gpu.launches) == 1
    for shape, strides, box in (([0, 8], [128], [64, 8]), ([64, 8], [128], [64, 257]), ([64, 8], [100], [64, 8])):
        with pytest.raises(Refused):
            check_map(9, 2, shape, strides, box, 3, 0)
    check_map(9, 2, [64, 8], [128], [64, 8], 3, 0)
