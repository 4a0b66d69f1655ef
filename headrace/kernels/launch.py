"""Programmatic dependent launch for Triton kernels: the next kernel's prologue overlaps this kernel's tail.

Every kernel that may be launched so calls `wait_for_previous` before it touches anything an earlier kernel wrote or
still reads; loads of weights may come before it. Refuses: choosing kernels, which the operations' registries do.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until the kernels launched before have finished and their writes are visible; then let the next one
    start."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least n (n >= 1)."""
    return 1 << (n - 1).bit_length()
