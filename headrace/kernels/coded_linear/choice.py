"""Choose, for each number of rows, the fastest product with a coded weight: measured once per shape on this GPU against
the same weight in the model's dtype, then cached in a file. A weight whose products are not faster for few rows is not
kept coded at all.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from headrace.base import env
from headrace.base.errors import PluginError
from headrace.kernels.coded_linear import CODED_GATED, CODED_LINEAR, CODED_NORM_LINEAR, FP8_GATED, FP8_SUMS
from headrace.kernels.coded_linear.codes import Code
from headrace.kernels.coded_linear.device_codes import SHORT_CODES, DeviceCodes
from headrace.kernels.coded_linear.reference import dequantise, quantise_rows
from headrace.kernels.cuda_source import CudaSourceError
from headrace.kernels.linear import Norm
from headrace.kernels.measured import MeasuredFile
from headrace.kernels.operation import KernelQuery
from headrace.kernels.precompile import precompile

logger = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
"""Rows measured; others take the choice of the next larger number."""
FEW_ROWS = 64
"""Up to so many rows reading the weight bounds a step: there coded products must be faster, on the average of times
relative to those of the plain weight."""
REPEATS = 5
FLUSH_BYTES = 128 << 20
FLUSHES = 8
"""So much is written so many times before each measurement: no weight is then read from the GPU's cache, and the GPU is
busy for some 250 us while the host launches."""
PLAIN = "plain"
MOST_ERROR = 0.08
"""Of a solution's results, relative to those of the plain weight: two roundings to 8-bit floats give 0.04."""
LEAST_NORM = 1e-30
LEAST_ROWS = {"reference": 1 << 62, "triton_expand": 32}
"""Solutions that are measured from so many rows on alone, where there are others: they make the plain weight first."""

Call = tuple[DeviceCodes, int, str]
"""A weight, a number of rows, and the name of a solution."""
Times = dict[int, dict[str, float]]
"""Seconds by number of rows and by solution; `PLAIN` for the weight in the model's dtype."""


@dataclass(frozen=True)
class Plan:
    """Solutions by the most rows that they are used for, in order; the last one has no bound. ``gain``: the plain
    weight's time over the chosen solution's, the mean for at most `FEW_ROWS`."""

    steps: tuple[tuple[int, str], ...]
    gain: float

    def find(self, num_rows: int) -> str:
        """The solution for so many rows."""
        return next(name for most, name in self.steps if num_rows <= most)


def describe_codes(weight: DeviceCodes, dtype: torch.dtype, capability: tuple[int, int]) -> KernelQuery:
    """The query of `CODED_LINEAR` without ``num_rows``."""
    is_short = weight.is_short or weight.code in SHORT_CODES
    shape = {
        "in_features": weight.in_features, "out_features": weight.out_features, "bits": 4 if is_short else 8,
        "is_float": int(weight.code is Code.E4M3), "rows": weight.rows, "has_order": int(weight.order is not None),
        "group": weight.group if weight.scales.shape[1] > 1 else weight.in_features,
        "looks_up": int(weight.code in SHORT_CODES and weight.code is not Code.E2M1),
    }
    return KernelQuery(weight.codes.device.type, str(dtype).removeprefix("torch."), capability, shape)


def find_solutions(query: KernelQuery, num_rows: int) -> list[str]:
    """Names of the solutions for so many rows, by priority."""
    asked = KernelQuery(query.device, query.dtype, query.capability, {**query.shape, "num_rows": num_rows})
    return [name for name in CODED_LINEAR.names() if CODED_LINEAR.reason_against(name, asked) is None]


def make_plan(times: Times) -> Plan:
    """The fastest solution of each number of rows; the gain is infinite where the plain weight was not measured."""
    best = {
        rows: min((name for name in found if name != PLAIN), key=found.__getitem__) for rows, found in times.items()
    }
    gains = [times[rows][PLAIN] / times[rows][best[rows]] for rows in best if rows <= FEW_ROWS and PLAIN in times[rows]]
    steps = [
        (rows, name) for (rows, name), following in zip(
            best.items(), [*list(best.values())[1:], None], strict=True
        ) if name != following
    ]
    steps[-1] = (1 << 62, steps[-1][1])
    return Plan(tuple(steps), sum(gains) / len(gains) if gains else math.inf)


