"""The kernels of ``csrc/cuda/collective.cu`` and the parts in which they are compiled, at the same time. Torch-free, so
that a start can compile them before it has imported torch.
"""

from __future__ import annotations

from headrace.kernels.nvrtc import Source, describe_for

SOURCE = "collective"
TYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
"""``TYPE`` of the source, by names of dtypes; `MOVED` has that of `WORDS`, and moves any."""
MOST_THREADS = 512
VECTORS = (1, 2, 4)
"""Of a thread and row, 16 bytes each."""
MOST_WIDTH = MOST_THREADS * VECTORS[-1]
"""Vectors of a row."""
SENT, MOVED = 3, 4
"""Parts of sums of what copies have brought, and of kernels that move words. Parts 1 and 2: sums in so many steps."""
ENTRIES: dict[str, tuple[int, int]] = {
    **{f"sum_{count}_{norm}_{steps}": (steps, count) for steps in (1, 2) for count in VECTORS for norm in (0, 1)},
    **{f"sent_{count}_{norm}": (SENT, count) for count in VECTORS for norm in (0, 1)},
    "gather": (MOVED, 0), "exchange": (MOVED, 0),
}
"""The kernels: the part of each, and the vectors of a thread for which it is compiled apart, as these take longest."""
WORDS = TYPES["bfloat16"]


def list_macros(entry: str, ranks: int, dtype: int) -> dict[str, int]:
    """What `describe_for` takes for the part that has a kernel, for one of `TYPES`."""
    part, count = ENTRIES[entry]
    macros = {"WORLD": ranks, "TYPE": WORDS if part == MOVED else dtype, "PART": part}
    return {**macros, "COUNT": count} if count else macros


def list_sources(ranks: int, dtype: int, capability: tuple[int, int]) -> list[Source]:
    """All parts for a type, those that take longest first."""
    longest_first = sorted(ENTRIES, key=lambda entry: -ENTRIES[entry][1])
    return list(dict.fromkeys(
        describe_for(SOURCE, capability, **list_macros(entry, ranks, dtype)) for entry in longest_first
    ))


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up. That of `headrace.kernels.launch` needs Triton, and every engine imports this module."""
    return -(-a // b)


def shape_row(width: int) -> tuple[int, int]:
    """Vectors of a thread, and threads of a block, for rows of ``width`` vectors, at most `MOST_WIDTH`."""
    per_thread = next(count for count in VECTORS if width <= count * MOST_THREADS)
    return per_thread, ceil_div(ceil_div(width, per_thread), 32) * 32
