"""Where and in what type the Triton kernels are tested, with the error each type may show against float64."""

from __future__ import annotations

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


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """||out - expected|| / ||expected|| in float64; NaN never passes a comparison."""
    expected = expected.double()
    return float((out.double().to(expected.device) - expected).norm() / expected.norm())
