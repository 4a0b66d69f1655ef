"""How the product asks for each source of ``csrc/cuda``: calls of its own functions that find kernels, with arguments
as models give them, so that there is a case for each variant of the code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from headrace.kernels.attention import fp8_decodes
from headrace.kernels.attention import hopper as chunks
from headrace.kernels.attention.blocks import Head
from headrace.kernels.coded_linear import cuda as coded_rows
from headrace.kernels.coded_linear import fp8_rows, fp8_split, tiled_block, tiled_many, tiles, wide
from headrace.kernels.coded_linear.hopper import GATES
from headrace.kernels.collective import calls
from headrace.kernels.few_decodes import Rotation
from headrace.kernels.few_decodes import hopper as few_decodes
from headrace.kernels.linear import gated_product, rows, wave_product, waves
from headrace.kernels.lora import adapted_norm, additions, rotated
from headrace.kernels.moe import (
    coded_few,
    fp8_few,
    linear_route,
    many,
    norm_route,
    pair_order,
    parts,
    plain_few,
    plain_many,
    rounded,
    sorted_rows,
)
from headrace.kernels.span_attention import hopper as spans
from headrace.kernels.sparse_attention import few_scores, selection
from headrace.kernels.sparse_attention import hopper as sparse
from headrace.kernels.streams import cuda as streams
from headrace.kernels.streams import few as streams_few
from headrace.kernels.streams import groups as streams_groups

DEVICE = torch.device("cuda", 99)
"""For which no other test finds kernels, as these are kept by device."""
F32, F16, BF16, E4M3 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn

Find = Callable[[], object]


def each(find: Callable[..., object], *cases: tuple[object, ...], **options: object) -> list[Find]:
    """A call for each, with `DEVICE` as the last argument."""
    return [partial(find, *case, DEVICE, **options) for case in cases]


def few_decodes_of(
    head_dim: int, group: int, dtype: torch.dtype, rotary_dim: int, *, has_norm: bool = False,
    interleaved: bool = False, softcap: float = 0.0,
) -> Find:
    """Of a kv head with ``group`` query heads, over pages of 64 tokens in ``dtype``; ``rotary_dim`` 0: no rotation."""
    one = torch.empty(1)
    shape = dict(
        num_heads=group, num_kv_heads=1, head_dim=head_dim, rotary_dim=rotary_dim, interleaved=interleaved,
        norm_eps=1e-6, norm_offset=0.0,
    )
    rotation = Rotation(one, one if rotary_dim else None, one, (one, one) if has_norm else None, shape)
    pages, cluster = torch.empty(1, 64, 1, head_dim, dtype=dtype), few_decodes.DIVISIONS[head_dim][0].cluster
    macros = few_decodes.list_macros(rotation, pages, Head(0.1, softcap=softcap), cluster)
    num_bytes = few_decodes.count_shared_bytes(head_dim, group, cluster)
    return partial(few_decodes._find_kernel, num_bytes, cluster, DEVICE, **macros)


def fp8_decodes_of(head_dim: int, group: int, dtype: torch.dtype, *, has_softcap: bool = False) -> Find:
    """Over pages of 64 tokens and 8 kv heads."""
    macros = fp8_decodes.list_macros(head_dim, group, 8, 64)
    return partial(fp8_decodes._find_kernel, head_dim, dtype, has_softcap, DEVICE, **macros)


def norm_route_of(num_experts: int, width: int, score: str, renormalise: bool) -> Find:
    sizes = num_experts, norm_route.ceil_div(width, norm_route.CHUNK), norm_route.SCORES[score], renormalise
    return partial(norm_route._find_kernel, *sizes, norm_route.count_shared_bytes(num_experts, width), DEVICE)


def linear_route_of(num_experts: int, width: int, num_tokens: int, score: str, renormalise: bool) -> Find:
    form = linear_route.find_form(num_experts, width, num_tokens)
    assert form is not None
    return partial(linear_route._find_kernel, num_experts, form, linear_route.SCORES[score], renormalise, DEVICE)


INT4, INT4_PAIRS, INT8 = tiles.Form(0, 0, 128), tiles.Form(0, 1, 32), tiles.Form(3, 0, 0)
UINT8, Q4_K = tiles.Form(4, 1, 128), tiles.Form(0, 0, 0, super_form=1)

CASES: dict[str, list[Find]] = {
    "adapted_norm": each(adapted_norm._find_kernel, (16, 48, 1), (64, 0, 2)),
    "coded_experts": each(
        coded_few.find_kernel, (coded_few.Form(False, 1, coded_few.SHAPES[0], True),),
        (coded_few.Form(False, 2, coded_few.SHAPES[1], False),), (coded_few.Form(True, 1, coded_few.SHAPES[0], False),),
        (coded_few.Form(True, 4, coded_few.SHAPES[1], True),),
    ),
    "coded_rows": each(
        coded_rows.find_kernel, (coded_rows.Form(0, 1, 0, 128, 1), coded_rows.NARROW),
        (coded_rows.Form(0, 0, 1, 32, 0), coded_rows.FINE), (coded_rows.Form(1, 0, 0, 128, 1), coded_rows.WIDE),
        (coded_rows.Form(2, 2, 0, 32, 1), coded_rows.NARROW), (coded_rows.Form(3, 0, 0, 0, 1), coded_rows.WIDE),
    ),
    "collective": each(
        calls.find_kernel, ("sum_1_0_1", 2, BF16), ("sum_2_1_2", 2, F16), ("sent_4_1", 2, F32), ("gather", 2, BF16),
    ),
    "expand": each(additions._find_expand, (0, 16), (1, 16), (2, 64)),
    "expand_norm": each(additions._find_norm, (1, 16), (2, 64)),
    "expand_norm_many": each(additions._find_norm_many, (1, 1, 16), (2, 2, 16), (2, 4, 64)),
    "expand_rope": each(
        rotated._find_kernel, (64, False, 16), (64, True, 32), (32, True, 16), (128, False, 16),
    ),
    "few_decodes": [
        few_decodes_of(128, 8, BF16, 128, has_norm=True),
        few_decodes_of(64, 16, BF16, 32, interleaved=True, softcap=30.0), few_decodes_of(128, 5, E4M3, 0),
        few_decodes_of(64, 8, E4M3, 64, has_norm=True, softcap=30.0),
    ],
    "fp8_decodes": [
        fp8_decodes_of(128, 4, BF16), fp8_decodes_of(64, 16, F16, has_softcap=True),
    ],
    "fp8_few": each(
        fp8_few.find_kernel, (fp8_few.Form(fp8_few.GATE_UP_SHAPE, False),), (fp8_few.Form(fp8_few.DOWN_SHAPE, True),)
    ),
    "fp8_product": [
        *each(wide.find_kernel, (wide.Tile(128, 2), "", 8), has_groups=True, is_fp8=False),
        *each(
            wide.find_kernel, (wide.Tile(256, 2), "silu", 128), (wide.Tile(256), "gelu_tanh", 0), has_groups=True,
            is_fp8=True,
        ),
        *each(
            wide.find_kernel, (wide.Tile(256), "clamped", 32), (wide.Tile(128), "", 0), has_groups=False, is_fp8=False
        ),
    ],
    "fp8_rows": each(
        fp8_rows.find_kernel, (8, fp8_rows.RING, 0, True, True), (16, replace(fp8_rows.RING, splits=2), 1, False, True),
        (8, fp8_rows.LOWER[0], 3, True, False), (16, fp8_rows.LOWER[1], 2, False, False),
    ),
    "fp8_split": each(fp8_split.find_kernel, (1, False), (2, False), (1, True), (2, True)),
    "gated_product": [
        *each(gated_product.find_kernel, (BF16, "silu"), (F16, "gelu_tanh")),
        *each(gated_product.find_kernel, (BF16, "silu"), (BF16, "gelu_tanh"), is_adapted=True),
    ],
    "index_scores": each(few_scores.find_kernel, (64, False), (32, True)),
    "linear_route": [
        linear_route_of(128, 2048, 4, "softmax", True), linear_route_of(32, 2880, 200, "sigmoid", False),
        linear_route_of(256, 2048, 64, "sqrt_softplus", True),
    ],
    "mxfp4_parts": each(
        parts.find_kernel, *((tile, gate, 32) for tile, gate in zip(parts.TILES, ("clamped", "", "silu"), strict=True)),
        (parts.TILES[0], "", 128),
    ),
    "mxfp4_product": each(
        sorted_rows.find_kernel, *((many._tile_of(rows), gate) for rows in many.MXFP4_ROWS for gate in GATES),
    ),
    "mxfp4_rounded": each(sorted_rows.find_kernel, *((tile, gate) for tile in rounded.TILES for gate in GATES)),
    "norm_route": [
        norm_route_of(128, 2048, "softmax", True), norm_route_of(32, 2880, "sigmoid", False),
        norm_route_of(256, 7168, "sqrt_softplus", True),
    ],
    "plain_experts": each(plain_few.find_kernel, (False, 1), (True, 1), (True, 8)),
    "plain_rows": each(
        rows.find_kernel, (1, 2, True, True, False), (2, 1, False, False, False), (1, 4, True, False, True),
    ),
    "prefill": [
        *each(chunks.find_kernel, (64, 192, F16), has_softcap=True, has_splits=True),
        *each(chunks.find_kernel, (64, 128, BF16), has_softcap=False, has_splits=False),
        *each(chunks.find_kernel, (128, 128, BF16), has_softcap=False, has_splits=True),
    ],
    "select_entries": each(selection.find_kernels, ()),
    "sort_pairs": each(pair_order.find_kernel, ()),
    "sorted_product": each(plain_many.find_kernel, ("", 128), ("silu", 128)),
    "span_attention": each(
        spans.find_kernel,
        *((dim, groups, F16 if dim == 96 else BF16) for dim in (64, 72, 80, 88, 96, 104, 112, 128)
          for groups in spans.list_groups(dim)[-1:]),
    ),
    "sparse_attention": each(sparse.find_kernel, ()),
    "streams": [
        find for width, num_tokens, writes in ((4096, 4, True), (7168, 1024, False))
        for find in each(
            streams.find_kernels, (width, streams.choose_tile(num_tokens, width)), writes=writes
        )
    ],
    "streams_few": [
        partial(streams_few.find_kernel, 4096, DEVICE, writes=writes, ranks=ranks)
        for writes, ranks in ((False, 1), (True, 8))
    ],
    "streams_groups": [
        partial(streams_groups.find_kernel, width, DEVICE, writes=writes, ranks=ranks)
        for width, writes, ranks in ((4096, False, 1), (4096, True, 1), (7168, True, 2))
    ],
    "tiled_block": each(
        tiled_block.find_kernel,
        *((form, tiled_block.choose_block(form, most)) for form, most in (
            (INT4, 16), (INT4_PAIRS, 32), (INT8, 64), (UINT8, 16), (Q4_K, 16), (Q4_K._replace(super_form=4), 64))),
    ),
    "tiled_many": each(
        tiled_many.find_kernel,
        *((form, is_whole, tile, gate) for tile, (form, is_whole, gate) in zip(tiled_many.TILES, (
            (INT4, False, 0), (INT4_PAIRS, True, 1), (INT4, False, 2), (INT4_PAIRS._replace(group=128), False, 0),
            (INT4._replace(group=0), False, 0)), strict=True)),
        *((Q4_K._replace(super_form=form), False, tiled_many.TILES[tile], gate) for form, tile, gate in (
            (1, 1, 1), (2, 1, 0), (3, 2, 0), (4, 4, 2))),
        (Q4_K._replace(tail_form=4), False, tiled_many.TILES[4], 0),
        (Q4_K._replace(super_form=2, tail_form=3), False, tiled_many.TILES[3], 0),
    ),
    "tiled_rows": each(
        tiles.find_kernel, (INT4, tiles.SHAPES[0], 0), (INT4_PAIRS, tiles.SHAPES[1], 0), (UINT8, tiles.SHAPES[0], 0),
        (Q4_K._replace(tail_form=4), tiles.SHAPES[0], 1), (Q4_K._replace(super_form=2), tiles.SHAPES[1], 8),
        (Q4_K._replace(super_form=3), tiles.SHAPES[1], 2),
    ),
    "wave_product": each(
        wave_product.find_kernel, (waves.Tile(3, 1, 224, True), BF16, "silu"),
        (waves.Tile(2, 2, 224, True), E4M3, "gelu_tanh"), (waves.Tile(2, 1, 224, False), F16, ""),
        (waves.Tile(3, 1, 112, True), E4M3, ""),
    ),
}
"""By the source's name."""
