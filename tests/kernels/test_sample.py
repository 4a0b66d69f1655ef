"""Sampling by every solution: masks against numpy's own unpacking of bits, states, rows that sample beside rows that
do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cpu_isas import isa  # noqa: F401
from sample_cases import sample_params

from headrace.kernels.sample import NOT_FINITE, NOTHING_ALLOWED, OK, cpu, reference

DEVICES = [pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=pytest.mark.cuda)]
CASES = [
    (97, 3, [0, 1, 2], 0.5), (64, 4, [3, 1], 0.1), (1, 1, [0], 1.0), (4100, 2, [1], 0.999), (3000, 6, [4, 0, 2], 0.01),
    (33, 2, [0, 1], 0.0), (20, 3, [], 1.0)
]
"""Vocabulary, rows, those with a mask, and the share of tokens that it allows."""


def _check(
    sample: Callable[..., torch.Tensor], case: tuple[int, int, list[int], float], *, is_random: bool, is_edited: bool,
    device: str = "cpu"
) -> None:
    vocab_size, num_rows, masked, share = case
    random = np.random.default_rng(vocab_size)
    wide = torch.from_numpy(random.standard_normal((num_rows, vocab_size + 3)).astype(np.float32)).to(device)
    logits = wide[:, :vocab_size]
    if num_rows > 3:
        logits[3, vocab_size // 2] = float("nan")
    if num_rows > 5:
        logits[5] = -torch.inf
    more: dict[str, Any] = {}
    expected, whole = logits.cpu().numpy().copy(), wide.clone()
    if masked:
        bits = random.random((len(masked), -(-vocab_size // 32) * 32)) < share
        mask_of_row = torch.full((num_rows,), -1, dtype=torch.int32)
        mask_of_row[masked] = torch.arange(len(masked), dtype=torch.int32)
        more |= {
            "masks": torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32)).to(device),
            "mask_of_row": mask_of_row.to(device)
        }
        for row, allowed in zip(masked, bits, strict=True):
            expected[row, ~allowed[:vocab_size]] = -np.inf
    before = (
        np.where(np.arange(num_rows) == 1, np.inf, 1.0).astype(np.float32) if is_edited else logits.cpu().numpy().max(1)
    )
    if is_edited:
        more["before"] = torch.from_numpy(before).to(device)
    if is_random:
        params = more["params"] = sample_params(num_rows, device, top_k=7)
        params.temperature[::2] = 0.0
    sampled = sample(logits, **more).cpu()
    ids, states = sampled.numpy()
    np.testing.assert_array_equal(wide[:, :vocab_size].cpu().numpy(), expected)
    assert torch.equal(wide[:, vocab_size:], whole[:, vocab_size:]), "beyond the row nothing is written"
    greatest = expected.max(1)
    state = np.where(np.isfinite(before), np.where(np.isfinite(greatest), OK, NOTHING_ALLOWED), NOT_FINITE)
    assert states.tolist() == state.tolist()
    assert ((ids >= 0) & (ids < vocab_size)).all()
    for row in np.flatnonzero(np.isfinite(greatest)):
        if is_random and row % 2:
            assert (
                expected[row, ids[row]] >= np.sort(expected[row])[-min(7, vocab_size)]
                and np.isfinite(expected[row, ids[row]])
            )
        else:
            assert ids[row] == expected[row].argmax()


@pytest.mark.parametrize("is_edited", [False, True])
@pytest.mark.parametrize("is_random", [False, True])
@pytest.mark.parametrize("case", CASES)
class TestDraw:
    def test_reference(self, case, is_random, is_edited):
        _check(reference.sample, case, is_random=is_random, is_edited=is_edited)

    @pytest.mark.usefixtures("isa")
    def test_own_kernels(self, case, is_random, is_edited):
        _check(cpu.sample, case, is_random=is_random, is_edited=is_edited)

    @pytest.mark.parametrize("device", DEVICES)
    def test_triton(self, case, is_random, is_edited, device):
        pytest.importorskip("triton")
        from headrace.kernels.sample import triton as kernel

        _check(kernel.sample, case, is_random=is_random, is_edited=is_edited, device=device)


@pytest.mark.usefixtures("isa")
def test_masks_of_rows_that_are_not_there_are_refused():
    logits, masks = torch.zeros(2, 40), torch.zeros((1, 2), dtype=torch.int32)
    for wrong in (masks[:, :1], masks.long()):
        with pytest.raises(RuntimeError, match="masks must be"):
            cpu.mask_argmax(logits, wrong, torch.tensor([0, -1], dtype=torch.int32))
    with pytest.raises(RuntimeError, match="outside the masks"):
        cpu.mask_argmax(logits, masks, torch.tensor([-1, 1], dtype=torch.int32))
