"""Products of many rows fused with the gated activation, on Hopper in own CUDA C++: gate and up are never stored.

M rows of x, F gated outputs, K inputs. Few rows and biases are passed on to `hopper`, and what it leaves to
`wave_product`.
"""

from __future__ import annotations

from ctypes import c_int
from functools import cache
from typing import Any

import torch

from headrace.kernels.cuda_source import CudaKernel, cache_compiled, fallback, load_kernel
from headrace.kernels.linear import hopper, wave_product

ROWS, OUTPUTS, DEPTH, STAGES, THREADS = 128, 128, 64, 4, 384
"""As in ``gated_product.cu``: tile rows and outputs, inputs per stage, stages, threads per block."""
CLUSTER = 2
# 1024 to align swizzled tiles, the ring of x, gate and up tiles, the output tile, two barriers per stage and two more
SHARED_BYTES = 1024 + STAGES * (ROWS + 2 * OUTPUTS) * DEPTH * 2 + ROWS * OUTPUTS * 2 + 16 * STAGES + 16
MACROS: dict[str, dict[str, int]] = {"silu": {}, "gelu_tanh": {"GELU": 1}}
LEAST_ROWS = 1024
LEAST_SHARE = 0.85
"""Least useful share of the computed tiles: tiles are large, and the last wave of them may be nearly empty."""
BAND = 8
"""Pairs of row tiles that go through all outputs together, so that their part of x stays in L2 as W streams past."""


@cache_compiled
def find_kernel(
    dtype: torch.dtype, activation: str, device: torch.device, *, is_adapted: bool = False
) -> CudaKernel | None:
    """The kernel, compiled (2 s) unless cached; None, with a warning, where that fails. ``is_adapted``: the one that
    takes what adapters add, see `headrace.kernels.lora.gated`."""
    flags = ({"FP16": 1} if dtype == torch.float16 else {}) | ({"ADAPTED": 1} if is_adapted else {})
    with fallback("gated products of many rows run as separate kernels"):
        return load_kernel("gated_product", device, SHARED_BYTES, **MACROS[activation], **flags)
    return None


@cache
def count_clusters(device: torch.device) -> int:
    """Clusters that run at once: of two thread blocks each, one block per SM."""
    return torch.cuda.get_device_properties(device).multi_processor_count // CLUSTER


def wins(rows: int, outputs: int, clusters: int) -> bool:
    """Whether this beats torch's GEMM plus an activation: for many rows, unless the last wave is too empty."""
    # a cluster computes a pair of row tiles; ``rounds`` waves of ``clusters`` clusters cover all tiles
    pairs, columns = -(-rows // (CLUSTER * ROWS)), -(-outputs // OUTPUTS)
    rounds = -(-pairs * columns // clusters)
    return rows >= LEAST_ROWS and rows * outputs >= LEAST_SHARE * rounds * clusters * CLUSTER * ROWS * OUTPUTS


def takes(x: torch.Tensor, outputs: int, bias: torch.Tensor | None) -> bool:
    """Whether a describable product of ``x`` with ``outputs``, half of a weight's rows, is faster here."""
    return bias is None and outputs % 8 == 0 and wins(x.shape[0], outputs, count_clusters(x.device))


def multiply(
    x: torch.Tensor, weight: torch.Tensor, kernel: CudaKernel, *more: Any, band: int = BAND
) -> torch.Tensor:
    """``activation(gate) * up`` [M, F], of x [M, K] and a weight [2F, K] whose rows begin at multiples of 16 bytes.
    ``more``: the last arguments of the kernel that takes what adapters add."""
    (rows, inputs), outputs = x.shape, weight.shape[0] // 2
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    tiles = -(-rows // (CLUSTER * ROWS)) * -(-outputs // OUTPUTS)
    # tensor maps: x [M, K], weight [2F, K] (gate and up tiles of OUTPUTS rows each), out [M, F] in boxes of 64 x 64
    maps = kernel.describe(x, ROWS, DEPTH), kernel.describe(weight, OUTPUTS, DEPTH), kernel.describe(out, 64, 64)
    # persistent: no more clusters than run at once
    programs = CLUSTER * min(tiles, count_clusters(x.device))
    kernel.launch(programs, THREADS, *maps, c_int(rows), c_int(outputs), c_int(inputs), c_int(band), *more)
    return out


def gated_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> torch.Tensor | None:
    """See `GATED_LINEAR`."""
    if bias is None and weight.numel() > hopper.LARGE_WEIGHT:
        wave_product.prepare(x, weight, activation, wave_product.LEAST_ROWS)
    if not takes(x, weight.shape[0] // 2, bias) or not hopper.is_describable(x, weight):
        out = hopper.gated_linear(x, weight, bias, activation)
        return wave_product.gated_linear(x, weight, bias, activation) if out is None else out
    kernel = find_kernel(x.dtype, activation, x.device)
    return None if kernel is None else multiply(x, weight, kernel)
