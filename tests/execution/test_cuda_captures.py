"""Graphs on a GPU: values of replays, and memory that all sizes share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_checkpoint import write_tiny_checkpoint

from headrace.base.config import engine_config
from headrace.execution import building
from headrace.execution.assembly import Assembly
from headrace.execution.captures import Capture, Recorder

pytestmark = pytest.mark.cuda
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

MIB = 2**20
SIZES = (64 * MIB, 32 * MIB, 16 * MIB, 8 * MIB, 4 * MIB)


@triton.jit
def scale_kernel(x_ptr, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at) * FACTOR)


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
    for work in (
        lambda: (source + 1, (source + 1).t(), (source + 1)[:0]),
        lambda: (source.float(), (source > 0).long(), source[0] + 1)
    ):
        capture = Capture(work, Recorder(device))
        expected, got = work(), capture.run()
        for want, have in zip(expected, got, strict=True):
            assert have.dtype == want.dtype and have.shape == want.shape and torch.equal(have, want)


@torch.inference_mode()
def test_kernels_that_never_ran_are_compiled_and_loaded_while_they_are_recorded():
    device = torch.device("cuda", 0)
    x, recorder = torch.ones(64, device=device), Recorder(device)

    def work() -> torch.Tensor:
        scale_kernel[(1,)](x, FACTOR=3, BLOCK=64)
        return x + 1

    capture = Capture(work, recorder)
    assert [capture.run()[0].item() for _ in range(3)] == [4, 10, 28]


def test_what_is_kept_for_graphs_is_what_they_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Steps of 8192 tokens, and logits of 512 rows: 238 MiB, in both kinds of graphs some more."""
    folder = write_tiny_checkpoint(
        tmp_path, 1, hidden_size=1024, intermediate_size=4096, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=122_000
    )
    kept: list[int] = []
    reserve = Assembly.graph_reserve
    monkeypatch.setattr(Assembly, "graph_reserve", lambda *about: kept.append(reserve(*about)) or kept[0])
    config = engine_config(
        model=str(folder), device="cuda", dtype="bfloat16", kv_pages=600, max_running_requests=512, max_step_tokens=8192
    )
    executor = building.build_executor(config)
    taken = next(line.num_bytes for line in executor.memory if line.name == "graphs")
    executor.close()
    assert taken <= kept[0] <= taken + 400 * MIB, f"{taken // MIB} MiB were taken, {kept[0] // MIB} MiB kept"
