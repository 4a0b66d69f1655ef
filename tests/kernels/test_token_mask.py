"""Token masks against numpy's own unpacking of bits, and what is greatest before and after."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cpu_isas import isa  # noqa: F401

from headrace.kernels.token_mask import cpu, reference

DEVICES = [pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=pytest.mark.cuda)]
CASES = [(97, 3, [0, 1, 2], 0.5), (64, 4, [3, 1], 0.02), (1, 1, [0], 1.0), (4100, 2, [1], 0.999), (3000, 5, [4, 0, 2], 0.001), (33, 2, [0, 1], 0.0)]
"""Vocabulary, rows, those with a mask, and the share of tokens that it allows."""


def _check(mask, case, device="cpu"):
    vocab_size, num_rows, rows, share = case
    draw = np.random.default_rng(vocab_size)
    wide = torch.from_numpy(draw.standard_normal((num_rows, vocab_size + 3)).astype(np.float32)).to(device)
    logits = wide[:, :vocab_size]
    if num_rows > 3:
        logits[3, vocab_size // 2] = float("nan")
    bits = draw.random((len(rows), -(-vocab_size // 32) * 32)) < share
    masks = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32)).to(device)
    expected, before = logits.cpu().numpy().copy(), wide.clone()
    for row, allowed in zip(rows, bits, strict=True):
        expected[row, ~allowed[:vocab_size]] = -np.inf
    expected = torch.from_numpy(expected)
    mask_of_row = torch.full((num_rows,), -1, dtype=torch.int32)
    mask_of_row[rows] = torch.arange(len(rows), dtype=torch.int32)
    raw, values, ids = (part.cpu() for part in mask(logits, masks, mask_of_row.to(device)))
    assert torch.equal(logits.cpu().nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
    assert torch.equal(wide[:, vocab_size:], before[:, vocab_size:]), "beyond the row nothing is written"
    assert torch.equal(raw.nan_to_num(nan=7.0), before[:, :vocab_size].cpu().amax(1).nan_to_num(nan=7.0))
    assert torch.equal(values.nan_to_num(nan=7.0), expected.amax(1).nan_to_num(nan=7.0))
    assert ids.dtype == torch.int64 and ((ids >= 0) & (ids < vocab_size)).all()
    is_sound = values.isfinite()
    assert torch.equal(expected.gather(1, ids.unsqueeze(1)).squeeze(1)[is_sound], values[is_sound])


@pytest.mark.parametrize("case", CASES)
def test_reference_forbids_what_the_bits_say(case):
    _check(reference.token_mask, case)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("case", CASES)
def test_own_kernel_forbids_what_the_bits_say(case):
    _check(cpu.token_mask, case)


@pytest.mark.usefixtures("isa")
def test_masks_of_rows_that_are_not_there_are_refused():
    logits, masks = torch.zeros(2, 40), torch.zeros((1, 2), dtype=torch.int32)
    for wrong in (masks[:, :1], masks.long()):
        with pytest.raises(RuntimeError, match="masks must be"):
            cpu.token_mask(logits, wrong, torch.tensor([0, -1], dtype=torch.int32))
    with pytest.raises(RuntimeError, match="there is not"):
        cpu.token_mask(logits, masks, torch.tensor([-1, 1], dtype=torch.int32))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_triton_forbids_what_the_bits_say(case, device):
    pytest.importorskip("triton")
    from headrace.kernels.token_mask import triton as kernel

    _check(kernel.token_mask, case, device)
