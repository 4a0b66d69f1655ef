"""Attention backends and their contract, registered here with the geometries they support. Imports kernels only, no
other layers.

The predicates return the reason why a geometry is not supported, or None. They run before a backend is imported, so
they import none.
"""

from __future__ import annotations

from importlib.util import find_spec

from headrace.kernels.attention import HOPPER_LEAST_PAGE, HOPPER_ROWS
from headrace.kernels.operation import SMALL_BLOCK, count_block_bytes
from headrace.layers.attention.contract import ATTENTION_BACKENDS, AttentionGeometry

HALF_TYPES = ("float16", "bfloat16")
FLOAT8 = "float8_e4m3fn"
FLASHINFER_HEAD_DIMS = (64, 128, 256)
MOST_WIDE_GROUP = 32
HOPPER = (9, 0)
"""Its compute capability."""


def reason_against_cpu(geometry: AttentionGeometry) -> str | None:
    """Any shape on a CPU; queries in three float types, pages in these or int8."""
    if geometry.device != "cpu":
        return "needs a cpu device"
    if not {geometry.dtype, geometry.kv_dtype} <= {"float32", *HALF_TYPES, "int8"} or geometry.dtype == "int8":
        return "takes float32, bfloat16 and float16, and pages of int8"
    return None


def reason_against_triton(geometry: AttentionGeometry) -> str | None:
    """Any head dim up to 256 on a GPU, with keys and values in the dtype of the queries or in 8-bit floats. Wide heads
    in large groups need large blocks."""
    if geometry.device != "cuda":
        return "needs a cuda device"
    if find_spec("triton") is None:
        return "triton is not installed"
    if geometry.values_in_keys:
        return "reads values from pages of their own"
    if geometry.kv_dtype == FLOAT8 and geometry.capability < (8, 9):
        return "converts 8-bit floats from compute capability 8.9 on"
    if geometry.kv_dtype not in (geometry.dtype, FLOAT8):
        return f"reads keys and values in {geometry.dtype} and {FLOAT8}, not {geometry.kv_dtype}"
    if max(geometry.head_dim, geometry.value_dim) > 256:
        return "takes head dims up to 256"
    # queries and the pipeline of more take 102 KB
    is_small = count_block_bytes(geometry.capability) == SMALL_BLOCK
    if is_small and geometry.head_dim > 128 and geometry.num_heads // geometry.num_kv_heads > MOST_WIDE_GROUP:
        return f"takes up to {MOST_WIDE_GROUP} query heads of a kv head with head dims beyond 128 in a block of 99 KiB"
    return None


def reason_against_dependent_launch(geometry: AttentionGeometry) -> str | None:
    """As `reason_against_triton`, on devices with programmatic dependent launch (Hopper and later)."""
    return _reason_against_early_launch(geometry) or reason_against_triton(geometry)


def _reason_against_early_launch(geometry: AttentionGeometry) -> str | None:
    return "needs compute capability 9.0" if geometry.device == "cuda" and geometry.capability < (9, 0) else None


def reason_against_latents(geometry: AttentionGeometry) -> str | None:
    """Latents up to 512 dims on a GPU, which all heads share, in the dtype of the queries or in 8-bit floats."""
    if geometry.device != "cuda":
        return "needs a cuda device"
    if find_spec("triton") is None:
        return "triton is not installed"
    if not geometry.values_in_keys or geometry.num_kv_heads != 1:
        return "reads values from the pages of keys, of one head"
    if geometry.kv_dtype == FLOAT8 and geometry.capability < (8, 9):
        return "converts 8-bit floats from compute capability 8.9 on"
    if geometry.kv_dtype not in (geometry.dtype, FLOAT8):
        return f"reads latents in {geometry.dtype} and {FLOAT8}, not {geometry.kv_dtype}"
    # beside 128 rotated dims, 64 rows and the pipeline of 512 take 248 KiB
    most_rotated = 128 if geometry.value_dim <= 256 else 64
    if geometry.value_dim > 512 or not 0 < geometry.head_dim - geometry.value_dim <= most_rotated:
        return "takes latents of up to 512 dims, beside up to 64 rotated ones; of up to 256 dims beside up to 128"
    if geometry.window or geometry.has_softcap or geometry.has_sinks:
        return "has no window, no soft-cap and no sinks"
    return None


def reason_against_latents_early(geometry: AttentionGeometry) -> str | None:
    """As `reason_against_latents`, with programmatic dependent launch."""
    return _reason_against_early_launch(geometry) or reason_against_latents(geometry)


def _reason_against_types(geometry: AttentionGeometry) -> str | None:
    if geometry.dtype not in HALF_TYPES or geometry.kv_dtype != geometry.dtype:
        return "takes queries, keys and values in float16 or bfloat16, all alike"
    return None


