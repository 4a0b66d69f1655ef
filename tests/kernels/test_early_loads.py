"""What kernels ask for before the previous one has ended stays there."""

from __future__ import annotations

from pathlib import Path

import headrace

SOURCES = sorted((Path(headrace.__file__).parent / "csrc/cuda").glob("*.cu*"))
IN_BRANCHES = {"coded_rows.cu"}
"""Whose loads are in branches, where ptxas leaves them."""


def test_volatile_loads_are_ordered_with_the_wait():
    """ptxas moves loads of constant memory behind ``griddepcontrol.wait``, whatever the source says."""
    assert len(SOURCES) > 20
    found = [path.name for path in SOURCES if path.name not in IN_BRANCHES and "ld.global.nc" in path.read_text()]
    assert not found, "plain volatile loads stay before the wait"


def test_norm_weights_of_plain_rows_are_asked_for_by_plain_loads():
    text = next(path for path in SOURCES if path.name == "plain_rows.cu").read_text()
    before, wait, _ = text[text.index("void load_rows(") :].partition("griddepcontrol.wait")
    assert wait and "call.norm" in before and "__ldg((" not in before


def test_kernels_of_a_token_have_no_fence_of_the_gpus_memory():
    """A barrier of the cluster that releases memory is compiled to one."""
    kernels = ("few_decodes", "norm_route", "fp8_rows", "fp8_few", "streams_few", "plain_rows", "tiled_rows")
    texts = [path.read_text() for path in SOURCES if path.name.removesuffix(".cu") in kernels]
    assert len(texts) == len(kernels)
    assert not [text for text in texts if "barrier.cluster.arrive.release" in text]
