"""Memory layout of DeepSeek-V4's caches as plain numbers, and the page policy of compressor state. Torch-free: the
scheduler loads the policy by name.

A page of any cache group covers ``page_size`` tokens; groups differ in how many slots they store for these. N plain
and R rotated dims of a vector.
"""

from __future__ import annotations

from headrace.base.cache import CacheSpec
from headrace.base.errors import ConfigError
from headrace.base.step import MAX_DRAFTS
from headrace.kernels.latents import GROUP, KEY_SCALE_BYTES, ROTATED, SCALE_BYTES

WINDOW, WINDOW_FP8 = "deepseek_v4.window", "deepseek_v4.window_fp8"
ENTRIES, ENTRIES_FP8 = "deepseek_v4.entries", "deepseek_v4.entries_fp8"
INDEX_KEYS, INDEX_KEYS_FP8 = "deepseek_v4.index_keys", "deepseek_v4.index_keys_fp8"
INDEX_KEYS_FP4 = "deepseek_v4.index_keys_fp4"
STATE = "deepseek_v4.state"

OVERLAPPING, WIDE = 4, 128
"""The two compress ratios, in tokens: windows of 4 whose entries also pool the window before, and windows of 128 that
do not overlap."""

PAGE_SIZE = 256
BLOCK = 128
"""Tokens that share one ring of compressor rows; a page is a whole number of blocks, so a ring never crosses pages. The
largest ratio, so that a block holds whole windows of both kinds."""

MXFP4_BLOCK = 32
"""Dims of an index key that share a scale."""
FP8, FP4 = "float8_e4m3fn", "float4_e2m1fn_x2"
SCORES_AT_ONCE = 2**28
"""Most scores of index keys that exist at a time: 1 GiB."""
SCORES_CAPTURED = 2**26
"""The same in captured steps with prefill, which have a column for each entry of the longest context."""


def packed_value_bytes(head_dim: int) -> int:
    """Bytes of a packed slot without its scales: N of e4m3, then R bfloat16. Raises `ConfigError` for a head dim whose
    scales do not fit `SCALE_BYTES`."""
    plain = head_dim - ROTATED
    if plain <= 0 or plain % GROUP or plain // GROUP > SCALE_BYTES:
        raise ConfigError(f"head_dim {head_dim} cannot be packed in 8 bits: serve with kv_dtype auto", param="kv_dtype")
    return plain + 2 * ROTATED


def packed_page_bytes(head_dim: int, slots: int) -> int:
    """Bytes of a page: all slots' values, then all slots' scales, padded to a multiple of one slot's value bytes."""
    value = packed_value_bytes(head_dim)
    return -(-slots * (value + SCALE_BYTES) // value) * value


def narrow_key_bytes(head_dim: int) -> tuple[int, int]:
    """Bytes of an index key in MXFP4, and of its scales. Raises `ConfigError` for a head dim that is no whole number of
    blocks."""
    if head_dim % MXFP4_BLOCK:
        raise ConfigError(
            f"index keys of {head_dim} dims cannot be kept in MXFP4, which takes multiples of {MXFP4_BLOCK}: take "
            "kv_dtype fp8", param="kv_dtype"
        )
    return head_dim // 2, head_dim // MXFP4_BLOCK


def ring_rows(ratio: int) -> int:
    """Compressor rows stored per block of tokens, which is the window of their spec. An unfinished window has up to
    ``ratio - 1`` tokens; where windows overlap, the ``ratio`` tokens of the window before are needed too."""
    return 2 * ratio if ratio == OVERLAPPING else ratio


def draft_ring_rows(ratio: int) -> int:
    """The same where steps verify drafts: a row that wrong drafts overwrite may not be one that is still needed. Of the
    wide ratio each token of a block has a row of its own."""
    return ring_rows(ratio) + MAX_DRAFTS if ratio == OVERLAPPING else ratio


def slots_per_page(spec: CacheSpec, page_size: int) -> int:
    """Slots (for compressor state: rows) that a page of ``page_size`` tokens has; raises `ConfigError` for a size that
    does not hold whole windows."""
    if page_size % BLOCK:
        raise ConfigError(
            f"page_size must be a multiple of {BLOCK} for compressed attention, usually {PAGE_SIZE}; got {page_size}",
            param="page_size"
        )
    if spec.kind == STATE:
        return page_size // BLOCK * spec.window
    return page_size // spec.compress_ratio


def slot_bytes(spec: CacheSpec) -> int:
    """Bytes of one slot of one layer, without the padding of pages."""
    if spec.kind == STATE:
        return 4 * (spec.head_dim + spec.value_dim)
    if spec.kind == INDEX_KEYS_FP4:
        return sum(narrow_key_bytes(spec.head_dim))
    if spec.kind == INDEX_KEYS_FP8:
        return spec.head_dim + KEY_SCALE_BYTES
    if spec.kind in (WINDOW_FP8, ENTRIES_FP8):
        return packed_value_bytes(spec.head_dim) + SCALE_BYTES
    return spec.head_dim * {"float32": 4, "bfloat16": 2, "float16": 2}[spec.dtype]


def token_bytes(specs: list[CacheSpec], window_share: float) -> float:
    """Cache bytes per token over all layers, if groups with a window have ``window_share`` (0 to 1) of the pages that
    the other groups have."""
    return sum(
        slot_bytes(spec) * slots_per_page(spec, PAGE_SIZE) / PAGE_SIZE * (window_share if spec.window else 1.0)
        for spec in specs
    )


class CompressorStatePolicy:
    """Page policy of compressor state: rows are needed for the tokens of an unfinished window and, where windows
    overlap, of the window before. Page borders are window borders, so a prefix hit, which ends at a page border, needs
    only the last page for overlapping windows, and no page for others."""

    is_chained = False

    def __init__(self, spec: CacheSpec, page_size: int):
        self._page_size, self._ratio = page_size, spec.compress_ratio
        # how far before an unfinished window rows are read; rings may be longer
        self._back = ring_rows(spec.compress_ratio) - spec.compress_ratio

    def first_needed(self, length: int) -> int:
        return max(0, length - length % self._ratio - self._back) // self._page_size

    def peak_pages(self, length: int, at_once: int = 1) -> int:
        return min(-(-length // self._page_size), 2 if self._back else 1)
