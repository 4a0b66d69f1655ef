"""FP8 products of tens to hundreds of rows in FP8 on Hopper by own CUDA C++ (``csrc/cuda/fp8_split.cu``, which says how
they work), whose inputs blocks of a cluster may share: for a scale per row and per output, or scales of 128 inputs.

M rows of x, N outputs, K inputs; G groups of outputs, with inputs of their own, each of the same K.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import c_int, c_void_p
from functools import cache, partial
from itertools import product
from typing import NamedTuple

import torch

from headrace.kernels.coded_linear import LEAST_SPLIT_ROWS, MOST_SPLIT_ROWS, hopper
from headrace.kernels.coded_linear.device_codes import DeviceCodes, Fp8Rows
from headrace.kernels.coded_linear.fp8_triton import quantise_rows
from headrace.kernels.coded_linear.scaled import round_and_multiply
from headrace.kernels.coded_linear.wave import ACTIVATIONS
from headrace.kernels.cuda_source import (
    MOST_BYTES,
    CudaKernel,
    address_of,
    cache_compiled,
    describe_boxes,
    fallback,
    keep_apart,
    load_kernel,
)
from headrace.kernels.launch import ceil_div

DEPTH, IDLE_THREADS, GROUP_THREADS, GROUP_OUTPUTS = 128, 128, 128, 64
"""Inputs of a stage; threads that copy, and those that multiply so many outputs."""
GRAIN = 16
"""Rows of x come to tensor cores in multiples of these."""
MOST_TILE_ROWS, MOST_TABLE_ROWS = 256, 128
"""Of x in a tile; the latter with scales of 128 inputs."""
MOST_STAGES, BARRIER_BYTES, TABLE_BYTES = 16, 16, 1024
"""Of the ring in shared memory, and what a stage has beside its tiles; the last one of scales of 128 inputs."""
SLACK_BYTES, OUT_BYTES = 1024 + 16 + 4 * (MOST_TILE_ROWS + 64), 8192
"""To align the ring, a barrier, and scales of rows; and for each group of outputs rows that leave."""
SUM_BYTES = 16
"""Of a thread's sums of eight rows of x."""
MOST_GLUON_GATED = 64
"""Beyond, Gluon's tiles of gate and up with scales of 128 inputs take twice as long as two kernels."""
CLUSTERS = (1, 2, 4, 8)
"""Sizes of clusters."""


class _Call(ctypes.Structure):
    """``Call`` of the source."""

    _fields_ = (
        *((name, c_void_p) for name in ("x_scales", "scales", "bias", "out")),
        *((name, c_int) for name in ("rows", "outputs", "inputs", "tile_rows", "splits", "stages", "each")),
    )


class Size(NamedTuple):
    """Of a product; ``has_tables``: scales are of 128 inputs. Outputs are of so many ``groups``."""

    rows: int
    outputs: int
    inputs: int
    has_tables: bool
    groups: int = 1

    @property
    def steps(self) -> int:
        """Stages of all inputs."""
        return ceil_div(self.inputs, DEPTH)


