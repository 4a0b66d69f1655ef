"""Choose the fastest storage form for a weight: measured once per shape on this machine, then cached in a file.

Measures only while a model loads; once the time budget is spent, further shapes get the form of highest priority.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch

from headrace.base import env
from headrace.base.errors import PluginError
from headrace.kernels import native
from headrace.kernels.measured import MeasuredFile
from headrace.kernels.native.sources import describe_sources
from headrace.kernels.operation import KernelQuery
from headrace.kernels.packed_linear import WEIGHT_FORMS
from headrace.kernels.packed_linear.forms import StoredWeight

logger = logging.getLogger(__name__)

ROWS = (1, 8, 64)
"""Rows measured, with equal weight: decoding one request, several, and a prompt."""
MOST_WEIGHTS = 1 << 20
"""Weights of a measured matrix: a larger one is measured with fewer outputs, to save time."""
REPEATS = 3
BUDGET_S = 0.5
NATIVE_FORM = "panels"
FUSED_COST = 0.75
"""Factor on the cost of `NATIVE_FORM`: only with it is a decode step one call (`kernels/decoder_layers`), which timing
single products does not show; in bfloat16 on AMX 17.7 ms a token became about 10."""


class FormChoice:
    """Chooses among `WEIGHT_FORMS` for one model; ``budget_s`` bounds the time spent measuring."""

    def __init__(self, path: Path | None = None, budget_s: float = BUDGET_S):
        self._file = MeasuredFile(path or env.cache_dir() / "weight_forms.json")
        self._machine = describe_machine()
        self._end = time.monotonic() + budget_s

    def choose(self, query: KernelQuery) -> str:
        """The name of the best form for ``in_features`` and ``out_features``."""
        names = [name for name in WEIGHT_FORMS.names() if WEIGHT_FORMS.reason_against(name, query) is None]
        # while the native library compiles, the form for it would be measured on the slow reference
        if native.NATIVE.find() is None:
            names = [name for name in names if name != NATIVE_FORM]
        key = f"{self._machine}: {query.dtype} {sorted(query.shape.items())}"
        name = self._file.find(key)
        if name in names:
            return name
        if time.monotonic() > self._end:  # not cached: the next start may measure it
            return names[0]
        costs = measure(names, query)
        name = min(costs, key=costs.__getitem__)
        logger.debug("weight form %s for %s: %s", name, query.shape, costs)
        self._file.put(key, name)
        return name

    def save(self) -> None:
        """Write new measurements to the cache file."""
        self._file.save()


def describe_machine() -> str:
    """What a measured choice depends on besides the shape: CPU, threads, torch, kernels."""
    state = native.state()
    kernels = f"{state.detail} {describe_sources()}" if state.status == "ready" else state.status
    return (
        f"{torch.cpu.get_capabilities().get('cpu_name', '?')}, {torch.get_num_threads()} threads, torch "
        f"{torch.__version__}, {kernels}"
    )


@torch.no_grad()
def measure(names: list[str], query: KernelQuery) -> dict[str, float]:
    """The cost of each form: its time over the best time, summed over `ROWS`."""
    in_features, dtype = query.shape["in_features"], getattr(torch, query.dtype)
    out_features = max(16, min(query.shape["out_features"], MOST_WEIGHTS // in_features))
    # values that bfloat16 holds exactly, as those of most checkpoints: "panels" then stores float32 as bfloat16
    weight = torch.randn(out_features, in_features).bfloat16().to(dtype)
    times: dict[str, list[float]] = {}
    for name in names:
        try:
            stored = WEIGHT_FORMS.load(name)(weight.clone())
            times[name] = [_time(stored, torch.randn(rows, in_features).to(dtype)) for rows in ROWS]
        except (PluginError, RuntimeError, NotImplementedError) as error:  # this torch lacks the form
            logger.debug("weight form %s is left out: %s", name, error)
    best = [min(column) for column in zip(*times.values(), strict=True)]
    costs = {name: sum(t / b for t, b in zip(own, best, strict=True)) for name, own in times.items()}
    return {name: cost * FUSED_COST if name == NATIVE_FORM else cost for name, cost in costs.items()}


def _time(stored: StoredWeight, x: torch.Tensor) -> float:
    """Seconds of a product, the best of `REPEATS` after a warm-up: the others were disturbed."""
    stored.multiply(x, None)
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        stored.multiply(x, None)
        times.append(time.perf_counter() - start)
    return min(times)

