"""Token masks against numpy's own unpacking of bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.kernels.token_mask import reference

DEVICES = [pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=pytest.mark.cuda)]


def _case(vocab_size: int, num_rows: int, rows: list[int]):
    draw = np.random.default_rng(vocab_size)
    logits = draw.standard_normal((num_rows, vocab_size)).astype(np.float32)
    masks = draw.integers(-(2**31), 2**31, (len(rows), -(-vocab_size // 32)), dtype=np.int64).astype(np.int32)
    expected = logits.copy()
    for mask, row in zip(masks, rows, strict=True):
        bits = np.unpackbits(mask.astype("<i4").view(np.uint8), bitorder="little")[:vocab_size]
        expected[row, bits == 0] = -np.inf
    return torch.from_numpy(logits), torch.from_numpy(masks), torch.tensor(rows, dtype=torch.int64), torch.from_numpy(expected)


CASES = [(97, 3, [0, 1, 2]), (64, 4, [3, 1]), (1, 1, [0]), (4100, 2, [1])]


@pytest.mark.parametrize(("vocab_size", "num_rows", "rows"), CASES)
def test_reference_forbids_what_the_bits_say(vocab_size, num_rows, rows):
    logits, masks, places, expected = _case(vocab_size, num_rows, rows)
    reference.token_mask(logits, masks, places)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("vocab_size", "num_rows", "rows"), CASES)
def test_triton_forbids_what_the_bits_say(vocab_size, num_rows, rows, device):
    pytest.importorskip("triton")
    from headrace.kernels.token_mask import triton as kernel

    logits, masks, places, expected = _case(vocab_size, num_rows, rows)
    logits = logits.to(device)
    kernel.token_mask(logits, masks.to(device), places.to(device))
    assert torch.equal(logits.cpu(), expected)
