"""Graphs on a GPU: values of replays, and memory that all sizes share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from headrace.execution.captures import Capture, Recorder

pytestmark = pytest.mark.cuda

MIB = 2**20
SIZES = (64 * MIB, 32 * MIB, 16 * MIB, 8 * MIB, 4 * MIB)


def work_on(inputs: torch.Tensor, factor: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """``(inputs * factor, their greatest)``, with an intermediate as large as the output."""
    return lambda: ((inputs * 2) * factor / 2, (inputs * factor).amax(dim=0, keepdim=True))


@torch.inference_mode()
def test_sizes_share_their_memory_and_replays_their_values():
    device = torch.device("cuda", 0)
    inputs = [torch.zeros(size // 4, device=device) for size in SIZES]
    captures = []
    recorder = Recorder(device)
    torch.cuda.synchronize()
    for place, tensor in enumerate(inputs):
        captures.append(Capture(work_on(tensor, place + 2), recorder))
        captures[-1].run()
        if place == 0:
            free = torch.cuda.mem_get_info(device)[0]
    assert free - torch.cuda.mem_get_info(device)[0] <= 8 * MIB, "the smaller ones fit into the memory of the largest"
    for turn in range(3):
        for place, (tensor, capture) in enumerate(zip(inputs, captures, strict=True)):
            tensor.copy_(torch.arange(tensor.numel(), device=device) % 1000 + turn)
            scaled, greatest = capture.run()
            assert scaled.shape == tensor.shape and scaled.dtype == torch.float32
            assert torch.equal(scaled, tensor * (place + 2)), (turn, place)
            assert greatest.tolist() == [(999 + turn) * (place + 2)]


@torch.inference_mode()
def test_types_and_shapes_are_lent_as_they_are():
    device = torch.device("cuda", 0)
    source = torch.randn(6, 4, device=device).to(torch.bfloat16)
    for work in (lambda: (source + 1, (source + 1).t(), (source + 1)[:0]), lambda: (source.float(), (source > 0).long(), source[0] + 1)):
        capture = Capture(work, Recorder(device))
        expected, got = capture.run(), capture.run()
        for want, have in zip(expected, got, strict=True):
            assert have.dtype == want.dtype and have.shape == want.shape and torch.equal(have, want)
