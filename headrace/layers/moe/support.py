"""Which mixtures of experts the plug-ins serve; asked before one is imported. Queries carry the shape that `moe_query`
gives them."""

from __future__ import annotations

from headrace.kernels.operation import KernelQuery


def reason_against_many_ranks(query: KernelQuery) -> str | None:
    """For what moves no tokens between devices."""
    ranks = query.shape.get("ranks", 1)
    return f"keeps tokens on one device, and the experts are on {ranks}" if ranks > 1 else None
