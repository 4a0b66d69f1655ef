"""Programmatic dependent launch (PDL) for Triton kernels: the next kernel's prologue overlaps this kernel's tail.

Hazard: every kernel launched with PDL must call `wait_for_previous` before it reads anything that an earlier kernel
wrote, or writes anything that one still reads. Loads of weights, which no kernel writes, may come before it.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until earlier kernels have finished and their writes are visible; then allow the next kernel to start."""
    if PDL:
        # In this order: every program waits before it lets the next kernel start, so a kernel's prologue only ever
        # overlaps its direct predecessor, and whatever ran before that one has finished.
        gdc_wait()
        gdc_launch_dependents()


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def count_tiles(num_rows: int, rows: int, num_groups: int) -> int:
    """The most tiles of ``rows`` rows that rows sorted by group need, however many each group has: one partly filled
    tile a group."""
    return min(num_rows, num_rows // rows + num_groups)


def next_power_of_2(n: int) -> int:
    """The smallest power of two >= n, for n >= 1."""
    return 1 << (n - 1).bit_length()
