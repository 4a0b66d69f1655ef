"""The plain-torch operations against transformers' own pieces: they are the oracle of every faster solution."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as attend_softcapped
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as rotate_interleaved
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as attend_with_sinks
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_halves

from headrace.kernels.attention.reference import attend_densely
from headrace.kernels.linear import LINEAR
from headrace.kernels.operation import KernelQuery
from headrace.kernels.rowwise import ADD_RMS_NORM, GELU_TANH_MUL, RMS_NORM, ROPE_WRITE, SILU_MUL

CPU = KernelQuery("cpu", "float32")
OPERATIONS = (RMS_NORM, ADD_RMS_NORM, SILU_MUL, GELU_TANH_MUL, LINEAR, ROPE_WRITE)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.noun)
def test_a_cpu_gets_a_solution(operation):
    assert operation.choose(CPU) is not None
    assert operation.load("reference").__module__.endswith(".reference")


@pytest.mark.parametrize(("norm", "offset"), [(LlamaRMSNorm, 0.0), (Gemma3RMSNorm, 1.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(norm, offset: float, dtype: torch.dtype):
    oracle = norm(80, eps=1e-5)
    torch.nn.init.normal_(oracle.weight)
    x, residual = torch.randn(5, 80).to(dtype), torch.randn(5, 80).to(dtype)
    weight = oracle.weight.detach()
    rms_norm, add_rms_norm = RMS_NORM.load("reference"), ADD_RMS_NORM.load("reference")
    # The oracle may round before the weight is applied.
    tolerance = {"atol": 0.05, "rtol": 0.02} if dtype == torch.bfloat16 else {"atol": 1e-6, "rtol": 1e-5}
    torch.testing.assert_close(rms_norm(x, weight, 1e-5, offset), oracle(x).to(dtype), **tolerance)
    total = x + residual
    normed, new_residual = add_rms_norm(x.clone(), residual.clone(), weight, 1e-5, offset)
    assert torch.equal(new_residual, total)
    torch.testing.assert_close(normed, oracle(total).to(dtype), **tolerance)
    from_sums, _ = add_rms_norm(torch.stack([x.float() / 2] * 2), residual.clone(), weight, 1e-5, offset)
    assert torch.equal(from_sums, normed)


def test_rms_norm_of_a_strided_view():
    wide, weight = torch.randn(4, 96), torch.randn(32)
    norm = RMS_NORM.load("reference")
    assert torch.equal(norm(wide[:, 32:64], weight, 1e-6), norm(wide[:, 32:64].contiguous(), weight, 1e-6))


@pytest.mark.parametrize(("operation", "name"), [(SILU_MUL, "silu"), (GELU_TANH_MUL, "gelu_pytorch_tanh")])
def test_gated_activations(operation, name: str):
    x = torch.randn(3, 2 * 40)
    before = x.clone()
    torch.testing.assert_close(operation.load("reference")(x), ACT2FN[name](x[:, :40]) * x[:, 40:])
    assert torch.equal(x, before)


def make_table(length: int, rotary_dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``cos_sin`` as the operation takes it, and cos and sin as transformers does."""
    angles = torch.rand(length, rotary_dim // 2) * 6
    doubled = torch.cat((angles, angles), dim=-1)
    return torch.cat((angles.cos(), angles.sin()), dim=-1), doubled.cos(), doubled.sin()


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize(
    ("rotated", "interleaved", "has_norm"),
    [
        (1.0, False, False), (1.0, False, True), (0.5, False, False), (0.5, True, False), (0.25, True, True),
        (0.0, False, True)
    ]
)
def test_rope_write(head_dim: int, rotated: float, interleaved: bool, has_norm: bool):
    num_tokens, num_heads, num_kv_heads, page_size, num_pages, offset = 6, 6, 2, 4, 5, 1.0
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    positions = torch.tensor([9, 0, 3, 3, 11, 2])
    slots = torch.tensor([17, 4, 8, 9, 6, 19])
    rotary_dim = int(head_dim * rotated)
    cos_sin, cos, sin = make_table(12, rotary_dim) if rotary_dim else (None, None, None)
    norms = [torch.randn(head_dim), torch.randn(head_dim)] if has_norm else [None, None]
    pages = [torch.full((num_pages, page_size, num_kv_heads, head_dim), float("nan")) for _ in "kv"]
    q_out = ROPE_WRITE.load("reference")(
        qkv.clone(), positions, cos_sin, slots, *pages, num_heads=num_heads, num_kv_heads=num_kv_heads,
        head_dim=head_dim, rotary_dim=rotary_dim, interleaved=interleaved, q_norm=norms[0], k_norm=norms[1],
        norm_eps=1e-6, norm_offset=offset,
    )

    q, k, v = qkv.unflatten(1, (-1, head_dim)).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if has_norm:
        for name, weight in (("q", norms[0]), ("k", norms[1])):
            oracle = Gemma3RMSNorm(head_dim, eps=1e-6)
            oracle.weight.data.copy_(weight)
            q, k = (oracle(q).detach(), k) if name == "q" else (q, oracle(k).detach())
    if rotary_dim:
        rotate = rotate_interleaved if interleaved else rotate_halves
        q_rotated, k_rotated = rotate(
            q[None, ..., :rotary_dim], k[None, ..., :rotary_dim], cos[positions][None], sin[positions][None],
            unsqueeze_dim=2
        )
        q, k = torch.cat((q_rotated[0], q[..., rotary_dim:]), -1), torch.cat((k_rotated[0], k[..., rotary_dim:]), -1)
    torch.testing.assert_close(q_out, q, atol=1e-5, rtol=1e-5)
    for written, expected in zip(pages, (k, v), strict=True):
        flat = written.flatten(0, 1)
        torch.testing.assert_close(flat[slots], expected, atol=1e-5, rtol=1e-5)
        untouched = torch.ones(len(flat), dtype=torch.bool)
        untouched[slots] = False
        assert flat[untouched].isnan().all()
    assert q_out.is_contiguous()


def causal_mask(num_queries: int, length: int, window: int) -> torch.Tensor:
    at = torch.arange(length)
    query_at = torch.arange(length - num_queries, length)[:, None]
    seen = (at <= query_at) & ((at > query_at - window) if window else True)
    return torch.zeros(num_queries, length).masked_fill(~seen, float("-inf"))[None, None]


class Heads(torch.nn.Module):
    """What transformers' attention functions ask of their module."""

    def __init__(self, group: int, sinks: torch.Tensor):
        super().__init__()
        self.num_key_value_groups, self.head_dim, self.sinks = group, 64, sinks


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (5, 1)])
def test_attend_densely(window: int, has_sinks: bool, num_heads: int, num_kv_heads: int):
    q, k, v = torch.randn(3, num_heads, 64), torch.randn(10, num_kv_heads, 64), torch.randn(10, num_kv_heads, 64)
    sinks = torch.randn(num_heads)
    batched = [t.transpose(0, 1)[None] for t in (q, k, v)]
    module, mask = Heads(num_heads // num_kv_heads, sinks), causal_mask(3, 10, window)
    if has_sinks:
        expected = attend_with_sinks(module, *batched, mask, scaling=0.3)[0][0]
        ours = attend_densely(q, k, v, scale=0.3, window=window, sinks=sinks)
    else:
        expected = attend_softcapped(module, *batched, mask, scaling=0.3, softcap=2.0)[0][0]
        ours = attend_densely(q, k, v, scale=0.3, window=window, softcap=2.0)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
