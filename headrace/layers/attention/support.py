"""Which geometries the faster attention backends serve; asked before a backend is imported, so nothing is imported
here."""

from __future__ import annotations

from importlib.util import find_spec

from headrace.layers.attention.contract import AttentionGeometry

HALF_TYPES = ("float16", "bfloat16")
FLASHINFER_HEAD_DIMS = (64, 128, 256)


def reason_against_cpu(geometry: AttentionGeometry) -> str | None:
    """Any shape on a CPU, queries in any of three types, pages too, or in 8 bits."""
    if geometry.device != "cpu":
        return "needs a cpu device"
    if not {geometry.dtype, geometry.kv_dtype} <= {"float32", *HALF_TYPES, "int8"} or geometry.dtype == "int8":
        return "takes float32, bfloat16 and float16, and pages of int8"
    return None


def reason_against_triton(geometry: AttentionGeometry) -> str | None:
    """Any head dim up to 256 on a GPU, with keys and values in the type of the queries."""
    if geometry.device != "cuda":
        return "needs a cuda device"
    if find_spec("triton") is None:
        return "triton is not installed"
    if geometry.values_in_keys:
        return "reads values from pages of their own"
    if geometry.kv_dtype != geometry.dtype:
        return f"reads keys and values in {geometry.dtype}, not {geometry.kv_dtype}"
    if max(geometry.head_dim, geometry.value_dim) > 256:
        return "takes head dims up to 256"
    return None


def reason_against_dependent_launch(geometry: AttentionGeometry) -> str | None:
    """The same on devices that can launch a kernel before the one it depends on has ended."""
    if geometry.device == "cuda" and geometry.capability < (9, 0):
        return "needs compute capability 9.0"
    return reason_against_triton(geometry)


def _reason_against_library(
    geometry: AttentionGeometry, module: str, missing: str, capability: tuple[int, int]
) -> str | None:
    """What half-precision kernels of another package ask for; ``missing`` is said where the package is not there."""
    if geometry.device != "cuda":
        return "needs a cuda device"
    if find_spec(module) is None:
        return missing
    if geometry.capability < capability:
        return f"needs compute capability {capability[0]}.{capability[1]}"
    if geometry.dtype not in HALF_TYPES or geometry.kv_dtype != geometry.dtype:
        return "takes queries, keys and values in float16 or bfloat16, all alike"
    if geometry.has_softcap or geometry.has_sinks or geometry.values_in_keys:
        return "has no soft-cap, no sinks, and reads values from pages of their own"
    return None


def reason_against_cudnn(geometry: AttentionGeometry) -> str | None:
    """Half-precision on Hopper and later, head dims up to 128 in steps of 8, without soft-cap and sinks. It has graphs
    for 256 too, but takes a second to build each, while requests wait, and they were no faster than the Triton
    kernels."""
    if reason := _reason_against_library(geometry, "cudnn", "nvidia-cudnn-frontend is not installed", (9, 0)):
        return reason
    if max(geometry.head_dim, geometry.value_dim) > 128 or geometry.head_dim % 8 or geometry.value_dim % 8:
        return "takes head dims up to 128 that are multiples of 8"
    if geometry.page_size < 16:
        return "takes pages of at least 16 tokens"
    return None


def reason_against_flashinfer(geometry: AttentionGeometry) -> str | None:
    """Half-precision on Ampere and later, three head dims, without soft-cap and sinks."""
    missing = "flashinfer-python is not installed: pip install 'headrace[flashinfer]'"
    if reason := _reason_against_library(geometry, "flashinfer", missing, (8, 0)):
        return reason
    if geometry.head_dim not in FLASHINFER_HEAD_DIMS or geometry.value_dim != geometry.head_dim:
        return f"takes head dims {', '.join(map(str, FLASHINFER_HEAD_DIMS))}, keys and values alike"
    return reason_against_triton(geometry)
