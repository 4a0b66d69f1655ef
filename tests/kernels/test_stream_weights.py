"""Stream weights: by the definition in float64, and the Triton kernel against the same."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.rowwise import reference


def weigh_exactly(
    raw: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, iterations: int, eps: float
) -> tuple[torch.Tensor, ...]:
    streams = {8: 2, 24: 4, 80: 8}[raw.shape[1]]
    raw, scale, base = raw.double(), scale.double(), base.double()
    x = torch.cat(
        (raw[:, :streams] * scale[0], raw[:, streams : 2 * streams] * scale[1], raw[:, 2 * streams :] * scale[2]), dim=1
    ) + base
    mix = x[:, 2 * streams :].view(-1, streams, streams).softmax(2) + eps
    for i in range(2 * iterations - 1):
        mix = mix / (mix.sum(1 if i % 2 == 0 else 2, keepdim=True) + eps)
    return x[:, :streams].sigmoid() + eps, 2 * x[:, streams : 2 * streams].sigmoid(), mix


def draw(num_tokens: int, streams: int, device: str) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(num_tokens + streams)
    width = (2 + streams) * streams
    return tuple(torch.randn(*shape, generator=generator).to(device) for shape in ((num_tokens, width), (3,), (width,)))


@pytest.mark.parametrize("iterations", [1, 2, 20])
@pytest.mark.parametrize("streams", [2, 4, 8])
@pytest.mark.parametrize("num_tokens", [0, 1, 37])
def test_reference(num_tokens: int, streams: int, iterations: int):
    raw, scale, base = draw(num_tokens, streams, "cpu")
    for ours, exact in zip(
        reference.stream_weights(raw, scale, base, iterations=iterations, eps=1e-6),
        weigh_exactly(raw, scale, base, iterations, 1e-6), strict=True
    ):
        torch.testing.assert_close(ours.double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=pytest.mark.cuda)]
)
@pytest.mark.parametrize("iterations", [1, 3, 20])
@pytest.mark.parametrize("streams", [2, 4, 8])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 70])
def test_triton(num_tokens: int, streams: int, iterations: int, device: str):
    pytest.importorskip("triton")
    from headrace.kernels.rowwise.triton import stream_weights

    raw, scale, base = draw(num_tokens, streams, device)
    outs = stream_weights(raw, scale, base, iterations=iterations, eps=1e-6)
    for ours, exact in zip(outs, weigh_exactly(raw.cpu(), scale.cpu(), base.cpu(), iterations, 1e-6), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.cpu().double(), exact, atol=1e-5, rtol=1e-5)
