"""GGUF blocks into packed layout: the same numbers as the gguf package dequantises, stacked in any mixture of types."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from headrace.kernels import native
from headrace.kernels.block_scaled import dequantise_mxfp4
from headrace.kernels.coded_linear.codes import Code, stack_matrices
from headrace.kernels.coded_linear.device_codes import pack_for_device, read_codes
from headrace.kernels.packed_linear.blocks import BLOCK_TYPES, ROUNDED_SIZES, WeightBlocks, pack_blocks
from headrace.kernels.packed_linear.layout import Format, unpack

FLOAT16_PLACES = {
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "TQ1_0": (52,), "TQ2_0": (64,),
    "MXFP4": (), "MXFP4_PAIRS": (), "IQ1_M": (),
}
"""Of float16 numbers in a block; one at its start where nothing is said."""
INPUTS = 512


@pytest.fixture(params=["torch", "native"], autouse=True)
def packer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(native.NATIVE, "find", lambda: None)
    elif native.build().status != "ready":
        pytest.skip("no native kernels")


def draw_blocks(kind: str, rows: int, inputs: int = INPUTS) -> WeightBlocks:
    """Random codes and scales that are sane numbers."""
    rng, block = np.random.default_rng(rows), BLOCK_TYPES[kind]
    raw = rng.integers(0, 256, (rows * inputs // block.inputs, block.num_bytes), dtype=np.uint8)
    for place in FLOAT16_PLACES.get(kind, (0,)):
        raw[:, place : place + 2] = rng.uniform(0.001, 0.02, len(raw)).astype(np.float16).view(np.uint8).reshape(-1, 2)
    if kind.startswith("MXFP4"):  # a power of two
        raw[:, 0] = rng.integers(104, 144, len(raw))
    if kind == "IQ1_M":  # its float16 lies in four pieces
        raw[:, 49:56:2] &= 15
        raw[:, 55] |= 32
    return WeightBlocks(kind, torch.from_numpy(raw.reshape(rows, -1)))


def expected_of(blocks: WeightBlocks) -> torch.Tensor:
    if blocks.kind == "MXFP4_PAIRS":
        rows = blocks.raw.view(len(blocks.raw), -1, 17)
        return torch.stack(
            [dequantise_mxfp4(row[:, 1:].flatten()[None], row[None, :, 0], torch.float32)[0] for row in rows]
        )
    return torch.from_numpy(dequantize(blocks.raw.numpy(), GGMLQuantizationType[blocks.kind]))


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_blocks_keep_their_values(kind: str):
    parts = [draw_blocks(kind, rows) for rows in (20, 16, 5)]
    packed = pack_blocks(parts)
    expected = torch.cat([expected_of(part) for part in parts])
    error = (unpack(packed, torch.float32) - expected).abs()
    if kind == "Q6_K" or kind in ROUNDED_SIZES:  # 16 values a scale become 32
        allowed = expected.unflatten(1, (-1, 32)).abs().amax(2).repeat_interleave(32, 1) / 253
    elif kind.endswith("K") or kind == "IQ4_XS":  # scale and min are products, rounded to float16
        allowed = expected.abs() * 2**-10 + 0.02 * 63 * 2**-10
    else:
        allowed = torch.zeros_like(expected)
    assert (error <= allowed).all()
    assert (
        packed.shape == expected.shape
        and packed.num_bytes <= expected.numel() * (0.63 if packed.format.has_nibbles else 1.13) * 48 / 41
    )
    assert packed.format.has_nibbles == (
        kind not in ROUNDED_SIZES and BLOCK_TYPES[kind].num_bytes * 8 / BLOCK_TYPES[kind].inputs <= 5
    )


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_codes_for_a_gpu_keep_their_values(kind: str):
    """In 4 bits where packed layout has them; also groups that are all alike, and beside parts of another type."""
    blocks = draw_blocks(kind, 20)
    if kind == "Q4_1":
        blocks.raw.view(20, -1, 20)[:, 3, :2] = 0  # no scale: the group is its min
    matrix, expected = read_codes(blocks, torch.device("cpu")), expected_of(blocks)
    allowed = expected.abs() * 1e-6 + 1e-7
    if kind == "Q6_K" or kind in ROUNDED_SIZES:
        allowed = expected.unflatten(1, (-1, 32)).abs().amax(2).repeat_interleave(32, 1) / 253
    elif matrix.zeros is not None:  # scales and zero points are rounded to float16
        allowed = expected.unflatten(1, (-1, 32)).abs().amax(2).repeat_interleave(32, 1) / 512 + 1e-7
    elif kind.endswith("K") or kind == "IQ4_XS":
        allowed = expected.abs() * 1e-5 + 0.02 * 63 * 1e-5
    assert ((matrix.dequantise(torch.float32) - expected).abs() <= allowed).all()
    packed = pack_for_device(matrix)
    assert packed is not None and packed.is_short == BLOCK_TYPES[kind].format.has_nibbles
    assert packed.has_pairs == (matrix.zeros is not None), "a word for each 32 weights, not two"
    stacked = stack_matrices([matrix, read_codes(draw_blocks("Q8_0", 8), torch.device("cpu"))])
    assert (stacked is None) == (matrix.code is not Code.INT)
    if stacked is not None:
        assert ((stacked.dequantise(torch.float32)[:20] - expected).abs() <= allowed).all()


def test_scales_that_float16_does_not_hold():
    """Numbers as small as these are nothing beside others; as large, they stay as they are in the file, which is
    expanded."""
    blocks = draw_blocks("MXFP4", 3)
    blocks.raw[1, 0] = 90
    assert blocks.can_be_packed
    expected = expected_of(blocks)
    assert expected[1, :32].abs().max() < 1e-9
    expected[1, :32] = 0
    assert torch.equal(unpack(pack_blocks([blocks]), torch.float32), expected)
    blocks.raw[2, 17] = 144
    assert not blocks.can_be_packed


def test_types_may_differ_within_a_stack():
    parts = [
        draw_blocks("Q4_1", 24), draw_blocks("Q8_0", 8), draw_blocks("Q5_1", 33), draw_blocks("MXFP4", 9),
        draw_blocks("MXFP4_PAIRS", 18), draw_blocks("IQ4_NL", 7)
    ]
    packed = pack_blocks(parts)
    assert packed.format is Format.INT8_GROUP
    assert torch.equal(unpack(packed, torch.float32), torch.cat([expected_of(part) for part in parts]))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_inputs_that_do_not_fill_a_word_are_padded_with_zeros(kind: str):
    parts = [draw_blocks(kind, rows, inputs=96) for rows in (7, 70)]
    packed = pack_blocks(parts)
    assert torch.equal(unpack(packed, torch.float32), torch.cat([expected_of(part) for part in parts]))
    assert not packed.words[:, 3 * packed.words.shape[1] // 4 :].any() and not packed.scales[:, 3:].any()
