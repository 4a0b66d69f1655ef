"""Own CPU kernels in tests: compiled once for all test processes, and masked to each instruction set in turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.kernels import native

ISAS = ("scalar", "avx2", "avxvnni", "avx512", "amx")


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this machine has; kernels use it until the test is over."""
    found = native.build()
    if found.status != "ready":
        pytest.skip(f"no native kernels: {found.detail}")
    if native.select_isa(request.param) != request.param:
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    native.select_isa()
