"""FP8 products of tens to hundreds of rows in FP8 on Hopper by own CUDA C++ (``csrc/cuda/fp8_split.cu``, which says how
they work), whose inputs blocks of a cluster share: for a scale per row and per output, or scales of 128 inputs.

M rows of x, N outputs, K inputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import c_int, c_void_p
from functools import cache, partial
from typing import NamedTuple

import torch

from headrace.kernels.coded_linear import hopper
from headrace.kernels.coded_linear.device_codes import DeviceCodes, Fp8Rows
from headrace.kernels.coded_linear.scaled import round_and_multiply
from headrace.kernels.coded_linear.wave import ACTIVATIONS
from headrace.kernels.cuda_source import (
    MOST_BYTES,
    CudaKernel,
    address_of,
    cache_compiled,
    describe_boxes,
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
ROOM_BYTES = 12 << 10
"""Of shared memory that are left to the last blocks of the kernel before, beside which a block may begin."""
MOST_GLUON_GATED = 64
"""Beyond, Gluon's tiles of gate and up with scales of 128 inputs take twice as long as two kernels."""
CLUSTERS = (1, 2, 4, 8)
"""Sizes of clusters."""


class _Call(ctypes.Structure):
    """``Call`` of the source."""

    _fields_ = (
        *((name, c_void_p) for name in ("x_scales", "scales", "bias", "out")),
        *((name, c_int) for name in ("rows", "outputs", "inputs", "tile_rows", "box", "splits", "shares", "stages")),
    )


class Size(NamedTuple):
    """Of a product; ``has_tables``: scales are of 128 inputs."""

    rows: int
    outputs: int
    inputs: int
    has_tables: bool

    @property
    def steps(self) -> int:
        """Stages of all inputs."""
        return ceil_div(self.inputs, DEPTH)