class CodedChoice:
    """Chooses plans for the weights of one model. ``time``: measures a call on the device, in seconds."""

    def __init__(self, path: Path | None = None, time: Callable[[Callable[[], Any]], float] | None = None):
        self._path, self._time = path, time or time_on_gpu
        self._file: MeasuredFile | None = None
        self._told: set[str] = set()
        self._compiled: set[str] = set()

    def prepare(self, weights: Iterable[DeviceCodes], dtype: torch.dtype, capability: tuple[int, int]) -> None:
        """Compile all at once what `choose` is going to measure for these weights: one after the other, each shape has
        too few kernels to keep all cores busy."""
        calls: list[Call] = []
        for weight in weights:
            key, query = self._describe(weight, dtype, capability)
            if _read_plan(self._find(key), query) is None and key not in self._compiled:
                self._compiled.add(key)
                calls += [(weight, rows, name) for rows in ROWS for name in find_candidates(query, rows)]
        if calls:
            _compile(calls, dtype)

    def _describe(
        self, weight: DeviceCodes, dtype: torch.dtype, capability: tuple[int, int]
    ) -> tuple[str, KernelQuery]:
        """The key of a weight in the file, and its query."""
        query = describe_codes(weight, dtype, capability)
        machine = _describe_device(weight.codes.device)
        # measured again by versions that have other solutions
        names = sorted({name for rows in ROWS for name in find_candidates(query, rows)})
        return f"{machine}: {weight.code.value} {query.dtype} {sorted(query.shape.items())} {' '.join(names)}", query

    def _find(self, key: str) -> Any:
        if self._file is None:
            self._file = MeasuredFile(self._path or env.cache_dir() / "coded_products.json")
        return self._file.find(key)

    def choose(self, weight: DeviceCodes, dtype: torch.dtype, capability: tuple[int, int]) -> Plan | None:
        """The plan for a weight on its device; None if it is faster plain."""
        key, query = self._describe(weight, dtype, capability)
        plan = _read_plan(self._find(key), query)
        is_known = plan is not None
        if plan is None:
            self.prepare([weight], dtype, capability)
            plan = make_plan(measure(weight, query, self._time))
            assert self._file is not None, "it was searched"
            self._file.put(key, {"steps": plan.steps, "gain": plan.gain})
        if key not in self._told:
            self._told.add(key)
            logger.info("%s", describe_plan(weight, plan))
            if is_known and plan.gain > 1.0:
                warm_up(weight, plan, dtype)
        return plan if plan.gain > 1.0 else None

    def save(self) -> None:
        """Write new measurements to the cache file."""
        if self._file is not None:
            self._file.save()


def describe_plan(weight: DeviceCodes, plan: Plan) -> str:
    """One line: shape, code, and which solution multiplies how many rows."""
    shape = f"{weight.out_features} x {weight.in_features} in {weight.code.value}, groups of {weight.group}"
    if plan.gain <= 1.0:
        return f"{shape}: dequantised, as products with codes are not faster here ({plan.gain:.2f} times as fast)"
    steps = ", ".join(f"{name} up to {most} rows" if most < 1 << 62 else f"{name} beyond" for most, name in plan.steps)
    return f"{shape}: {steps}; {plan.gain:.2f} times as fast as plain for few rows"


def _read_plan(stated: Any, query: KernelQuery) -> Plan | None:
    """A plan from the file, if it can still be carried out."""
    try:
        plan = Plan(tuple((int(most), str(name)) for most, name in stated["steps"]), float(stated["gain"]))
        usable = all(name in find_solutions(query, 1 if most >= ROWS[-1] else most) for most, name in plan.steps)
        return plan if usable and plan.steps[-1][0] >= ROWS[-1] else None
    except (TypeError, KeyError, ValueError, IndexError):
        return None


@torch.no_grad()
def measure(weight: DeviceCodes, query: KernelQuery, time: Callable[[Callable[[], Any]], float]) -> Times:
    """The times of all solutions for `ROWS`, which were compiled, so for every number of rows that they serve.
    Solutions that fail or give other numbers than the plain weight are left out, with a warning."""
    dtype, device = getattr(torch, query.dtype), weight.codes.device
    plain, times, faults = dequantise(weight, dtype), Times(), find_faults()
    left_out: set[str] = set()
    for rows in ROWS:
        x = torch.randn(rows, weight.in_features, device=device).to(dtype)
        found, expected = {PLAIN: time(partial(F.linear, x, plain))}, F.linear(x, plain).float()
        candidates = find_candidates(query, rows)
        rest = [name for name in find_solutions(query, rows) if name not in candidates]
        for name in candidates + rest:
            if name in left_out or (name in rest and len(found) > 1):
                continue
            call = partial(CODED_LINEAR.load(name), x, weight, None)
            try:
                _compare(call(), expected)
                _check_fused(name, x, weight, plain)
                for out, wanted in _call_rows(name, x, weight, expected):
                    _compare(out, wanted)
                found[name] = time(call)
            except faults as error:  # this torch, driver or device lacks it, or has too little shared memory
                left_out.add(name)
                logger.warning("coded product %s is left out from %d rows on: %s", name, rows, error)
        times[rows] = found
    return times


