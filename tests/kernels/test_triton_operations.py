"""Triton norms, activations and rope-and-write against the plain-torch ones in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from devices import DEVICES, relative_error

pytest.importorskip("triton")

from headrace.kernels.rowwise import reference, triton


def _draw(device, dtype, *shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(device, dtype)


def _norm(x, weight, eps, offset):
    return F.rms_norm(x.double(), weight.shape, weight.double() + offset, eps)


@pytest.mark.parametrize("device,dtype,tolerance", DEVICES)
@pytest.mark.parametrize("rows,width,offset", [(1, 64, 0.0), (3, 80, 1.0), (2, 1536, 0.0)])
def test_rms_norm(rows, width, offset, device, dtype, tolerance):
    wide, weight = _draw(device, dtype, rows, width + 16), _draw(device, dtype, width)
    x = wide[:, :width]  # rows further apart than they are long
    assert relative_error(triton.rms_norm(x, weight, 1e-6, offset), _norm(x, weight, 1e-6, offset)) < tolerance
    residual = _draw(device, dtype, rows, width, seed=1)
    total = x + residual
    normed, new_residual = triton.add_rms_norm(x, residual.clone(), weight, 1e-6, offset)
    assert torch.equal(new_residual, total)
    assert relative_error(normed, _norm(total, weight, 1e-6, offset)) < tolerance
    sums = torch.stack([x.float() / 2, x.float() / 4, x.float() / 4])  # of a product whose inputs programs shared
    from_sums, new_residual = triton.add_rms_norm(sums, residual.clone(), weight, 1e-6, offset)
    assert torch.equal(new_residual, total) and torch.equal(from_sums, normed)


@pytest.mark.parametrize("device,dtype,tolerance", DEVICES)
@pytest.mark.parametrize("rows,width,offset", [(1, 64, 0.0), (3, 80, 1.0), (2, 1280, 0.0)])
def test_add_layer_norm(rows, width, offset, device, dtype, tolerance):
    x, residual = _draw(device, dtype, rows, width), 1 + _draw(device, dtype, rows, width, seed=1)
    weight, bias = _draw(device, dtype, width), _draw(device, dtype, width, seed=2)
    total, sums = x + residual, torch.stack([x.float() / 2, x.float() / 4, x.float() / 4])
    for own in (None, bias):
        expected = F.layer_norm(
            total.double(), weight.shape, weight.double() + offset, None if own is None else own.double(), 1e-5
        )
        for pending in (x, sums):
            for solution in (triton, reference):
                stream = residual.clone()
                normed, after = solution.add_layer_norm(pending, stream, weight, own, 1e-5, offset)
                assert torch.equal(after, total) and relative_error(normed, expected) < tolerance


@pytest.mark.parametrize("device,dtype,tolerance", DEVICES)
@pytest.mark.parametrize("rows,width", [(1, 24), (3, 1100)])
def test_sums_are_written_beside_the_residual(rows, width, device, dtype, tolerance):
    x, residual = _draw(device, dtype, rows, width), _draw(device, dtype, rows, width, seed=1)
    sums = torch.stack([x.float() / 2, x.float() / 4, x.float() / 4])
    features = torch.full((rows, 3, width), torch.nan, dtype=dtype, device=device)
    kept = residual.clone()
    for place, pending in enumerate((None, x, sums)):
        triton.write_sum(pending, residual, features[:, place])
        expected = torch.empty_like(residual)
        reference.write_sum(pending, residual, expected)
        assert torch.equal(features[:, place], expected)
        assert torch.equal(expected, residual if pending is None else x + residual)
    assert torch.equal(residual, kept)


@pytest.mark.parametrize("device,dtype,tolerance", DEVICES)
@pytest.mark.parametrize("rows,width", [(1, 24), (3, 1100)])
def test_gated_activations(rows, width, device, dtype, tolerance):
    x = 3 * _draw(device, dtype, rows, 2 * width)
    gate, up = x.double().chunk(2, dim=-1)
    assert relative_error(triton.silu_mul(x), F.silu(gate) * up) < tolerance
    assert relative_error(triton.gelu_tanh_mul(x), F.gelu(gate, approximate="tanh") * up) < tolerance


@pytest.mark.parametrize("device,dtype,tolerance", DEVICES)
@pytest.mark.parametrize("norm", ["none", "head", "full"])
@pytest.mark.parametrize("rotary_dim,is_interleaved", [(24, False), (24, True), (16, False), (16, True), (0, False)])
def test_rope_write(rotary_dim, is_interleaved, norm, device, dtype, tolerance):
    heads, kv_heads, dim, page_size, num_pages = 5, 2, 24, 4, 5
    qkv = _draw(device, dtype, 4, (heads + 2 * kv_heads) * dim)
    positions, slots = torch.tensor([3, 1, 9, 0], device=device), torch.tensor([5, 0, 17, 9], device=device)
    cos_sin = _draw(device, torch.float32, 12, rotary_dim) if rotary_dim else None
    shape = dict(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, rotary_dim=rotary_dim, interleaved=is_interleaved,
        norm_eps=1e-6, norm_offset=0.5
    )
    widths = {"none": (), "head": (dim, dim), "full": (heads * dim, kv_heads * dim)}[norm]
    norms = {
        name: _draw(device, dtype, width, seed=i) for i,
        (name, width) in enumerate(zip(("q_norm", "k_norm"), widths, strict=False))
    }

    def run(function, kind):
        k, v = (torch.zeros(num_pages, page_size, kv_heads, dim, dtype=kind, device=device) for _ in range(2))
        weights = {name: w.to(kind) for name, w in norms.items()}
        return function(qkv.to(kind, copy=True), positions, cos_sin, slots, k, v, **weights, **shape), k, v

    for out, expected in zip(run(triton.rope_write, dtype), run(reference.rope_write, torch.float64), strict=True):
        assert relative_error(out, expected) < tolerance
        assert torch.equal(out == 0, expected == 0)  # slots nobody wrote stay as they were
