"""Figures of other kernels than own ones say so."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks import cuda, fallbacks
from headrace.kernels.cuda_source import CudaSourceError, fallback

pytestmark = pytest.mark.usefixtures("breaks_kernels")


def make_llm(count: int) -> SimpleNamespace:
    """One whose engine counts so many."""
    return SimpleNamespace(stats=lambda: SimpleNamespace(kernel_fallbacks_total=count))


def test_what_falls_back_is_told_once(capsys: pytest.CaptureFixture[str]):
    fallbacks.tell()
    assert not fallbacks.has_fallen_back(make_llm(0)) and capsys.readouterr().out == ""
    for _ in range(2):
        with fallback("products are torch's"):
            raise CudaSourceError("product.cu(3): error: missing closing quote\n  line")
    fallbacks.tell()
    assert fallbacks.has_fallen_back(make_llm(0))
    assert capsys.readouterr().out == (
        "fell back, so that figures above are of other kernels: "
        "products are torch's: product.cu(3): error: missing closing quote\n"
    )


def test_a_row_of_other_kernels_is_marked_and_compared_with_nothing(capsys: pytest.CaptureFixture[str]):
    assert fallbacks.has_fallen_back(make_llm(1)), "in a process of the engine's own"
    row = cuda.row("llama-3.1-8b", "stream1", 2.0, 3.0, 1.0)
    assert (row["times_faster"], row["percent_of_floor"]) == (1.5, 50)
    cuda.print_table([row, cuda.mark(row)])
    plain, marked = capsys.readouterr().out.splitlines()[-2:]
    assert plain.startswith("llama-3.1-8b  ") and "1.5" in plain.split() and "50" in plain.split()
    assert marked.startswith("llama-3.1-8b (fell back) stream1") and marked.split().count("-") == 3
