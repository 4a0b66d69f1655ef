"""Choose, for each number of rows, the fastest product with a coded weight: measured once per shape on this GPU against
the same weight in the model's dtype, then cached in a file. A weight whose products are clearly slower in codes, over
all numbers of rows, is not kept coded at all.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from headrace.base import env
from headrace.base.errors import PluginError
from headrace.kernels.coded_linear import (
    CODED_FLOAT,
    CODED_GATED,
    CODED_LINEAR,
    CODED_NORM_LINEAR,
    FP8_GATED,
    FP8_SUMS,
)
from headrace.kernels.coded_linear.codes import Code, CodedMatrix, stack_matrices
from headrace.kernels.coded_linear.device_codes import SHORT_CODES, DeviceCodes, pack_for_device, read_codes
from headrace.kernels.coded_linear.reference import dequantise, quantise_rows
from headrace.kernels.coded_linear.super_blocks import pack_supers
from headrace.kernels.cuda_source import CudaSourceError, note_fallback
from headrace.kernels.linear import LINEAR_FLOAT, Norm
from headrace.kernels.measured import MeasuredFile
from headrace.kernels.operation import KernelQuery
from headrace.kernels.packed_linear.blocks import WeightBlocks
from headrace.kernels.precompile import is_dry_run, precompile
from headrace.kernels.rowwise import Gate
from headrace.kernels.timing import Timer, time_chain

logger = logging.getLogger(__name__)
T = TypeVar("T")

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 512, 1024, 4096)
"""Rows measured; others take the choice of the next larger number."""
SHARES = ((8, 0.4), (64, 0.3), (256, 0.2), (1 << 62, 0.1))
"""How much all numbers of rows up to each bound count, from the bound before it on, in a plan's gain: few requests,
some, many, and prompts. Ratios of times are averaged and not times: a step of thousands of rows takes as long as a
hundred of one row, and would decide alone."""
MEMORY_WORTH = 0.6
"""How much slower than plain weights codes may be on the average for the memory that they save, times its share: who
loads 4 bits wants room for keys and values, and fast decoding, which are lost together where weights are dequantised.
One of 4 bits is kept from about 0.56 times as fast on, one of 8 bits from 0.7, and one that saves nothing from 1.0."""
CHAIN_BYTES, MOST_COPIES, CHAIN_ROWS = 128 << 20, 32, 256
"""Products of up to `CHAIN_ROWS` rows are measured in a captured chain over copies of the weight of so many bytes
together, at least two and at most `MOST_COPIES`; others by themselves."""
PLAIN = "plain"
MOST_ERROR = 0.08
"""Of a solution's results, relative to those of the plain weight: two roundings to 8-bit floats give 0.04."""
LEAST_NORM = 1e-30
LEAST_ROWS = {"reference": 1 << 62, "triton_expand": 16}
"""Solutions that are measured from so many rows on alone, where there are others: they make the plain weight first."""

Call = tuple[DeviceCodes, int, str]
"""A weight, a number of rows, and the name of a solution."""
Shape = tuple[int, int]
"""Outputs and inputs."""
Times = dict[int, dict[str, float]]
"""Seconds by number of rows and by solution; `PLAIN` for the weight in the model's dtype."""


@dataclass(frozen=True)
class Plan:
    """Solutions by the most rows that they are used for, in order; the last one has no bound. ``gain``: the plain
    weight's time over that of the chosen solutions, a geometric mean over numbers of rows, see `SHARES`. ``memory``:
    the codes' bytes over the plain weight's."""

    steps: tuple[tuple[int, str], ...]
    gain: float
    memory: float = 1.0

    @property
    def keeps_codes(self) -> bool:
        """Whether the weight stays in codes: it is faster so, or little slower for the memory that it saves."""
        return self.gain > 1.0 - MEMORY_WORTH * (1.0 - self.memory)

    def find(self, num_rows: int) -> str:
        """The solution for so many rows."""
        return next(name for most, name in self.steps if num_rows <= most)


