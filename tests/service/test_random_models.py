"""Any model, form of weights and schedule on a CPU: what its kernels and a crowd of neighbours say is what plain torch
says of each request alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from random_models import draw_case, find_distances, run_case

from headrace.kernels import native
from headrace.kernels.native.loading import NativeLibrary

SEEDS = (1, 5, 10, 15, 17, 19, 26, 30, 36, 37, 38)
"""Between them every form of weights and of keys and values, both types, windows, soft-caps, experts stored and
plain."""
MOST_APART, MOST_APART_ROUNDED = 2e-3, 0.05


@pytest.mark.parametrize(
    "seed", [seed if i % 2 else pytest.param(seed, marks=pytest.mark.slow) for i, seed in enumerate(SEEDS)]
)
def test_neighbours_and_kernels_change_nothing(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if native.build().status != "ready":
        pytest.skip("no native kernels")
    case = draw_case(seed)
    outputs = run_case(case, tmp_path)
    monkeypatch.setattr(NativeLibrary, "find", lambda _: None)
    distances = find_distances(case, outputs, tmp_path)
    assert len(distances)
    assert distances.max() < MOST_APART if case.loses_nothing else distances.mean() < MOST_APART_ROUNDED, case