class Plan(NamedTuple):
    """How a product is divided. A block multiplies 64 * ``groups`` outputs by ``rows`` rows of x; the ``splits`` blocks
    of a cluster share a tile's inputs."""

    groups: int
    rows: int
    splits: int = 1

    @property
    def width(self) -> int:
        """Outputs of a tile."""
        return GROUP_OUTPUTS * self.groups

    @property
    def fixed_bytes(self) -> int:
        """Of shared memory beside the ring."""
        return SLACK_BYTES + self.groups * OUT_BYTES

    @property
    def sum_bytes(self) -> int:
        """Of the sums of all splits that a block receives, its own included."""
        each = ceil_div(ceil_div(self.rows, 8), self.splits)
        return self.splits * each * GROUP_THREADS * self.groups * SUM_BYTES if self.splits > 1 else 0

    def count_stage_bytes(self, *, has_tables: bool) -> int:
        """Of a stage of the ring, without barriers."""
        rows = GRAIN * ceil_div(self.rows, GRAIN)
        return (self.width + rows) * DEPTH + (TABLE_BYTES if has_tables else 0)

    def count_clusters(self, size: Size) -> int:
        """Of a grid: one for each tile."""
        return ceil_div(size.rows, self.rows) * ceil_div(size.outputs, self.width)

    def count_stages(self, size: Size) -> int:
        """Of the ring: no more than a block needs, unless sums need their room."""
        each = self.count_stage_bytes(has_tables=size.has_tables)
        most = min(MOST_STAGES, (MOST_BYTES - self.fixed_bytes) // (each + BARRIER_BYTES))
        needed = ceil_div(size.steps, self.splits) if self.splits > 1 else most
        return min(most, max(needed, ceil_div(self.sum_bytes, each)))

    def count_shared_bytes(self, size: Size) -> int:
        """Dynamic shared memory of a block."""
        stage = self.count_stage_bytes(has_tables=size.has_tables) + BARRIER_BYTES
        return keep_apart(self.fixed_bytes + self.count_stages(size) * stage)


CLOCK, PRODUCTS, SCALE_CYCLES, SCALE_ROW_CYCLES = 1.65e9, 4096, 210.0, 0.9
"""Hz of a multiprocessor, and products of FP8 numbers in a cycle; cycles of scaling the sums of 128 inputs, and more
for each row of x. These and the next are fitted to 71 times of plans of six weights, 64 to 250 rows, on an H200, from
which they are 8 % away; what is chosen by them takes 1 % longer than the best of them on the average, at most 8 %."""
INGEST_RATE, L2_RATE, MEMORY_RATE, AGAIN = 190e9, 18e12, 4.1e12, 0.17
"""Bytes a second that a multiprocessor takes up, that the L2 gives, and the memory; the part of the weight that comes
from there again for each further tile of rows."""
START, MEET, STORE_RATE, SEND_RATE = 2.6e-6, 0.85e-6, 2.7e12, 17.5e9
"""Seconds of a launch until products begin, and of a cluster's meeting; bytes a second of results of all blocks, and of
sums that a block sends."""
BALANCE = 0.42
"""How much of the mean of the shorter two of products, copies and memory is not hidden behind the longest."""


def estimate(size: Size, plan: Plan, residents: int) -> float:
    """Seconds of a product of which so many clusters run at once."""
    clusters, columns = plan.count_clusters(size), GRAIN * ceil_div(plan.rows, GRAIN)
    rounds, blocks = ceil_div(clusters, residents), min(clusters, residents) * plan.splits
    cycles = columns * plan.width * DEPTH / PRODUCTS
    if size.has_tables:
        cycles += SCALE_CYCLES + SCALE_ROW_CYCLES * columns
    copied = (plan.width + plan.rows) * DEPTH
    copies = max(copied / INGEST_RATE, blocks * copied / L2_RATE)
    steps = rounds * ceil_div(size.steps, plan.splits)
    memory = size.outputs * size.inputs * (1 + AGAIN * (ceil_div(size.rows, plan.rows) - 1)) / MEMORY_RATE
    parts = sorted((steps * cycles / CLOCK, steps * copies, memory))
    seconds = START + parts[2] + BALANCE * (parts[0] + parts[1]) / 2 + 2 * size.rows * size.outputs / STORE_RATE
    if plan.splits > 1:
        seconds += MEET + rounds * plan.sum_bytes * (plan.splits - 1) / plan.splits / SEND_RATE
    return seconds


def find_residents(plan: Plan, residents: tuple[int, ...]) -> int:
    """How many of a plan's clusters run at once, of such numbers of each of `CLUSTERS`."""
    return residents[CLUSTERS.index(plan.splits)]


def list_plans(size: Size, residents: tuple[int, ...]) -> Iterator[Plan]:
    """All plans for a GPU that runs so many clusters of each of `CLUSTERS` at once."""
    most = MOST_TABLE_ROWS if size.has_tables else MOST_TILE_ROWS
    least = ceil_div(size.rows, most)
    for tiles in range(least, least + 4):
        rows = min(size.rows, 8 * ceil_div(size.rows, 8 * tiles))
        if tiles > 1 and rows < GRAIN:
            break
        for groups, splits in product((1, 2), CLUSTERS):
            plan = Plan(groups, rows, splits)
            is_whole = size.groups == 1 or size.outputs // size.groups % plan.width == 0
            if is_whole and splits <= size.steps and find_residents(plan, residents):
                yield plan


@cache
def choose_plan(size: Size, residents: tuple[int, ...]) -> Plan:
    """That of the shortest estimated time; see `list_plans`."""
    return min(
        list_plans(size, residents), key=lambda plan: estimate(size, plan, find_residents(plan, residents))
    )


@cache_compiled
def find_kernel(groups: int, has_tables: bool, device: torch.device) -> CudaKernel:
    """The kernel, compiled (some seconds) unless cached. Raises `CudaSourceError` and `OSError`."""
    return load_kernel("fp8_split", device, MOST_BYTES, GROUPS=groups, TABLES=int(has_tables))


@cache_compiled
def prepare(has_tables: bool, device: torch.device) -> tuple[int, ...]:
    """Compile and load the kernels of all plans; how many clusters of each of `CLUSTERS` run at once."""
    kernels = [find_kernel(groups, has_tables, device) for groups in (1, 2)]
    return tuple(
        min(
            kernel.count_clusters(size, IDLE_THREADS + GROUP_THREADS * groups)
            for groups, kernel in zip((1, 2), kernels, strict=True)
        ) for size in CLUSTERS
    )


def measure_size(rows: Fp8Rows, weight: DeviceCodes) -> Size:
    """The size of a product; a row of x has inputs of all groups."""
    groups = rows.codes.shape[1] // weight.in_features
    return Size(rows.num_rows, weight.out_features, weight.in_features, weight.rows > 1, groups)


def launch(
    rows: Fp8Rows, weight: DeviceCodes, bias: torch.Tensor | None, plan: Plan, residents: int
) -> torch.Tensor:
    """The product with its bias [M, N] bfloat16, by a plan of which so many clusters run at once."""
    size = measure_size(rows, weight)
    stages = plan.count_stages(size)
    assert stages * plan.count_stage_bytes(has_tables=size.has_tables) >= plan.sum_bytes, "sums take the ring's place"
    out = torch.empty((size.rows, size.outputs), dtype=torch.bfloat16, device=rows.codes.device)
    call = _Call(
        x_scales=rows.scales.data_ptr(), scales=weight.scales.data_ptr(), bias=address_of(bias), out=out.data_ptr(),
        rows=size.rows, outputs=size.outputs, inputs=size.inputs, tile_rows=plan.rows, splits=plan.splits,
        stages=stages, each=size.outputs // size.groups,
    )
    clusters = plan.count_clusters(size)
    if plan.splits == 1:  # blocks stay
        clusters = min(clusters, residents)
    find_kernel(plan.groups, size.has_tables, out.device).launch(
        clusters * plan.splits, IDLE_THREADS + GROUP_THREADS * plan.groups,
        describe_boxes(rows.codes, (plan.rows, DEPTH)), describe_boxes(weight.codes, (plan.width, DEPTH)), call,
        is_dependent=True, shared_bytes=plan.count_shared_bytes(size), cluster=plan.splits,
    )
    return out


def multiply_rows(rows: Fp8Rows, weight: DeviceCodes, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """See `FP8_LINEAR`."""
    size = measure_size(rows, weight)
    residents = prepare(size.has_tables, rows.codes.device)
    plan = choose_plan(size, residents)
    return launch(rows, weight, bias, plan, find_residents(plan, residents))


@cache_compiled
def can_group(device: torch.device) -> bool:
    """Whether the kernels of grouped products can be compiled and loaded; if not, with a warning."""
    with fallback("grouped products of tens of rows run in Gluon"):
        prepare(True, device)
        return True
    return False


def multiply_groups(x: torch.Tensor, weight: DeviceCodes) -> torch.Tensor:
    """See `GROUPED_CODED`, for more rows than a few: rows are rounded to FP8 with a scale for each 128 inputs. What is
    not taken here is left to Gluon's kernel."""
    (num_rows, groups, inputs), outputs = x.shape, weight.out_features
    is_taken = (
        LEAST_SPLIT_ROWS <= num_rows <= MOST_SPLIT_ROWS and x.dtype == torch.bfloat16 and weight.num_groups > 1
        and weight.rows == DEPTH and inputs % DEPTH == 0 and outputs // groups % GROUP_OUTPUTS == 0
    )
    if not is_taken or not can_group(x.device):
        return hopper.multiply_groups(x, weight)
    return multiply_rows(quantise_rows(x.flatten(1), DEPTH, pdl=True), weight, None, x.dtype)


def multiply_gated_rows(
    rows: Fp8Rows, weight: DeviceCodes, bias: torch.Tensor | None, dtype: torch.dtype, activation: str
) -> torch.Tensor:
    """See `FP8_GATED`: by Gluon's kernel up to `MOST_GLUON_GATED` rows, then by two kernels."""
    if rows.num_rows <= MOST_GLUON_GATED:
        return hopper.multiply_gated_rows(rows, weight, bias, dtype, activation)
    return ACTIVATIONS[activation](multiply_rows(rows, weight, bias, dtype))


linear_rows = partial(round_and_multiply, multiply_rows)