def describe_codes(
    weight: DeviceCodes, dtype: torch.dtype, capability: tuple[int, int], *, in_float: bool = False
) -> KernelQuery:
    """The query of `CODED_LINEAR` without ``num_rows``; ``in_float``: for results in float32, as of `CODED_FLOAT`."""
    bits = 4 if weight.code in SHORT_CODES else weight.bits
    shape = {
        "in_features": weight.in_features, "out_features": weight.out_features, "bits": bits,
        "is_float": int(weight.code is Code.E4M3), "rows": weight.rows, "has_order": int(weight.order is not None),
        "group": weight.group if weight.scales.shape[1] > 1 else weight.in_features,
        "looks_up": int(weight.code in SHORT_CODES and weight.code is not Code.E2M1), "tiled": int(weight.is_tiled),
    }
    if weight.supers is not None:
        shape |= {"super_form": weight.supers.number, "has_tail": 0}
    if weight.tail is not None and weight.tail.supers is not None:
        shape["has_tail"] = weight.tail.supers.number
    shape |= {"in_float": 1} if in_float else {}
    return KernelQuery(weight.codes.device.type, str(dtype).removeprefix("torch."), capability, shape)


def pack_weight(matrix: CodedMatrix, dtype: torch.dtype, capability: tuple[int, int]) -> DeviceCodes | None:
    """The layout of a dense weight on its device, in tiles if a solution for one row takes no other; None where inputs
    are grouped irregularly."""
    weight = pack_for_device(matrix)
    return weight.tile() if weight is not None and _wants_tiles(weight, dtype, capability) else weight


def pack_parts(
    parts: Sequence[WeightBlocks], device: torch.device, dtype: torch.dtype, capability: tuple[int, int]
) -> DeviceCodes | None:
    """The layout of a dense weight of a GGUF file's blocks, above one another, on a GPU: super-blocks as the file has
    them where a solution takes them, else as `pack_weight`; None where no layout holds all parts."""
    supers = pack_supers(parts, device)
    if supers is not None and _wants_tiles(supers, dtype, capability):
        return supers.tile()
    matrix = stack_matrices([read_codes(part, device) for part in parts])
    return None if matrix is None else pack_weight(matrix, dtype, capability)