def reason_against_hopper(geometry: AttentionGeometry) -> str | None:
    """Half-precision on Hopper, two head dims, any window, soft-cap and sinks."""
    return _reason_against_types(geometry) or _reason_against_chunks(geometry)


def reason_against_expanding(geometry: AttentionGeometry) -> str | None:
    """As `reason_against_hopper`, with pages of 8-bit floats."""
    if geometry.dtype not in HALF_TYPES or geometry.kv_dtype != FLOAT8:
        return f"takes queries in float16 or bfloat16, keys and values in {FLOAT8}"
    return _reason_against_chunks(geometry)


def _reason_against_chunks(geometry: AttentionGeometry) -> str | None:
    """Shapes that `headrace.kernels.attention.hopper` does not take."""
    if reason := reason_against_dependent_launch(geometry):
        return reason
    if geometry.capability != HOPPER:
        return "is made for compute capability 9.0"
    if geometry.head_dim not in HOPPER_ROWS or geometry.value_dim != geometry.head_dim:
        return f"takes head dims {', '.join(map(str, HOPPER_ROWS))}, keys and values alike"
    most_heads = min(HOPPER_ROWS[geometry.head_dim])
    if geometry.num_heads // geometry.num_kv_heads > most_heads:
        return f"takes up to {most_heads} query heads of a kv head"
    if geometry.page_size < HOPPER_LEAST_PAGE or geometry.page_size & (geometry.page_size - 1):
        return f"takes pages of {HOPPER_LEAST_PAGE} tokens or more, powers of two"
    return None


def _reason_against_library(
    geometry: AttentionGeometry, module: str, missing: str, capability: tuple[int, int]
) -> str | None:
    """Requirements shared by the half-precision kernels of other packages. ``module`` must be importable, else the
    reason is ``missing``; ``capability`` is the least compute capability."""
    if geometry.device != "cuda":
        return "needs a cuda device"
    if find_spec(module) is None:
        return missing
    if geometry.capability < capability:
        return f"needs compute capability {capability[0]}.{capability[1]}"
    if reason := _reason_against_types(geometry):
        return reason
    if geometry.has_softcap or geometry.has_sinks or geometry.values_in_keys:
        return "has no soft-cap, no sinks, and reads values from pages of their own"
    return None


def reason_against_cudnn(geometry: AttentionGeometry) -> str | None:
    """Half-precision on Hopper and later, head dims up to 128 in steps of 8, without soft-cap and sinks. Graphs for 256
    exist, but each takes a second to build while requests wait, and they were no faster than the Triton kernels."""
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


# The supporting backend of the highest priority is chosen; without a predicate a backend supports everything.
ATTENTION_BACKENDS.add(
    "reference", "headrace.layers.attention.reference:ReferenceAttention", doc="plain torch, any device and geometry"
)
ATTENTION_BACKENDS.add(
    "cpu", "headrace.layers.attention.cpu:CpuAttention", supports=reason_against_cpu, priority=10,
    doc="own C++ kernels, compiled at first use; plain torch until then",
)
ATTENTION_BACKENDS.add(
    "triton", "headrace.layers.attention.triton:TritonAttention", supports=reason_against_triton, priority=10,
    doc="own kernels: any geometry on a GPU",
)
ATTENTION_BACKENDS.add(
    "triton_pdl", "headrace.layers.attention.triton:DependentLaunchTritonAttention",
    supports=reason_against_dependent_launch, priority=15,
    doc="the same with programmatic dependent launch",
)
ATTENTION_BACKENDS.add(
    "latent_triton", "headrace.layers.attention.latents:LatentTritonAttention", supports=reason_against_latents,
    priority=10, doc="own kernels for latents (MLA)",
)
ATTENTION_BACKENDS.add(
    "latent_triton_pdl", "headrace.layers.attention.latents:DependentLaunchLatentTritonAttention",
    supports=reason_against_latents_early, priority=15, doc="the same with programmatic dependent launch",
)
ATTENTION_BACKENDS.add(
    "hopper", "headrace.layers.attention.hopper:HopperAttention", supports=reason_against_hopper, priority=25,
    doc="own CUDA C++ for chunks, the Triton kernels for decodes",
)
ATTENTION_BACKENDS.add(
    "hopper_fp8", "headrace.layers.attention.expanded:ExpandingAttention", supports=reason_against_expanding,
    priority=25, doc="own CUDA C++ for decodes over FP8 pages, and for chunks, whose pages are expanded",
)
ATTENTION_BACKENDS.add(
    "cudnn", "headrace.layers.attention.cudnn:CudnnAttention", supports=reason_against_cudnn, priority=20,
    doc="cuDNN's paged attention; needs nvidia-cudnn-frontend",
)
ATTENTION_BACKENDS.add(
    "flashinfer", "headrace.layers.attention.flashinfer:FlashinferAttention",
    supports=reason_against_flashinfer, priority=1,
    doc="flashinfer's prefill, on request; needs flashinfer-python, and nvcc to compile it",
)
