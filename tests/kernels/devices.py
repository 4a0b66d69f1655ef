"""Where and in what type the Triton kernels are tested, with the error each type may show against float64."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

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
