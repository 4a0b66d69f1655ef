"""Writing latents: norm, rotation and packing in Triton against plain torch, byte by byte."""

from __future__ import annotations

import pytest
import torch
from devices import DEVICES, check_rows, relative_error

from headrace.kernels.coded_linear.device_codes import Fp8Rows
from headrace.kernels.coded_linear.reference import quantise_rows
from headrace.kernels.compressor import RowNorm
from headrace.kernels.latents import LatentNorm, LatentRows, reference
from headrace.kernels.latents.slots import Slots
from headrace.kernels.rowwise.reference import rms_norm

PAGE = 8


def make_slots(
    kind: str, head_dim: int, device: str, pages: int = 4, dtype: torch.dtype = torch.float32, per_page: int = PAGE
) -> Slots:
    """Pages with padding behind, each byte 0xAB."""
    if kind == "plain":
        return Slots(torch.full((pages, per_page, head_dim), 7.0, dtype=dtype, device=device))
    value, scale = {
        "vectors": (head_dim + 64, 8), "keys": (head_dim, 4), "narrow keys": (head_dim // 2, head_dim // 32)
    }[kind]
    raw = torch.full((pages, per_page * (value + scale) + 64), 0xAB, dtype=torch.uint8, device=device)
    scales = raw[:, per_page * value : per_page * (value + scale)].unflatten(1, (per_page, scale))
    return Slots(
        raw[:, : per_page * value].unflatten(1, (per_page, value)),
        scales.view(torch.float8_e8m0fnu) if kind == "narrow keys" else scales,
    )


def copy(slots: Slots) -> Slots:
    """The same bytes elsewhere, strides included."""
    if slots.scales is None:
        return Slots(slots.values.clone())
    base = slots.values._base
    assert base is not None
    twin = base.clone()
    values, scales = (
        torch.as_strided(twin, part.shape, part.stride(), part.storage_offset())
        for part in (slots.values, slots.scales.view(torch.uint8))
    )
    return Slots(values, scales.view(slots.scales.dtype))


def packing_error(device: str) -> float:
    """How far vectors packed by two solutions may be apart: the interpreter cuts bits off where a GPU rounds."""
    return 0.08 if device == "cpu" else 5e-3


def make_norm(head_dim: int, rotary_dim: int, device: str, dtype: torch.dtype) -> LatentNorm:
    generator = torch.Generator().manual_seed(head_dim)
    angles = torch.rand(500, rotary_dim // 2, generator=generator) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    weight = torch.rand(head_dim, generator=generator) + 0.5
    return LatentNorm(weight.to(device, dtype), 1e-6, table.to(device))


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
@pytest.mark.parametrize(("kind", "head_dim", "rotary_dim"), [
    ("plain", 128, 32), ("vectors", 128, 64), ("vectors", 512, 64),
])
def test_triton_writes_what_plain_torch_writes(
    kind: str, head_dim: int, rotary_dim: int, device: str, dtype: torch.dtype, tolerance: float
):
    pytest.importorskip("triton")
    from headrace.kernels.compressor.fused import finish

    generator = torch.Generator().manual_seed(1)
    norm = make_norm(head_dim, rotary_dim, device, dtype)
    ours = make_slots(kind, head_dim, device, dtype=dtype)
    theirs = copy(ours)
    wide = torch.randn(9, head_dim + 40, generator=generator) * torch.logspace(-5, 3, 9)[:, None]
    x = wide.to(device, dtype)[:, 24 : 24 + head_dim]  # strided
    positions = torch.randint(0, 500, (9,), generator=generator).to(device)
    numbers = (torch.randperm(3 * PAGE, generator=generator)[:9] + PAGE).to(device)
    query = torch.randn(9, 200, generator=generator).to(device, dtype)[:, 40:136]  # strided, no power of two
    weight = (torch.rand(96, generator=generator) + 0.5).to(device, dtype)
    normalised = finish(RowNorm(query, weight, 1e-6), LatentRows(x, norm, positions, ours, numbers), ())
    assert isinstance(normalised, torch.Tensor) and normalised.dtype == dtype
    assert relative_error(normalised, rms_norm(query, weight, 1e-6)) < tolerance
    for group in (0, 32, 128):  # in FP8, as the product of queries takes them
        rows = finish(RowNorm(query, weight, 1e-6, group), LatentRows(x, norm, positions, ours, numbers), ())
        assert isinstance(rows, Fp8Rows)
        check_rows(rows, quantise_rows(normalised, group), device)
    reference.write_latents(LatentRows(x, norm, positions, theirs, numbers))
    everything = torch.arange(4 * PAGE, device=device)
    assert relative_error(ours.gather(numbers, torch.float32), theirs.gather(numbers, torch.float32)) < (
        tolerance if kind == "plain" else packing_error(device)
    )
    if ours.scales is not None:
        assert (ours.scales == theirs.scales).float().mean() > 0.99
    if ours.scales is not None and device == "cuda":
        assert (ours.values == theirs.values).float().mean() > 0.98, "but roundings of sums in another order"
    rest = torch.ones(4 * PAGE, dtype=torch.bool, device=device)
    rest[numbers] = False
    for one, other in ((ours.values, theirs.values), (ours.scales, theirs.scales)):
        if one is not None and other is not None:
            pages, at = everything[rest] // PAGE, everything[rest] % PAGE
            assert torch.equal(one[pages, at], other[pages, at]), "other slots stay as they are"


@pytest.mark.parametrize("device", [
    pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=pytest.mark.cuda)
])
@pytest.mark.parametrize("count", [1, 70])
def test_index_tensors_of_decodes(count: int, device: str):
    pytest.importorskip("triton")
    from headrace.kernels.latents import decodes

    generator = torch.Generator().manual_seed(count)
    lens = torch.randint(1, 700, (count,), generator=generator)
    lens[0] = 512  # ends windows of both ratios
    kv_lens = lens.int().to(device)
    # a row of a wider table
    table = torch.randint(1, 99, (count, 5), generator=generator).int().to(device)[:, 1:4]
    for window, per_page in ((128, 256), (40, 64)):
        ours = decodes.decode_windows(table, kv_lens, window=window, per_page=per_page)
        theirs = reference.decode_windows(table, kv_lens, window=window, per_page=per_page)
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    for ratio, ring in ((4, 8), (4, 40), (128, 128)):
        shape = {"ratio": ratio, "block": 128, "ring": ring, "per_page": 2 * ring}
        state = zip(
            decodes.decode_state(table, kv_lens, **shape), reference.decode_state(table, kv_lens, **shape), strict=True
        )
        assert all(torch.equal(one, other) and one.dtype == torch.int64 for one, other in state)
        entries = zip(
            decodes.decode_entries(kv_lens, ratio=ratio), reference.decode_entries(kv_lens, ratio=ratio), strict=True
        )
        assert all(torch.equal(one, other) and one.dtype == torch.int64 for one, other in entries)
    for length, per_page in ((0, 64), (3, 2), (1024, 64), (1025, 512)):  # up to and beyond the table
        own, everyones = table, table[:1].expand(count, -1)
        for pages in (own, everyones):
            ours = decodes.list_entries(pages, count=length, per_page=per_page)
            assert ours.dtype == torch.int64 and ours.shape == (count, length)
            assert torch.equal(ours, reference.list_entries(pages, count=length, per_page=per_page))
    assert reference.list_entries(table[:1], count=5, per_page=2)[0].tolist() == [
        2 * int(table[0, at // 2]) + at % 2 for at in range(5)
    ]
    numbers = reference.decode_state(table, kv_lens, ratio=128, block=128, ring=128, per_page=256)[1].tolist()
    assert numbers == [n // 128 - 1 if n % 128 == 0 else -1 for n in lens.tolist()]
