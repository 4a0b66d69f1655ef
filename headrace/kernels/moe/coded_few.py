"""Experts in codes for a few tokens in two kernels, own CUDA C++ (``csrc/cuda/coded_rows.cu``): gate and up with
the activation, then down with the sum over a token's experts. Each pair of token and expert reads its matrix by itself,
from the L2 where another one has. More tokens, and forms that the source lacks, are passed on to other solutions.

T tokens, k choices, D hidden size, F expert intermediate size.
"""

from __future__ import annotations

import logging

import torch

from headrace.kernels.coded_linear import cuda, reason_against_cuda
from headrace.kernels.coded_linear.choice import describe_codes
from headrace.kernels.coded_linear.device_codes import DeviceCodes
from headrace.kernels.cuda_source import CudaSourceError, cache_compiled
from headrace.kernels.moe import CODED_EXPERTS, CodedStack, Gate
from headrace.kernels.once import cache_once
from headrace.kernels.rowwise.triton import GATES

logger = logging.getLogger(__name__)

MOST_TOKENS = 4
"""With more, tokens share experts too often. Of other codes than MXFP4 `coded` was measured to be faster."""
MOST_INPUTS = 65536
"""Of all rows of x, which a block keeps in shared memory."""


def takes(x: torch.Tensor, ids: torch.Tensor, gate_up: DeviceCodes, down: DeviceCodes) -> bool:
    """Whether this is faster than `coded`, and possible."""
    num_tokens, top_k = ids.shape
    return (
        0 < num_tokens <= MOST_TOKENS and x.dtype == torch.bfloat16 and x.stride(1) == 1 and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0 and num_tokens * max(x.shape[1], top_k * down.in_features) <= MOST_INPUTS
        and gate_up.has_powers and down.has_powers and _is_described(gate_up) and _is_described(down)
    )


def _is_described(weight: DeviceCodes) -> bool:
    return not reason_against_cuda(describe_codes(weight, torch.bfloat16, _find_capability(weight.codes.device)))


@cache_compiled
def _can_compile(gate_up: cuda.Form, down: cuda.Form, device: torch.device) -> bool:
    """Whether both kernels can be compiled and loaded; if not, with a warning."""
    try:
        for form, what in ((gate_up, cuda.GATE_UP), (down, cuda.DOWN)):
            cuda.find_kernel(form, what, cuda.FINE, device)
    except (CudaSourceError, OSError, AttributeError) as error:
        logger.warning("experts of few tokens run in Triton: %s", error)
        return False
    return True


@cache_once
def _find_capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def run_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: CodedStack, down: CodedStack, gate: Gate
) -> torch.Tensor:
    """See `CODED_EXPERTS`."""
    if not takes(x, ids, gate_up[0], down[0]) or not _can_compile(
        cuda.describe_form(gate_up[0]), cuda.describe_form(down[0]), x.device
    ):
        is_hopper = _find_capability(x.device)[0] == 9
        return CODED_EXPERTS.load("gluon_pdl" if is_hopper else "triton_pdl")(x, ids, weights, gate_up, down, gate)
    (num_tokens, width), inner, ids = x.shape, down[0].in_features, ids.contiguous()
    gated = torch.empty((ids.numel(), inner), dtype=x.dtype, device=x.device)
    cuda.launch(
        x, gate_up[0], gate_up[1], gated, gate=(GATES[gate.kind], *gate[1:]), chosen=cuda.Chosen(ids, 2 * inner)
    )
    out = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    return cuda.launch(gated, down[0], down[1], out, chosen=cuda.Chosen(ids, width, weights.contiguous()))
