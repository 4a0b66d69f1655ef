"""Where and in what type the Triton kernels are tested, with the error each type may show against float64."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from headrace.kernels.coded_linear.device_codes import Fp8Rows

INTERPRETED = [
    pytest.param("cpu", torch.float32, 1e-5, marks=pytest.mark.interpreted),
    pytest.param("cpu", torch.float16, 2e-3, marks=pytest.mark.interpreted),
]
ON_GPU = [
    pytest.param("cuda", torch.float16, 2e-3, marks=pytest.mark.cuda),
    pytest.param("cuda", torch.bfloat16, 1e-2, marks=pytest.mark.cuda),
]
DEVICES = INTERPRETED + ON_GPU


def in_turns(cases: Iterable[object]) -> list[object]:
    """Parameters (case, device, dtype, tolerance): a GPU takes all, the interpreter each case in one type, the next in
    the next type, and the others with --slow."""
    found = []
    for number, case in enumerate(cases):
        for index, own in enumerate(DEVICES):
            is_spared = index < len(INTERPRETED) and index != number % len(INTERPRETED)
            marks = [*own.marks, *([pytest.mark.slow] if is_spared else [])]
            found.append(pytest.param(case, *own.values, marks=marks))
    return found


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """||out - expected|| / ||expected|| in float64; NaN never passes a comparison."""
    expected = expected.double()
    return float((out.double().to(expected.device) - expected).norm() / expected.norm())


def check_rows(rows: Fp8Rows, wanted: Fp8Rows, device: str, rtol: float = 1e-6) -> None:
    """Rows in FP8 are as wanted, up to a code: a quotient may fall on the other side of a midpoint between two."""
    assert rows.codes.dtype == torch.float8_e4m3fn and rows.codes.shape == wanted.codes.shape
    torch.testing.assert_close(rows.scales, wanted.scales, rtol=rtol, atol=0)
    # Triton's interpreter loses the carry where rounding reaches the next power of two
    judged = torch.ones_like(rows.codes, dtype=torch.bool)
    if device != "cuda":
        mantissa = wanted.codes.view(torch.uint8) & 7
        judged = (mantissa != 0) & (mantissa != 7)
    distance = (rows.codes.float() - wanted.codes.float()).abs()
    assert judged.float().mean() > 0.3
    assert distance[judged].le(wanted.codes.float()[judged].abs() / 8 + 2.0**-9).all()
