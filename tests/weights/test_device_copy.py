"""Copies to a GPU arrive whole and in order, whatever the buffers' size and the consumer's stream."""

from __future__ import annotations

import pytest
import torch

from headrace.models.weights.dummy import fill_dummy_weights

pytestmark = pytest.mark.cuda


@pytest.fixture
def copy_ahead():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from headrace.models.weights.device_copy import copy_ahead

    return copy_ahead


def tensors():
    torch.manual_seed(0)
    made = [
        torch.randn(3, 5).to(dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool)
    ]
    made += [torch.randn(()), torch.empty(0, 4), torch.randn(40, 30).t()]
    made += [torch.randint(0, 256, (int(size),), dtype=torch.uint8) for size in torch.randint(1, 300_000, (60,))]
    return [(f"t{i}", tensor) for i, tensor in enumerate(made)]


@pytest.mark.parametrize(
    ("buffer_bytes", "ahead_bytes", "threads"), [(1 << 24, 1 << 29, 8), (1000, 50_000, 3), (4096, 1, 1)]
)
def test_every_byte_arrives(copy_ahead, monkeypatch, buffer_bytes, ahead_bytes, threads):
    monkeypatch.setattr("headrace.models.weights.device_copy.BUFFER_BYTES", buffer_bytes)
    monkeypatch.setattr("headrace.models.weights.device_copy.AHEAD_BYTES", ahead_bytes)
    expected, side = tensors(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        kept = {}
        for name, tensor in copy_ahead(iter(expected), torch.device("cuda", 0), threads=threads):
            assert tensor.is_cuda
            kept[name] = torch.cat([tensor.reshape(-1).view(torch.uint8)] * 2)[: tensor.nbytes]  # work on this stream
    torch.cuda.synchronize()
    assert list(kept) == [name for name, _ in expected]
    for name, tensor in expected:
        assert torch.equal(kept[name].cpu(), tensor.contiguous().view(-1).view(torch.uint8)), name


def test_leaving_early_and_errors_leave_nothing_running(copy_ahead):
    def failing():
        yield from tensors()[:10]
        raise OSError("disk gone")

    stream = copy_ahead(iter(tensors()), torch.device("cuda", 0), threads=4)
    next(stream)
    stream.close()
    with pytest.raises(OSError, match="disk gone"):
        list(copy_ahead(failing(), torch.device("cuda", 0), threads=4))


def test_dummy_weights_are_made_on_the_device_alike_for_a_seed(copy_ahead):
    made = []
    for _ in range(2):
        layer = torch.nn.Linear(300, 200, device="cuda", dtype=torch.bfloat16)
        fill_dummy_weights(layer, 5)
        made.append(layer.weight.detach().clone())
    assert torch.equal(*made) and abs(made[0].float().std().item() - 0.02) < 0.001