class Plan(NamedTuple):
    """How a product is divided. A block multiplies 64 * ``groups`` outputs by ``rows`` rows of x; ``splits`` blocks of
    a cluster share a tile's inputs, ``shares`` of them the rows of x of neighbouring tiles."""

    groups: int
    rows: int
    splits: int = 1
    shares: int = 1

    @property
    def width(self) -> int:
        """Outputs of a tile."""
        return GROUP_OUTPUTS * self.groups

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.splits * self.shares

    @property
    def box(self) -> int:
        """Rows of x that a block copies; parts of a tile are whole eights."""
        return self.rows if self.shares == 1 else 8 * ceil_div(self.rows, 8 * self.shares)

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
        rows = GRAIN * ceil_div(self.box * self.shares, GRAIN)
        return (self.width + rows) * DEPTH + (TABLE_BYTES if has_tables else 0)

    def count_clusters(self, size: Size) -> int:
        """Of a grid that has one for each tile, or for ``shares`` neighbours."""
        return ceil_div(size.rows, self.rows) * ceil_div(size.outputs, self.width * self.shares)

    def count_stages(self, size: Size) -> int:
        """Of the ring: no more than a block needs, unless sums need their room."""
        each = self.count_stage_bytes(has_tables=size.has_tables)
        most = min(MOST_STAGES, (MOST_BYTES - ROOM_BYTES - self.fixed_bytes) // (each + BARRIER_BYTES))
        needed = ceil_div(size.steps, self.splits) if self.splits > 1 else most
        return min(most, max(needed, ceil_div(self.sum_bytes, each)))

    def count_shared_bytes(self, size: Size) -> int:
        """Dynamic shared memory of a block."""
        stage = self.count_stage_bytes(has_tables=size.has_tables) + BARRIER_BYTES
        return keep_apart(self.fixed_bytes + self.count_stages(size) * stage)


CLOCK, PRODUCT_RATE, STEP_CYCLES = 1.65e9, 0.85, 60.0
"""Hz of a multiprocessor, cycles of a product over those that it takes, and cycles of a step beside them."""
ROW_CYCLES, WEIGHT_CYCLES = 2.0, 64.0
"""Of 64 outputs and 128 inputs: of tensor cores for each row of x; of shared memory, that gives 64 rows of the weight,
and rows of x in half the time of their products."""
SCALE_CYCLES, SCALE_LATENCY = 1.3, 100.0
"""Of scaling the sums of 128 inputs, for each row of x, and of a group of outputs that waits for them."""
INGEST_RATE, L2_RATE, MEMORY_RATE = 100e9, 12e12, 4.1e12
"""Bytes a second that a multiprocessor takes up, that the L2 gives, and the memory. Of Gluon's products of 250 rows
with 4,096 outputs, on an H200 32.2 and 12.7 us: each of 128 multiprocessors takes some 90e9."""
START, END, MEET, STORE_RATE, SEND_RATE = 1.9e-6, 0.5e-6, 0.5e-6, 2.5e12, 25e9
"""Seconds of a launch until products begin, of an item's end, and of a cluster's meeting; bytes a second of results of
all blocks, and of sums that a block sends. None is fitted yet."""
BALANCE = 0.15
"""How much of the shorter ones of products, copies and memory is not hidden behind the longest."""


def estimate(size: Size, plan: Plan, residents: int) -> float:
    """Seconds of a product of which so many clusters run at once."""
    clusters = plan.count_clusters(size)
    rounds, blocks = ceil_div(clusters, residents), min(clusters, residents) * plan.cluster
    steps = ceil_div(size.steps, plan.splits)
    products = _count_step_cycles(size, plan) / CLOCK
    copied = (plan.width + plan.box * plan.shares) * DEPTH
    fetched = (plan.width + plan.box) * DEPTH
    copies = max(copied / INGEST_RATE, blocks * fetched / L2_RATE)
    memory = size.outputs * size.inputs / MEMORY_RATE
    parts = sorted((rounds * steps * products, rounds * steps * copies, memory))
    seconds = START + parts[2] + BALANCE * (parts[0] + parts[1]) / 2 + rounds * END
    seconds += 2 * size.rows * size.outputs / STORE_RATE
    if plan.cluster > 1:
        seconds += MEET
    if plan.splits > 1:
        seconds += rounds * (MEET + plan.sum_bytes * (plan.splits - 1) / plan.splits / SEND_RATE)
    return seconds


def _count_step_cycles(size: Size, plan: Plan) -> float:
    """Of a block's products with 128 inputs."""
    columns = GRAIN * ceil_div(plan.rows, GRAIN)
    group = max(ROW_CYCLES * columns, WEIGHT_CYCLES + ROW_CYCLES / 2 * columns) / PRODUCT_RATE
    scaling = SCALE_CYCLES * columns + SCALE_LATENCY if size.has_tables else 0.0
    return max(plan.groups * group, group + scaling) + STEP_CYCLES  # while a group scales, others multiply


def find_residents(plan: Plan, residents: tuple[int, ...]) -> int:
    """How many of a plan's clusters run at once, of such numbers of each of `CLUSTERS`."""
    return residents[CLUSTERS.index(plan.cluster)]


def _is_busy(plan: Plan, size: Size) -> bool:
    """Whether all blocks of a cluster have something to do."""
    others = plan.shares - 1
    return plan.splits <= size.steps and others * plan.width < size.outputs and others * plan.box < plan.rows


def list_plans(size: Size, residents: tuple[int, ...]) -> Iterator[Plan]:
    """All plans for a GPU that runs so many clusters of each of `CLUSTERS` at once."""
    most = MOST_TABLE_ROWS if size.has_tables else MOST_TILE_ROWS
    least = ceil_div(size.rows, most)
    for tiles in range(least, least + 4):
        rows = min(size.rows, 8 * ceil_div(size.rows, 8 * tiles))
        if tiles > 1 and rows < GRAIN:
            break
        for groups in (1, 2):
            for splits in CLUSTERS:
                for shares in (1, 2, 4):
                    plan = Plan(groups, rows, splits, shares)
                    if plan.cluster in CLUSTERS and _is_busy(plan, size) and find_residents(plan, residents):
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
    """The size of a product."""
    return Size(rows.num_rows, weight.out_features, weight.in_features, weight.rows > 1)


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
        rows=size.rows, outputs=size.outputs, inputs=size.inputs, tile_rows=plan.rows, box=plan.box,
        splits=plan.splits, shares=plan.shares, stages=stages,
    )
    clusters = plan.count_clusters(size)
    if plan.splits == 1:  # blocks stay
        clusters = min(clusters, residents)
    find_kernel(plan.groups, size.has_tables, out.device).launch(
        clusters * plan.cluster, IDLE_THREADS + GROUP_THREADS * plan.groups,
        describe_boxes(rows.codes, (plan.box, DEPTH)), describe_boxes(weight.codes, (plan.width, DEPTH)), call,
        is_dependent=True, shared_bytes=plan.count_shared_bytes(size), cluster=plan.cluster,
    )
    return out


def multiply_rows(rows: Fp8Rows, weight: DeviceCodes, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """See `FP8_LINEAR`."""
    size = measure_size(rows, weight)
    residents = prepare(size.has_tables, rows.codes.device)
    plan = choose_plan(size, residents)
    return launch(rows, weight, bias, plan, find_residents(plan, residents))


def multiply_gated_rows(
    rows: Fp8Rows, weight: DeviceCodes, bias: torch.Tensor | None, dtype: torch.dtype, activation: str
) -> torch.Tensor:
    """See `FP8_GATED`: by Gluon's kernel up to `MOST_GLUON_GATED` rows, then by two kernels."""
    if rows.num_rows <= MOST_GLUON_GATED:
        return hopper.multiply_gated_rows(rows, weight, bias, dtype, activation)
    return ACTIVATIONS[activation](multiply_rows(rows, weight, bias, dtype))


linear_rows = partial(round_and_multiply, multiply_rows)
