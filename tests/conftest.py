"""Shared by all tests: GPU tests skip without a device; one thread per process, since several run side by side."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest  # noqa: E402
import torch  # noqa: E402

HAS_GPU = torch.cuda.is_available()

if not HAS_GPU:  # before any test module imports a kernel: Triton decides at the import
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked:
        return
    if not HAS_GPU:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
