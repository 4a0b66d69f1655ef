"""Copies of whole pages: every solution against plain torch, on values, for parts of any width."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.pages import PageParts, cpu, reference

DEVICES = [pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=pytest.mark.cuda)]
WIDTHS = {"wide": (256, 4096, 64), "odd": (7, 3, 130), "words": (12, 20), "one": (8,)}


def make(widths: tuple[int, ...], device: str) -> tuple[PageParts, torch.Tensor]:
    torch.manual_seed(0)
    tensors = [torch.randint(0, 255, (9, width), dtype=torch.uint8, device=device) for width in widths]
    parts = PageParts.of(tensors)
    return parts, torch.randint(0, 255, (6, parts.page_bytes), dtype=torch.uint8, device=device)


def check(solution, widths: tuple[int, ...], device: str) -> None:
    pages, places = torch.tensor([8, 1, 4], device=device), torch.tensor([5, 0, 2], device=device)
    parts, rows = make(widths, device)
    expected = rows.clone()
    solution.gather_pages(parts, pages, rows, places)
    reference.gather_pages(parts, pages, expected, places)
    assert torch.equal(rows, expected)
    for page, place in zip(pages.tolist(), places.tolist(), strict=True):
        assert torch.equal(rows[place], torch.cat([tensor[page] for tensor in parts.tensors]))
    parts, rows = make(widths, device)
    other, _ = make(widths, device)
    solution.scatter_pages(parts, pages, rows, places)
    reference.scatter_pages(other, pages, rows, places)
    for tensor, wanted in zip(parts.tensors, other.tensors, strict=True):
        assert torch.equal(tensor, wanted)


@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
def test_native_copies(widths: tuple[int, ...]):
    check(cpu, widths, "cpu")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
def test_triton_copies(widths: tuple[int, ...], device: str):
    pytest.importorskip("triton")
    from headrace.kernels.pages import triton

    check(triton, widths, device)


def test_rows_have_their_parts_in_order():
    tensors = [torch.arange(24, dtype=torch.float32).view(3, 4, 2), torch.arange(6, dtype=torch.int16).view(3, 2)]
    parts = PageParts.of(tensors)
    assert (parts.page_bytes, parts.word) == (36, 4)
    rows = torch.zeros((1, 36), dtype=torch.uint8)
    reference.gather_pages(parts, torch.tensor([1]), rows, torch.tensor([0]))
    assert rows[0, :32].view(torch.float32).tolist() == list(range(8, 16))
    assert rows[0, 32:].view(torch.int16).tolist() == [2, 3]
