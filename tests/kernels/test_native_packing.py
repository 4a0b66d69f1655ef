"""Weights packed by the native library are those that plain torch packs, to the last bit, on every instruction set."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cpu_isas import isa  # noqa: F401  (a fixture)
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels import native
from headrace.kernels.packed_linear import layout, quantise
from headrace.kernels.packed_linear.layout import PackedMatrix, pack_floats
from headrace.kernels.packed_linear.quantise import quantise_int4, quantise_int8, quantise_int8_groups

QUANTISERS = (quantise_int4, quantise_int8, quantise_int8_groups)
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def draw_weight(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Of rows of very different sizes, with zeros, values as far apart as float16 scales reach, and halves of codes."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-6, 3, (shape[0], 1), generator=generator)
    weight[torch.rand(shape, generator=generator) < 0.1] = 0.0
    weight[-1] = 0.0
    if shape[0] > 2:
        weight[1] = (torch.arange(shape[1]) % 31 - 15) / 2
        weight[2] = 3.0
    return weight.to(dtype)


def assert_same(pack: Callable[[torch.Tensor], PackedMatrix], weight: torch.Tensor) -> None:
    ours = pack(weight)
    with pytest.MonkeyPatch.context() as patch:
        for module in (layout, quantise):
            patch.setattr(module, "pack_natively", lambda *_: None)
        theirs = pack(weight)
    assert (ours.format, ours.shape, ours.tensors.keys()) == (theirs.format, theirs.shape, theirs.tensors.keys())
    for name, tensor in ours.tensors.items():
        assert torch.equal(tensor.view(torch.int16), theirs.tensors[name].view(torch.int16)), name


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(64, 192), (50, 70), (33, 1), (1, 64), (17, 130)])
def test_every_instruction_set(isa: str, shape: tuple[int, int], dtype: torch.dtype):  # noqa: F811
    weight = draw_weight(shape, dtype)
    for pack in (*QUANTISERS, *((pack_floats,) if dtype != torch.float16 else ())):
        assert_same(pack, weight)
    assert_same(quantise_int4, draw_weight((shape[0], 2 * shape[1]), dtype)[:, : shape[1]])  # rows apart


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 60), st.integers(1, 200), st.sampled_from(TYPES), st.sampled_from(QUANTISERS), st.integers(0, 99))
def test_any_shape(
    rows: int, columns: int, dtype: torch.dtype, pack: Callable[[torch.Tensor], PackedMatrix], seed: int
):
    if native.build().status != "ready":
        pytest.skip("no native kernels")
    assert_same(pack, draw_weight((rows, columns), dtype, seed))


def test_several_threads(isa: str):  # noqa: F811
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for pack in QUANTISERS:
            assert_same(pack, draw_weight((700, 96), torch.bfloat16))
    finally:
        torch.set_num_threads(before)


def test_what_does_not_fit_is_refused():
    ops = native.NATIVE.find() if native.build().status == "ready" else pytest.skip("no native kernels")
    matrix = layout.allocate(layout.Format.INT4_GROUP, 32, 64)
    for weight, form in (
        (torch.zeros(32, 128), 4), (torch.zeros(48, 64), 4), (torch.zeros(32, 64), 3), (torch.zeros(32, 64), 2),
        (torch.zeros(32, 64), 1)
    ):
        with pytest.raises(RuntimeError):
            ops.pack_weight(weight, form, matrix.words, matrix.scales, matrix.mins)