def _compare(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Raises `RuntimeError` where a solution gives other numbers than the plain weight."""
    distance = float((out.float() - expected.float()).norm() / expected.float().norm().clamp_(min=LEAST_NORM))
    if not distance < MOST_ERROR:
        raise RuntimeError(f"its results are wrong by {distance:.2g} of their size")


def _check_fused(name: str, x: torch.Tensor, weight: DeviceCodes, plain: torch.Tensor) -> None:
    """The same for what a solution's product is fused with."""
    if name in CODED_GATED.names() and weight.out_features % 2 == 0:
        gate, up = F.linear(x, plain).chunk(2, dim=1)
        _compare(CODED_GATED.load(name)(x, weight, None, "silu"), F.silu(gate) * up)
    if name in CODED_NORM_LINEAR.names() and weight.order is None:
        residual, norm = torch.randn_like(x), Norm(torch.ones_like(x[0]), 1e-5)
        out, total = CODED_NORM_LINEAR.load(name)(x, residual, norm, weight, None)
        _compare(total, x + residual)
        _compare(out, F.linear(F.rms_norm(x + residual, (x.shape[1],), norm.weight, norm.eps), plain))


def _call_rows(
    name: str, x: torch.Tensor, weight: DeviceCodes, expected: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What layers call instead for rows in FP8, and what it should give: partial sums, and products with an
    activation."""
    if name not in FP8_SUMS.names():
        return []
    rows = quantise_rows(x, weight.group if weight.num_groups > 1 else 0)
    sums = FP8_SUMS.load(name)(rows, weight, x.dtype)
    found = [(sums if sums.dim() == 2 else sums.sum(0), expected)]
    if weight.out_features % 16 == 0:
        gate, up = expected.chunk(2, dim=1)
        found.append((FP8_GATED.load(name)(rows, weight, None, x.dtype, "silu"), F.silu(gate) * up))
    return found


def find_candidates(query: KernelQuery, num_rows: int) -> list[str]:
    """The solutions that are measured for so many rows."""
    names = find_solutions(query, num_rows)
    return [name for name in names if num_rows >= LEAST_ROWS.get(name, 0)] or names


def _compile(calls: list[Call], dtype: torch.dtype) -> None:
    """Compile the kernels of solutions for weights and numbers of rows, in parallel."""

    def run() -> None:
        for weight, rows, name in calls:
            x = torch.zeros(rows, weight.in_features, dtype=dtype, device=device)
            with suppress(*find_faults()):
                _call_rows(name, x, weight, CODED_LINEAR.load(name)(x, weight, None))

    device = calls[0][0].codes.device
    about = [(str(describe_codes(weight, dtype, (0, 0))), rows, name) for weight, rows, name in calls]
    precompile(run, f"coded products {about}", device)


def find_faults() -> tuple[type[Exception], ...]:
    """What a solution that cannot run here raises."""
    faults = PluginError, CudaSourceError, OSError, RuntimeError, NotImplementedError
    if find_spec("triton") is None:
        return faults
    from triton.errors import TritonError

    return *faults, TritonError


@torch.no_grad()
def warm_up(weight: DeviceCodes, plan: Plan, dtype: torch.dtype) -> None:
    """Compile what a plan runs, for every number of rows, which measuring does too: nothing is to compile later."""
    _compile([(weight, rows, plan.find(rows)) for rows in ROWS], dtype)
    for rows in ROWS:
        x = torch.zeros(rows, weight.in_features, dtype=dtype, device=weight.codes.device)
        CODED_LINEAR.load(plan.find(rows))(x, weight, None)


def time_on_gpu(call: Callable[[], Any]) -> float:
    """Seconds of a call on the current GPU, the least of `REPEATS`, with a cold cache, as a captured graph replays it:
    without the host's time for launches. What cannot be captured is launched while the GPU is busy with writing."""
    call()
    run = _capture(call)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    least = math.inf
    for _ in range(REPEATS):
        for _ in range(FLUSHES):
            flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        least = min(least, start.elapsed_time(end) / 1e3)
    return least


def _capture(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call as a graph's replay; itself if it cannot be captured."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                call()
            finally:
                graph.capture_end()
    except RuntimeError:
        return call
    return graph.replay


def _describe_device(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{name}, torch {torch.__version__}"