def _wants_tiles(weight: DeviceCodes, dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """Whether a solution for one row takes it in tiles alone."""
    if weight.fault_of_tiles is not None:
        return False
    by_row, tiled = (
        find_solutions(describe_codes(replace(weight, is_tiled=own), dtype, capability), 1) for own in (False, True)
    )
    return bool(set(tiled) - set(by_row))


def find_solutions(query: KernelQuery, num_rows: int) -> list[str]:
    """Names of the solutions for so many rows, by priority."""
    asked = KernelQuery(query.device, query.dtype, query.capability, {**query.shape, "num_rows": num_rows})
    names = [name for name in CODED_LINEAR.names() if CODED_LINEAR.reason_against(name, asked) is None]
    return [name for name in names if name in CODED_FLOAT.names()] if query.shape.get("in_float") else names


def load_solution(name: str, *, in_float: bool) -> Callable[[torch.Tensor, DeviceCodes], torch.Tensor]:
    """``multiply(x, weight)``, without a bias."""
    if in_float:
        return CODED_FLOAT.load(name)
    multiply = CODED_LINEAR.load(name)
    return lambda x, weight: multiply(x, weight, None)


def make_plan(times: Times, memory: float = 1.0) -> Plan:
    """The fastest solution of each number of rows; the gain is infinite where the plain weight was not measured.
    ``memory``: see `Plan`."""
    best = {
        rows: min((name for name in found if name != PLAIN), key=found.__getitem__) for rows, found in times.items()
    }
    steps = [
        (rows, name) for (rows, name), following in zip(
            best.items(), [*list(best.values())[1:], None], strict=True
        ) if name != following
    ]
    steps[-1] = (1 << 62, steps[-1][1])
    return Plan(tuple(steps), _find_gain(times, best), memory)


def _find_gain(times: Times, best: dict[int, str]) -> float:
    """The mean over bands of `SHARES`, in each of which all numbers of rows count alike."""
    total = weight = 0.0
    for (after, _), (most, share) in pairwise(((0, 0.0), *SHARES)):
        measured = {rows: own for rows, own in times.items() if after < rows <= most and PLAIN in own}
        if measured:
            logs = [math.log(own[PLAIN] / own[best[rows]]) for rows, own in measured.items()]
            total, weight = total + share * sum(logs) / len(logs), weight + share
    return math.exp(total / weight) if weight else math.inf


class CodedChoice:
    """Chooses plans for the weights of one model. Ranks choose by themselves, and may differ: in rounding alone, and
    what they must agree on is computed from sums over all of them."""

    def __init__(self, path: Path | None = None, time: Timer | None = None):
        self._path, self._time = path, time or time_chain
        self._shapes: set[Shape] = set()
        self._file: MeasuredFile | None = None
        self._told: set[str] = set()
        self._compiled: set[str] = set()

    def expect(self, shapes: Iterable[Shape]) -> None:
        """Weights of these shapes [O, I] are going to come: what they need is compiled with the first one of a form."""
        self._shapes.update(shapes)

    def prepare(
        self, weights: Iterable[DeviceCodes], dtype: torch.dtype, capability: tuple[int, int], *, in_float: bool = False
    ) -> None:
        """Compile all at once what `choose` is going to measure for these weights: one after the other, each shape has
        too few kernels to keep all cores busy."""
        calls: list[Call] = []
        for weight in weights:
            key, query = self._describe(weight, dtype, capability, in_float=in_float)
            if _read_plan(self._find(key), query) is None and key not in self._compiled:
                self._compiled.add(key)
                calls += [(weight, rows, name) for rows in ROWS for name in find_candidates(query, rows)]
        if calls:
            _compile(calls, dtype, in_float=in_float)

    def _prepare_all(
        self, weight: DeviceCodes, others: Iterable[Shape], dtype: torch.dtype, capability: tuple[int, int]
    ) -> None:
        """`prepare` a weight together with zeros of other shapes where memory holds all of these at once."""
        try:
            zeros = [weight.resize(*shape) for shape in sorted(others)]
        except torch.OutOfMemoryError:
            zeros = []
        self.prepare([weight, *filter(None, zeros)], dtype, capability)

    def _describe(
        self, weight: DeviceCodes, dtype: torch.dtype, capability: tuple[int, int], *, in_float: bool = False
    ) -> tuple[str, KernelQuery]:
        """The key of a weight in the file, and its query."""
        query = describe_codes(weight, dtype, capability, in_float=in_float)
        machine = _describe_device(weight.codes.device)
        # measured again by versions that have other solutions
        names = sorted({name for rows in ROWS for name in find_candidates(query, rows)})
        form = f"{weight.code.value} {describe_tables(weight)} {query.dtype} {sorted(query.shape.items())}"
        return f"{machine}: {form} {' '.join(names)}", query

    def _find(self, key: str) -> Any:
        if self._file is None:
            self._file = MeasuredFile(self._path or env.cache_dir() / "coded_products.json")
        return self._file.find(key)

    def choose(
        self, weight: DeviceCodes, dtype: torch.dtype, capability: tuple[int, int], *, in_float: bool = False
    ) -> Plan | None:
        """The plan for a weight on its device; None if it is better plain. ``in_float``: for results in float32."""
        plan = self.judge(weight, dtype, capability, in_float=in_float)
        return plan if plan.keeps_codes else None

    def judge(
        self, weight: DeviceCodes, dtype: torch.dtype, capability: tuple[int, int], *, in_float: bool = False
    ) -> Plan:
        """As `choose`, also where the weight is better plain."""
        key, query = self._describe(weight, dtype, capability, in_float=in_float)
        plan = _read_plan(self._find(key), query)
        is_new = plan is not None and plan.keeps_codes and key not in self._told
        if plan is not None and is_new and not warm_up(weight, plan, dtype, in_float=in_float):
            plan = None
        if plan is None:
            if in_float:  # no layer's weight has that
                self.prepare([weight], dtype, capability, in_float=True)
            else:
                others = self._shapes - {(weight.out_features, weight.in_features)}
                self._prepare_all(weight, others, dtype, capability)
            if is_dry_run():  # nothing can be measured
                return _take_first(query)
            plan = self._measure(key, weight, query)
        if key not in self._told:
            self._told.add(key)
            logger.info("%s", describe_plan(weight, plan))
        return plan

    def _measure(self, key: str, weight: DeviceCodes, query: KernelQuery) -> Plan:
        """A new plan. Where memory is short, the first solutions that serve, until a later start can measure: plain
        weights would take more of it."""
        try:
            plan = make_plan(measure(weight, query, self._time), compare_memory(weight, query.dtype))
        except torch.OutOfMemoryError as error:
            logger.warning("no memory to measure products with codes, which are kept: %s", error)
            return _take_first(query)
        assert self._file is not None, "it was searched"
        self._file.put(key, {"steps": plan.steps, "gain": plan.gain, "memory": plan.memory})
        return plan

    def save(self) -> None:
        """Write new measurements to the cache file."""
        if self._file is not None:
            self._file.save()


def _take_first(query: KernelQuery) -> Plan:
    """The solutions of highest priority."""
    return make_plan({rows: {find_solutions(query, rows)[0]: 1.0} for rows in ROWS})


def describe_tables(weight: DeviceCodes) -> str:
    """The form of scales and zero points, on which kernels depend."""
    if weight.supers is not None:
        return "scales in two levels, " + "; ".join(
            f"{part.supers.bits} bits {'with' if part.supers.has_mins else 'without'} mins"
            for part in weight.parts if part.supers is not None
        )
    zeros = "none" if not weight.has_zeros else "whole" if weight.has_whole_zeros else "any"
    return f"scales {str(weight.scales.dtype).removeprefix('torch.')}, zeros {zeros}"


def compare_memory(weight: DeviceCodes, dtype: str) -> float:
    """A weight's bytes over those of the same in ``dtype``."""
    return weight.num_bytes / max(1, weight.out_features * weight.in_features * getattr(torch, dtype).itemsize)


def describe_plan(weight: DeviceCodes, plan: Plan) -> str:
    """One line: shape, code, and which solution multiplies how many rows."""
    shape = f"{weight.out_features} x {weight.in_features} in {weight.code.value}, groups of {weight.group}"
    if not plan.keeps_codes:
        return f"{shape}: dequantised, as products with codes are slower here ({plan.gain:.2f} times as fast)"
    steps = ", ".join(f"{name} up to {most} rows" if most < 1 << 62 else f"{name} beyond" for most, name in plan.steps)
    return f"{shape}: {steps}; {plan.gain:.2f} times as fast as plain on the average, {plan.memory:.0%} of its memory"


def _read_plan(stated: Any, query: KernelQuery) -> Plan | None:
    """A plan from the file, if it can still be carried out."""
    try:
        steps = tuple((int(most), str(name)) for most, name in stated["steps"])
        plan = Plan(steps, float(stated["gain"]), float(stated["memory"]))
        usable = all(name in find_solutions(query, 1 if most >= ROWS[-1] else most) for most, name in plan.steps)
        return plan if usable and plan.steps[-1][0] >= ROWS[-1] else None
    except (TypeError, KeyError, ValueError, IndexError):
        return None


@torch.no_grad()
def measure(weight: DeviceCodes, query: KernelQuery, time: Timer) -> Times:
    """The times of all solutions for `ROWS`, which were compiled, so for every number of rows that they serve.
    Solutions that fail or give other numbers than the plain weight are left out, with a warning; raises
    `torch.OutOfMemoryError`."""
    dtype, device, in_float = getattr(torch, query.dtype), weight.codes.device, "in_float" in query.shape
    linear = LINEAR_FLOAT.choose(query) if in_float else F.linear
    plain, times, faults = dequantise(weight, dtype), Times(), find_faults()
    weights, plains = _repeat(weight, weight.num_bytes, DeviceCodes.copy), _repeat(plain, plain.nbytes, torch.clone)
    left_out: set[str] = set()
    for rows in ROWS:
        x = torch.randn(rows, weight.in_features, device=device).to(dtype)
        copies = MOST_COPIES if rows <= CHAIN_ROWS else 1
        found = {PLAIN: time([partial(linear, x, own) for own in plains[:copies]])}
        expected, candidates = linear(x, plain).float(), find_candidates(query, rows)
        rest = [name for name in find_solutions(query, rows) if name not in candidates]
        for name in candidates + rest:
            if name in left_out or (name in rest and len(found) > 1):
                continue
            multiply = load_solution(name, in_float=in_float)
            try:
                _compare(multiply(x, weight), expected)
                if not in_float:
                    _check_fused(name, x, weight, plain)
                    for out, wanted in _call_rows(name, x, weight, expected):
                        _compare(out, wanted)
                found[name] = time([partial(multiply, x, own) for own in weights[:copies]])
            except torch.OutOfMemoryError:
                raise  # a `RuntimeError`, but of this moment and not of the solution
            except faults as error:  # this torch, driver or device lacks it, or has too little shared memory
                left_out.add(name)
                note_fallback(f"coded product {name} is left out from {rows} rows on", error)
        times[rows] = found
    return times


def _repeat(weight: T, num_bytes: int, copy: Callable[[T], T]) -> list[T]:
    """A weight on a GPU and copies of it, too large together for the GPU's cache; none where memory does not hold all
    of them, as the rest of it is needed for what is measured."""
    count = min(MOST_COPIES, max(2, CHAIN_BYTES // max(1, num_bytes))) if torch.cuda.is_available() else 1
    try:
        return [weight, *(copy(weight) for _ in range(count - 1))]
    except torch.OutOfMemoryError:
        return [weight]


def _compare(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Raises `RuntimeError` where a solution gives other numbers than the plain weight."""
    distance = float((out.float() - expected.float()).norm() / expected.float().norm().clamp_(min=LEAST_NORM))
    if not distance < MOST_ERROR:
        raise RuntimeError(f"its results are wrong by {distance:.2g} of their size")


def _check_fused(name: str, x: torch.Tensor, weight: DeviceCodes, plain: torch.Tensor) -> None:
    """The same for what a solution's product is fused with."""
    gated, normalised = _call_fused(name, x, weight)
    if gated is not None:
        gate, up = F.linear(x, plain).chunk(2, dim=1)
        _compare(gated, F.silu(gate) * up)
    if normalised is not None:
        out, total = normalised
        _compare(total, 2 * x)
        _compare(out, F.linear(F.rms_norm(total, (x.shape[1],), eps=1e-5), plain))


def _call_fused(
    name: str, x: torch.Tensor, weight: DeviceCodes
) -> tuple[torch.Tensor | None, tuple[torch.Tensor, torch.Tensor] | None]:
    """The product with SiLU, and with the norm of twice ``x``, where a solution has them; the norm with SiLU is called
    too, as layers do."""
    gated, normalised, can_gate = None, None, weight.out_features % 2 == 0 and weight.tail is None
    if name in CODED_GATED.names() and can_gate:
        gated = CODED_GATED.load(name)(x, weight, None, Gate("silu"))
    if name in CODED_NORM_LINEAR.names() and weight.order is None:
        multiply, norm = CODED_NORM_LINEAR.load(name), Norm(torch.ones_like(x[0]), 1e-5)
        normalised = multiply(x, x, norm, weight, None)
        if can_gate:
            multiply(x, x, norm, weight, None, "silu")
    return gated, normalised


def _call_rows(
    name: str, x: torch.Tensor, weight: DeviceCodes, expected: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What layers call instead for rows in FP8, and what it should give: partial sums, and products with an
    activation."""
    has_sums, has_gate = name in FP8_SUMS.names(), name in FP8_GATED.names()
    if not (has_sums or has_gate):
        return []
    rows, found = quantise_rows(x, weight.group if weight.num_groups > 1 else 0), []
    if has_sums:
        sums = FP8_SUMS.load(name)(rows, weight, x.dtype)
        found.append((sums if sums.dim() == 2 else sums.sum(0), expected))
    if has_gate and weight.out_features % 16 == 0:
        gate, up = expected.chunk(2, dim=1)
        found.append((FP8_GATED.load(name)(rows, weight, None, x.dtype, "silu"), F.silu(gate) * up))
    return found


def find_candidates(query: KernelQuery, num_rows: int) -> list[str]:
    """The solutions that are measured for so many rows."""
    names = find_solutions(query, num_rows)
    return [name for name in names if num_rows >= LEAST_ROWS.get(name, 0)] or names


def _compile(calls: list[Call], dtype: torch.dtype, *, in_float: bool = False) -> None:
    """Compile the kernels of solutions for weights and numbers of rows, in parallel."""

    def run() -> None:
        for weight, rows, name in calls:
            x = torch.zeros(rows, weight.in_features, dtype=dtype, device=device)
            with suppress(*find_faults()):
                out = load_solution(name, in_float=in_float)(x, weight)
                if not in_float:
                    _call_rows(name, x, weight, out)
                    _call_fused(name, x, weight)

    device = calls[0][0].codes.device
    about = [
        (str(describe_codes(weight, dtype, (0, 0), in_float=in_float)), rows, name) for weight, rows, name in calls
    ]
    precompile(run, f"coded products {about}", device)


def find_faults() -> tuple[type[Exception], ...]:
    """What a solution that cannot run here raises."""
    faults = PluginError, CudaSourceError, OSError, RuntimeError, NotImplementedError
    if find_spec("triton") is None:
        return faults
    from triton.errors import TritonError

    return *faults, TritonError


@torch.no_grad()
def warm_up(weight: DeviceCodes, plan: Plan, dtype: torch.dtype, *, in_float: bool = False) -> bool:
    """Compile what a plan runs, for every number of rows, which measuring does too: nothing is to compile later. False
    if it cannot be run any more."""
    _compile([(weight, rows, plan.find(rows)) for rows in ROWS], dtype, in_float=in_float)
    try:
        for rows in ROWS:
            x = torch.zeros(rows, weight.in_features, dtype=dtype, device=weight.codes.device)
            load_solution(plan.find(rows), in_float=in_float)(x, weight)
    except find_faults() as error:
        logger.warning("coded products are measured again, as what was chosen before fails: %s", error)
        return False
    return True


def _describe_device(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{name}, torch {torch.__version__}"
