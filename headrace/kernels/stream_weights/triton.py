"""Stream weights in one launch: a program holds the small matrices of some tokens in registers. S streams."""

import math

import torch
import triton
import triton.language as tl

from headrace.kernels.launch import ceil_div

TOKENS = 32
"""Of a program."""


@triton.jit
def _weights_kernel(
    raw_ptr, scale_ptr, base_ptr, pre_ptr, post_ptr, mix_ptr, num_tokens, eps, S: tl.constexpr,
    ITERATIONS: tl.constexpr, TOKENS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < num_tokens
    stream = tl.arange(0, S)
    start = token.to(tl.int64) * ((2 + S) * S)
    at = start[:, None] + stream[None, :]
    out = token.to(tl.int64)[:, None] * S + stream[None, :]
    pre = (
        tl.load(raw_ptr + at, mask=is_token[:, None], other=0.0) * tl.load(scale_ptr)
        + tl.load(base_ptr + stream)[None, :]
    )
    tl.store(pre_ptr + out, 1.0 / (1.0 + tl.exp(-pre)) + eps, mask=is_token[:, None])
    post = (
        tl.load(raw_ptr + at + S, mask=is_token[:, None], other=0.0) * tl.load(scale_ptr + 1)
        + tl.load(base_ptr + S + stream)[None, :]
    )
    tl.store(post_ptr + out, 2.0 / (1.0 + tl.exp(-post)), mask=is_token[:, None])
    cell = stream[:, None] * S + stream[None, :]
    mix = tl.load(raw_ptr + start[:, None, None] + 2 * S + cell[None, :, :], mask=is_token[:, None, None], other=0.0)
    mix = mix * tl.load(scale_ptr + 2) + tl.load(base_ptr + 2 * S + cell)[None, :, :]
    mix = tl.exp(mix - tl.max(mix, axis=2)[:, :, None])
    mix = mix / tl.sum(mix, axis=2)[:, :, None] + eps
    mix = mix / (tl.sum(mix, axis=1)[:, None, :] + eps)
    for _ in range(ITERATIONS - 1):
        mix = mix / (tl.sum(mix, axis=2)[:, :, None] + eps)
        mix = mix / (tl.sum(mix, axis=1)[:, None, :] + eps)
    tl.store(
        mix_ptr + token.to(tl.int64)[:, None, None] * (S * S) + cell[None, :, :], mix, mask=is_token[:, None, None]
    )


def stream_weights(
    raw: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *, iterations: int, eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `STREAM_WEIGHTS`."""
    num_tokens, streams = raw.shape[0], math.isqrt(raw.shape[1] + 1) - 1
    pre, post = (torch.empty((num_tokens, streams), dtype=torch.float32, device=raw.device) for _ in range(2))
    mix = torch.empty((num_tokens, streams, streams), dtype=torch.float32, device=raw.device)
    if num_tokens:
        tokens = min(TOKENS, 1 << (num_tokens - 1).bit_length())
        _weights_kernel[(ceil_div(num_tokens, tokens),)](
            raw.contiguous(), scale, base, pre, post, mix, num_tokens, eps, S=streams, ITERATIONS=iterations,
            TOKENS=tokens, num_warps=1,
        )
    return pre, post, mix
