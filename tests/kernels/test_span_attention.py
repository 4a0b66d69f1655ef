"""Attention within spans, with rotation and without, against the definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from devices import DEVICES, INTERPRETED, relative_error

from headrace.kernels.span_attention import Spans, reference


def make_spans(lengths: list[int], device: str) -> Spans:
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
    return Spans(lengths, starts)


def attend_exactly(
    qkv: torch.Tensor, lengths: list[int], scale: float, angles: torch.Tensor | None
) -> torch.Tensor:
    q, k, v = qkv.double().unbind(1)
    if angles is not None:
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        half = q.shape[-1] // 2
        turned = [torch.complex(x[..., :half], x[..., half:]) * turn for x in (q, k)]
        q, k = (torch.cat((x.real, x.imag), dim=-1) for x in turned)
    parts = []
    for own in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        own_q, own_k, own_v = own
        weights = (torch.einsum("qhe,khe->hqk", own_q, own_k) * scale).softmax(-1)
        parts.append(torch.einsum("hqk,khe->qhe", weights, own_v))
    return torch.cat(parts)


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize(("dim", "lengths"), [(20, [16, 7, 1]), (72, [30, 64]), (16, [65, 3])])
@pytest.mark.parametrize(("device", "dtype", "most"), DEVICES)
def test_spans(device: str, dtype: torch.dtype, most: float, dim: int, lengths: list[int], rotates: bool):
    triton: Any = pytest.importorskip("headrace.kernels.span_attention.triton")
    generator = torch.Generator().manual_seed(dim)
    qkv = torch.randn(sum(lengths), 3, 3, dim, generator=generator).to(dtype)
    angles = torch.randn(len(qkv), dim // 2, generator=generator).double() * 3 if rotates else None
    expected = attend_exactly(qkv, lengths, 0.3, angles)
    spans = make_spans(lengths, device)
    cos_sin = None if angles is None else torch.cat((angles.cos(), angles.sin()), dim=-1).float().to(device)
    solutions = [reference.span_attention]
    if device == "cuda" or max(lengths) <= triton.MOST_SHORT:  # torch's flash attention is for GPUs
        solutions.append(triton.span_attention)
    for attend in solutions:
        q, k, v = qkv.clone().to(device).unbind(1)
        out = attend(q, k, v, spans, 0.3, cos_sin)
        assert relative_error(out, expected) < most


@pytest.mark.parametrize(("device", "dtype", "most"), INTERPRETED[:1])
def test_rotation_in_place_leaves_values_alone(device: str, dtype: torch.dtype, most: float):
    from headrace.kernels.span_attention.triton import rotate

    qkv, angles = torch.randn(9, 3, 5, 12, dtype=dtype, device=device), torch.randn(9, 6, device=device)
    cos_sin, before = torch.cat((angles.cos(), angles.sin()), dim=-1), qkv.clone()
    rotate(qkv[:, 0], qkv[:, 1], cos_sin)
    for i in (0, 1):
        assert relative_error(qkv[:, i], reference.rotate_halves(before[:, i], cos_sin)) < most
    assert torch.equal(qkv[:, 2], before[:, 2])
