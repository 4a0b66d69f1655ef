"""Own C++ norms, activations and rope-and-write against plain torch in float64, for every instruction set here."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cpu_isas import isa  # noqa: F401
from devices import relative_error

from headrace.kernels.rowwise import cpu, reference

TYPES = [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)]
pytestmark = pytest.mark.usefixtures("isa")


def _draw(dtype, *shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def _norm(x, weight, eps, offset):
    return F.rms_norm(x.double(), weight.shape, weight.double() + offset, eps)


@pytest.mark.parametrize("dtype,tolerance", TYPES)
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
@pytest.mark.parametrize("rows,width,offset", [(0, 8, 0.0), (1, 1, 0.0), (1, 64, 0.0), (3, 81, 1.0), (70, 577, 0.0)])
def test_rms_norm(rows, width, offset, weight_dtype, dtype, tolerance):
    wide, weight = _draw(dtype, rows, width + 16), _draw(weight_dtype or dtype, width)
    x = wide[:, :width]  # rows further apart than they are long
    out = cpu.rms_norm(x, weight, 1e-6, offset)
    assert out.dtype == dtype and out.is_contiguous() and out.shape == x.shape
    residual = _draw(dtype, rows, width, seed=1)
    total, before = x + residual, wide.clone()
    normed, new_residual = cpu.add_rms_norm(x, residual, weight, 1e-6, offset)
    assert torch.equal(new_residual, total) and torch.equal(wide, before)
    if rows:
        assert relative_error(out, _norm(x, weight, 1e-6, offset)) < tolerance
        assert relative_error(normed, _norm(total, weight, 1e-6, offset)) < tolerance


@pytest.mark.parametrize("dtype,tolerance", TYPES)
@pytest.mark.parametrize("rows,width", [(0, 4), (1, 24), (3, 1103), (40, 300)])
def test_gated_activations(rows, width, dtype, tolerance):
    x = 3 * _draw(dtype, rows, 2 * width)
    before = x.clone()
    gate, up = x.double().chunk(2, dim=-1)
    for ours, theirs in (
        (cpu.silu_mul(x), F.silu(gate)), (cpu.gelu_tanh_mul(x), F.gelu(gate, approximate="tanh"))
    ):
        assert ours.shape == (rows, width) and ours.dtype == dtype and torch.equal(x, before)
        if rows:
            assert relative_error(ours, theirs * up) < tolerance


def test_activations_of_extreme_values():
    gate = torch.tensor([-1e30, -200.0, -90.0, -88.0, -20.0, -0.0, 0.0, 20.0, 90.0, 1e30, float("nan"), float("inf")])
    x = torch.cat((gate, torch.ones_like(gate)))[None]
    for ours, theirs in (
        (cpu.silu_mul(x), F.silu(gate)), (cpu.gelu_tanh_mul(x), F.gelu(gate, approximate="tanh"))
    ):
        torch.testing.assert_close(ours[0], theirs, atol=1e-6, rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype,tolerance", TYPES)
@pytest.mark.parametrize("norm", ["none", "head", "full"])
@pytest.mark.parametrize(
    "head_dim,rotary_dim,is_interleaved",
    [(24, 24, False), (24, 24, True), (80, 22, False), (64, 16, True), (256, 256, False), (33, 0, False)]
)
def test_rope_write(head_dim, rotary_dim, is_interleaved, norm, dtype, tolerance):
    heads, kv_heads, page_size, num_pages = 5, 2, 4, 5
    qkv = _draw(dtype, 4, (heads + 2 * kv_heads) * head_dim)
    positions, slots = torch.tensor([3, 1, 9, 0]), torch.tensor([5, 0, 17, 9])
    cos_sin = _draw(torch.float32, 12, rotary_dim) if rotary_dim else None
    shape = dict(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, rotary_dim=rotary_dim, interleaved=is_interleaved,
        norm_eps=1e-6, norm_offset=0.5
    )
    widths = {"none": (), "head": (head_dim, head_dim), "full": (heads * head_dim, kv_heads * head_dim)}[norm]
    norms = {
        name: _draw(dtype, width, seed=i) for i,
        (name, width) in enumerate(zip(("q_norm", "k_norm"), widths, strict=False))
    }

    def run(function, kind):
        k, v = (torch.zeros(num_pages, page_size, kv_heads, head_dim, dtype=kind) for _ in range(2))
        weights = {name: w.to(kind) for name, w in norms.items()}
        return function(qkv.to(kind, copy=True), positions, cos_sin, slots, k, v, **weights, **shape), k, v

    for out, expected in zip(run(cpu.rope_write, dtype), run(reference.rope_write, torch.float64), strict=True):
        assert relative_error(out, expected) < tolerance
        assert torch.equal(out == 0, expected == 0)  # slots nobody wrote stay as they were


def test_rope_writes_pages_of_a_narrower_type():
    shape = dict(
        num_heads=2, num_kv_heads=1, head_dim=40, rotary_dim=40, interleaved=False, norm_eps=1e-6, norm_offset=0.0
    )
    qkv, cos_sin = _draw(torch.float32, 3, 4 * 40), _draw(torch.float32, 8, 40)
    arguments = (torch.tensor([5, 0, 7]), cos_sin, torch.tensor([2, 4, 7]))
    pages = [[torch.zeros(2, 4, 1, 40, dtype=torch.bfloat16) for _ in "kv"] for _ in "ab"]
    ours, theirs = (
        cpu.rope_write(qkv.clone(), *arguments, *pages[0], **shape),
        reference.rope_write(qkv.clone(), *arguments, *pages[1], **shape)
    )
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(*pages, strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=8e-3)


def test_wrong_shapes_are_refused():
    with pytest.raises(RuntimeError, match=r"weight \[D\]"):
        cpu.rms_norm(torch.zeros(2, 8), torch.ones(7), 1e-6)
    with pytest.raises(RuntimeError, match="float32, bfloat16 or float16"):
        cpu.silu_mul(torch.zeros(2, 8, dtype=torch.float64))
