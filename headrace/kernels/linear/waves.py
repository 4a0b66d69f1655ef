"""How products of some hundred rows are divided into one wave of tiles on Hopper (`wave_product`), and how long they
are estimated to take.

M rows of x, N rows of the weight, K inputs. Needs neither a device nor torch's kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from headrace.kernels.cuda_source import MOST_BYTES, keep_apart

ROW_BYTES, BLOCK, CLUSTER = 128, 64, 2
"""As in the source: bytes of inputs of a stage, rows of an instruction, blocks of a cluster."""
MOST_WIDTH, MOST_WIDTH_OF_256 = 256, 224
"""Rows of the weight in a tile, at most; the latter beside 256 rows of x, as registers hold all sums."""
MOST_ROWS = 256
MOST_STAGES = 8
SLACK_BYTES = 1024 + 4 * 512
"""Of shared memory: to align the tiles, and scales of rows of x and of the weight."""


class Size(NamedTuple):
    """Of a product: M, N, bytes of a row of the weight, whether the activation follows, and multiprocessors."""

    rows: int
    width: int
    row_bytes: int
    is_gated: bool
    num_sms: int = 132


@dataclass(frozen=True)
class Tile:
    """A block multiplies ``warpgroups`` times ``high`` times 64 rows by ``width`` rows of the weight, half of them of
    gate if gated. With ``shares_x`` the two blocks of a cluster have the same rows, else the same rows of the weight
    and half of x each."""

    warpgroups: int
    high: int
    width: int
    shares_x: bool

    @property
    def rows(self) -> int:
        """Of x in a tile."""
        return self.warpgroups * self.high * BLOCK

    @property
    def stage_bytes(self) -> int:
        """Of a stage: of x and of the weight 128 bytes of inputs and two barriers each."""
        return (self.rows + self.width) * ROW_BYTES + 32

    @property
    def stages(self) -> int:
        """Of the rings of x and of the weight in shared memory."""
        return min(MOST_STAGES, (MOST_BYTES - SLACK_BYTES) // self.stage_bytes)

    @property
    def shared_bytes(self) -> int:
        """Of a block: alignment and scales, and the rings."""
        return keep_apart(SLACK_BYTES + self.stages * self.stage_bytes)

    @property
    def threads(self) -> int:
        """Of a block."""
        return 128 * self.warpgroups

    def count_blocks(self, size: Size) -> int:
        """Blocks of a launch, in whole clusters."""
        tiles = ceil_div(size.width, self.width)
        return ceil_div(tiles, CLUSTER) * CLUSTER if self.shares_x else tiles * CLUSTER


CLOCK, L2_RATE, MEMORY_RATE, FIXED = 1.43e9, 6.8e12, 3.5e12, 1.7e-6
"""Hz of a multiprocessor, bytes a second of the L2 and of the memory, and seconds of a launch. Fitted to 26 products
measured on an H200, of 129, 192 and 256 rows in bfloat16 and FP8, 28,672 and 14,336 rows of the weight; the estimates
differ by 3.4% (root mean square), at most by 6.7%. Why the fitted clock is lower than the device's was not measured."""
LIBRARY_MEMORY_RATE, LIBRARY_TILES = 3.9e12, ((128, 256), (192, 128), (128, 128))
"""Of torch's GEMM. The estimate differs from six measured products by up to 13%."""
ACTIVATION_FIXED, ACTIVATION_RATE = 2e-6, 2.75e12
"""Seconds and bytes a second of the activation's kernel."""


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def count_copied_rows(rows: int) -> int:
    """Rows of x that a block copies: half of all, in whole eights."""
    return 8 * ceil_div(rows, 16)


def estimate(size: Size, tile: Tile) -> float:
    """Seconds of a product: the longest of its operations, shared memory's reads and writes, the L2's bytes and the
    memory's."""
    box, blocks, pieces = count_copied_rows(size.rows), tile.rows // BLOCK, ceil_div(size.row_bytes, 32)
    copied = (CLUSTER if tile.shares_x else 1) * box
    # cycles of 32 bytes of inputs: 64 rows take WIDTH / 2 of tensor cores; shared memory gives or takes 128 bytes each
    products = blocks * tile.width / 2
    shared = blocks * (BLOCK + tile.width) / 4 + (copied + tile.width) / 4
    fetched = box + (tile.width if tile.shares_x else tile.width / 2)  # rows that a block asks for
    return FIXED + max(
        max(products, shared) * pieces / CLOCK, tile.count_blocks(size) * fetched * pieces * 32 / L2_RATE,
        size.width * size.row_bytes / MEMORY_RATE
    )


def estimate_library(size: Size) -> float:
    """The same of torch's GEMM, and of the activation's kernel."""
    cycles = min(
        ceil_div(ceil_div(size.rows, rows) * ceil_div(size.width, width), size.num_sms) * rows / BLOCK * width / 2
        for rows, width in LIBRARY_TILES
    )
    products = cycles * ceil_div(size.row_bytes, 32) / CLOCK
    activation = ACTIVATION_FIXED + 3 * size.rows * size.width / ACTIVATION_RATE if size.is_gated else 0.0
    return max(products, size.width * size.row_bytes / LIBRARY_MEMORY_RATE) + activation


def find_tiles(size: Size) -> list[Tile]:
    """Tiles that all run at once: the narrowest of both kinds of cluster."""
    found, clusters = list[Tile](), size.num_sms // CLUSTER
    if size.rows > MOST_ROWS:
        return found
    for shares_x in (True, False):
        most_tiles = clusters * CLUSTER if shares_x else clusters
        width = 16 * ceil_div(ceil_div(size.width, most_tiles), 16)
        blocks = ceil_div(size.rows if shares_x else count_copied_rows(size.rows), BLOCK)
        if width <= (MOST_WIDTH_OF_256 if blocks == 4 else MOST_WIDTH):
            high = 2 if blocks == 4 else 1
            found.append(Tile(blocks // high, high, width, shares_x))
    return found


@cache
def find_fastest(size: Size) -> Tile | None:
    """The fastest of `find_tiles` by `estimate`."""
    return min(find_tiles(size), key=lambda tile: estimate(size, tile), default=None)


@cache
def find_all_fastest(size: Size) -> tuple[Tile, ...]:
    """Those of all numbers of rows from that of ``size`` on; none where `choose_tile` never has one."""
    sizes = [size._replace(rows=rows) for rows in range(size.rows, MOST_ROWS + 1)]
    if all(choose_tile(own) is None for own in sizes):
        return ()
    return tuple(dict.fromkeys(tile for own in sizes if (tile := find_fastest(own)) is not None))


@cache
def choose_tile(size: Size) -> Tile | None:
    """The same; None where torch's GEMM is as fast."""
    best = find_fastest(size)
    return None if best is None or estimate(size, best) >= estimate_library(size) else best
