"""`Operation`: the registry of one operation's solutions. A package holds the contracts of one operation or a few,
``reference.py`` (plain torch, the oracle) and one module per faster solution; its ``__init__`` registers them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headrace.base.registry import Registry


@dataclass(frozen=True)
class KernelQuery:
    """What a solution must support to be chosen. ``device``: torch device type; ``dtype``: torch dtype name;
    ``capability``: CUDA compute capability ((0, 0) elsewhere); ``shape``: the sizes that the operation documents."""

    device: str
    dtype: str
    capability: tuple[int, int] = (0, 0)
    shape: dict[str, int] = field(default_factory=dict)


class Operation(Registry[Callable[..., Any]]):
    """Solutions of one operation. ``OPERATION.choose(query)`` returns the callable once, when a layer is built;
    nothing is looked up on the hot path."""

    def add_triton(self, target: str, *, supports: Callable[[KernelQuery], str | None] | None = None, doc: str) -> None:
        """Register a Triton kernel for GPUs, and ``{target}_pdl``, which from Hopper on is launched with programmatic
        dependent launch (`headrace.kernels.launch`)."""
        on_gpu, on_hopper = supports or requires(device="cuda"), requires(device="cuda", capability=(9, 0))
        self.add("triton", target, supports=on_gpu, priority=10, doc=doc)
        self.add(
            "triton_pdl", f"{target}_pdl", supports=lambda query: on_hopper(query) or on_gpu(query), priority=15,
            doc="the same, with dependent launch",
        )


LARGE_BLOCK = 227 << 10
"""Shared memory that a block may have on Hopper and on data centres' Blackwell, in bytes."""
SMALL_BLOCK = 99 << 10
"""The same on GPUs for desktops, of all generations: the least from compute capability 8.0 on."""
BLOCK_BYTES: dict[tuple[int, int] | int, int] = {
    (8, 0): 163 << 10, (8, 7): 163 << 10, 9: LARGE_BLOCK, 10: LARGE_BLOCK
}
"""By compute capability, or by its major number: table "technical specifications" of the CUDA programming guide."""


def count_block_bytes(capability: tuple[int, int]) -> int:
    """The most shared memory of a block, in bytes. Not "the more the later": 12.0 has less than 8.0."""
    return BLOCK_BYTES.get(capability, BLOCK_BYTES.get(capability[0], SMALL_BLOCK))


def requires(
    *, device: str | None = None, dtypes: tuple[str, ...] = (), capability: tuple[int, int] = (0, 0),
    block_bytes: int = 0,
) -> Callable[[KernelQuery], str | None]:
    """A ``supports`` predicate for the common cases: it returns the reason against a query, or None. ``capability`` is
    the least CUDA compute capability, ``block_bytes`` the shared memory that a block needs."""

    def reason_against(query: KernelQuery) -> str | None:
        if device is not None and query.device != device:
            return f"needs a {device} device"
        if dtypes and query.dtype not in dtypes:
            return f"takes {', '.join(dtypes)}, not {query.dtype}"
        if query.device == "cuda" and query.capability < capability:
            return f"needs compute capability {capability[0]}.{capability[1]}"
        if query.device == "cuda" and count_block_bytes(query.capability) < block_bytes:
            return f"needs {block_bytes >> 10} KiB of shared memory for a block"
        return None

    return reason_against


def requires_hopper(query: KernelQuery) -> str | None:
    """A ``supports`` predicate of kernels with what only compute capability 9.0 has, such as wgmma: not "9.0 or later".
    """
    return None if query.capability[0] == 9 else "needs Hopper's tensor cores, compute capability 9.0"


def choose_fused(operation: Operation, query: KernelQuery) -> Callable[..., Any] | None:
    """The best kernel of an operation that fuses several, or None if there is only the reference: then the separate
    operations, each with its own best kernel, are faster."""
    chosen = operation.choose(query)
    return None if chosen is operation.load("reference") else chosen
