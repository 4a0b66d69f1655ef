"""Which mixtures of experts the plug-ins serve; asked before one is imported. Queries carry the shape that `moe_query`
gives them."""

from __future__ import annotations

from headrace.kernels.moe import RUN_EXPERTS
from headrace.kernels.operation import KernelQuery
from headrace.kernels.packed_linear.layout import PANEL


def reason_against_many_ranks(query: KernelQuery) -> str | None:
    """For what moves no tokens between devices."""
    ranks = query.shape.get("ranks", 1)
    return f"keeps tokens on one device, and the experts are on {ranks}" if ranks > 1 else None


def reason_against_packed(query: KernelQuery) -> str | None:
    """For what takes experts as plain matrices."""
    return "takes plain matrices, and the experts are kept in 4 bits" if query.shape.get("mxfp4") else None


def reason_against_plain(query: KernelQuery) -> str | None:
    """For what takes experts in MXFP4 alone."""
    return None if query.shape.get("mxfp4") else "takes experts that are kept in MXFP4"


def reason_against_joined(query: KernelQuery) -> str | None:
    """For own kernels: half precision on a GPU that has a solution for all of it."""
    if query.device != "cuda" or RUN_EXPERTS.reason_against("triton_pdl", query):
        return "has no kernels for this device and dtype"
    return reason_against_packed(query)


def reason_against_stored(query: KernelQuery) -> str | None:
    """For what takes experts in packed layout: on a CPU, in whole panels."""
    if query.device != "cpu" or query.dtype not in ("float32", "bfloat16"):
        return "takes float32 and bfloat16 on a CPU"
    if any(width % PANEL for width in (query.shape.get("width", 1), 2 * query.shape.get("expert_width", 1))):
        return f"takes widths in steps of {PANEL}"
    return reason_against_packed(query)
