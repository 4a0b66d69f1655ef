"""Dequantises the GGUF types most files are in, several times faster than the gguf package does, to the same values.

B blocks of 32 values. Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. Refuses: all other
types.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

BLOCK = 32


def _halves(blocks: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """``count`` float16 from byte ``start`` of each block, as float32 [B, count]."""
    return blocks[:, start : start + 2 * count].contiguous().view(torch.float16).float()


def _write_nibbles(packed: torch.Tensor, out: torch.Tensor) -> None:
    """16 bytes a block: the low halves are the first 16 values, the high halves the others."""
    packed, pairs = packed.contiguous(), out.view(-1, 2, BLOCK // 2)
    pairs[:, 0] = packed & 15
    pairs[:, 1] = packed >> 4


def read_q4_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Blocks [B, 18] to out [B, 32]: ``d * (q - 8)``."""
    _write_nibbles(blocks[:, 2:], out)
    out.sub_(8).mul_(_halves(blocks, 0, 1))


def read_q4_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Blocks [B, 20] to out [B, 32]: ``d * q + m``."""
    factors = _halves(blocks, 0, 2)
    _write_nibbles(blocks[:, 4:], out)
    out.mul_(factors[:, :1]).add_(factors[:, 1:])


def read_q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Blocks [B, 34] to out [B, 32]: ``d * q`` with signed q."""
    torch.mul(blocks[:, 2:].contiguous().view(torch.int8), _halves(blocks, 0, 1), out=out)


READERS: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "Q4_0": read_q4_0, "Q4_1": read_q4_1, "Q8_0": read_q8_0
}
"""By the type's name in ggml; each takes ``(blocks [B, bytes] uint8, out [B, 32] float32)``."""
