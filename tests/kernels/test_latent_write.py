"""Latents and rotated parts of queries and keys, from projections to pages."""

from __future__ import annotations

import pytest
import torch
from devices import DEVICES, ON_GPU, relative_error

pytest.importorskip("triton")

from headrace.kernels.operation import KernelQuery
from headrace.kernels.rowwise import LATENT_WRITE, cpu, latents, reference
from headrace.layers.latent_attention import attend_spans

SIZES = dict(few=(3, 5, 24, 12), deepseek=(2, 16, 512, 64), many_heads=(2, 33, 16, 8))


def write(function, size, interleaved, device, kind, *, in_place=False, draw=torch.float32):
    """(rotated queries, pages) in ``kind``, of values that are given in ``draw``; inputs and pages are strided."""
    tokens, heads, num_latent, width = SIZES[size]
    rng = torch.Generator().manual_seed(3)
    numbers = (torch.randn(tokens, n, generator=rng).to(device, draw).to(kind) for n in (
        heads * (width + 4), num_latent + width + 2
    ))
    q, kv = numbers
    q_rope, latent, k_rope = q.unflatten(1, (heads, -1))[..., 4:], kv[:, :num_latent], kv[:, num_latent : -2]
    places = (
        torch.tensor([3, 9, 0][:tokens], device=device),
        torch.randn(12, width, generator=rng).to(device), torch.tensor([5, 17, 9][:tokens], device=device),
    )
    weight = torch.randn(num_latent, generator=rng).to(device, draw).to(kind)
    pages = torch.zeros(5, 4, 1, num_latent + width + 8, dtype=kind, device=device)
    rows = torch.zeros(tokens, heads, num_latent + width, dtype=kind, device=device)
    out = q_rope if in_place else rows[..., -width:]
    function(
        (q_rope, latent, k_rope), places, pages[..., : num_latent + width], out, norm_weight=weight, norm_eps=1e-6,
        interleaved=interleaved
    )
    return out, pages


@pytest.mark.parametrize("device,dtype,tolerance", DEVICES)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_one_kernel_writes_what_plain_torch_writes(size, interleaved, in_place, device, dtype, tolerance):
    found = write(latents.latent_write, size, interleaved, device, dtype, in_place=in_place, draw=dtype)
    expected = write(reference.latent_write, size, interleaved, device, torch.float64, draw=dtype)
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours, theirs) < tolerance
        assert torch.equal(ours == 0, theirs == 0), "slots nobody wrote stay as they were"


def test_a_cpu_writes_the_same():
    for ours, theirs in zip(*(write(f, "few", True, "cpu", torch.float32) for f in (
        cpu.latent_write, reference.latent_write
    )), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert LATENT_WRITE.choose(KernelQuery("cuda", "bfloat16", (9, 0))) is latents.latent_write_pdl


@pytest.mark.parametrize("device,dtype,tolerance", [("cpu", torch.float32, 1e-5), *ON_GPU])
@pytest.mark.parametrize(("dim", "value_dim"), [(192, 128), (48, 48), (256, 256), (24, 40)])
def test_whole_prompts(dim, value_dim, device, dtype, tolerance):
    """Keys wider than values and the other way round, of spans of different lengths."""
    lengths, heads = [7, 1, 130], 3
    rng = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(sum(lengths), heads, d, generator=rng).to(device, dtype) for d in (dim, dim, value_dim))
    starts = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    out = attend_spans(q, k, v, starts, lengths, scale=0.2)
    for own_q, own_k, own_v, own in zip(*(t.double().cpu().split(lengths) for t in (q, k, v, out)), strict=True):
        logits = torch.einsum("qhe,khe->hqk", own_q, own_k) * 0.2
        logits = logits.masked_fill(torch.ones(len(own_q), len(own_q)).triu(1).bool(), float("-inf"))
        assert relative_error(own, torch.einsum("hqk,khv->qhv", logits.softmax(-1), own_v)) < tolerance
