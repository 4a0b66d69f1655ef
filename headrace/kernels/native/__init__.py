"""Own CPU kernels in C++: found or compiled, loaded, and offered as operators. Knows no operation by name."""

from headrace.kernels.native.loading import NATIVE, build, select_isa, ship, state

__all__ = ["NATIVE", "build", "select_isa", "ship", "state"]
