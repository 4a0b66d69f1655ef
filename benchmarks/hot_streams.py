"""Long contexts with and without hot slots: ``python -m benchmarks.hot_streams [--layers N] [--streams R]``.

DeepSeek-V4-Flash's shape with random weights. R requests decode at the end of contexts that were never computed (their
caches are zeros), all on the device and behind hot slots. What they select is synthetic: of each token's entries a
share stays that of the token before. Prints milliseconds of a step for shares from 0 to 1, how many entries were
copied, and what the caches take of the device. ``--tiny`` runs the same on anything.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.deepseek_v4 import read_config
from headrace.base.cache import CACHE_POLICIES, CacheLayout
from headrace.base.config import engine_config, resolve_for_device
from headrace.base.sampling import SamplingSpec
from headrace.base.step import PageAppend, RowStart, StepPlan
from headrace.execution.assembly import Assembly
from headrace.execution.captures import NoRecorder, Recorder
from headrace.execution.device import resolve_device
from headrace.execution.graph_sizes import GraphSizes
from headrace.execution.loading import LoadedModel, load_model, own_groups
from headrace.kernels.hot_slots import NONE
from headrace.kernels.latents.slots import find_slots
from headrace.kernels.precompile import precompile, start_triton
from headrace.kernels.sparse_attention import EntryView
from headrace.memory.plan import CacheDemand, plan_cache
from headrace.models.deepseek_v4.indexer import Indexer

PAGE = 128


class SyntheticChoice:
    """In place of the selection: the j-th entry of a token is among the j-th part of its entries, always the same for
    the first ``kept`` and another in each call for the others; `NONE` for those that the token does not see."""

    def __init__(self, device: torch.device, entries: int, top_k: int):
        self.kept = torch.zeros((), dtype=torch.int64, device=device)
        self._calls, self._stride = torch.zeros_like(self.kept), entries // top_k

    def select(
        self, scores: torch.Tensor, view: EntryView, *, top_k: int, per_page: int, tokens: slice
    ) -> torch.Tensor:
        """See `headrace.kernels.sparse_attention.SELECT_ENTRIES`."""
        self._calls.add_(1)
        number = torch.arange(top_k, device=scores.device)
        moved = torch.where(number < self.kept, 0, 1 + self._calls % (self._stride - 1))
        chosen = (number * self._stride + moved).expand(len(scores), -1)
        slots = find_slots(view.page_table, view.requests[tokens][:, None].expand_as(chosen), chosen, per_page)
        # The null row has no entries, and a graph's first replay computes nothing else: kernels check no numbers.
        return slots.masked_fill_(chosen >= view.visible[tokens][:, None], NONE)


class Streams:
    """R decoding requests at ``context`` tokens, in a runner of their own."""

    def __init__(self, assembly: Assembly, layout: CacheLayout, context: int):
        self.runner, self._rows, self._begin, self._step = assembly.build_runner(layout), layout.max_rows, context, 0
        self._has_graphs, self._layout = assembly.has_graphs, layout
        self._device, self._sizes = assembly.device, GraphSizes([layout.max_rows], [])

    def capture(self, recorder: Any) -> None:
        """Record the step."""
        if self._has_graphs:
            self.runner.capture(self._sizes, recorder).record_all(lambda: None)

    def _first(self) -> dict[str, Any]:
        """Rows and pages: of windows those that are still needed."""
        appends, starts = [], []
        policies = [CACHE_POLICIES.load(g.spec.kind)(g.spec, PAGE) for g in self._layout.groups]
        for row in range(self._rows):
            starts.append(RowStart(row, str(row), [1], 1, SamplingSpec()))
            for group, policy in enumerate(policies):
                first, end = policy.first_needed(self._begin), -(-self._layout.max_model_len // PAGE)
                count = end - first
                pages = list(range(1 + row * count, 1 + (row + 1) * count))
                appends.append(PageAppend(group, row, first, pages))
        return {"starts": starts, "appends": appends, "last_tokens": [1] * self._rows}

    def run(self, steps: int) -> float:
        """Milliseconds of a step; the first two are not timed."""
        ids, began = [1] * self._rows, 0.0
        pending: list[Any] = []
        with torch.inference_mode():
            for number in range(steps + 2):
                if number == 2:
                    pending[-1].result()
                    began = time.perf_counter()
                extra = {"last_tokens": ids} if self._step else self._first()
                # at the same place again: the context does not grow from one run to the next
                plan = StepPlan(
                    self._step, self._rows, list(range(self._rows)), [self._begin + number] * self._rows, ids, ids,
                    **extra
                )
                pending.append(self.runner.execute(plan))
                self._step += 1
            pending[-1].result()
        return 1e3 * (time.perf_counter() - began) / steps


def lay_out(loaded: LoadedModel, rows: int, context: int) -> CacheLayout:
    """Exactly as many pages as the requests need."""
    length = context + PAGE
    wanted = CacheDemand(
        loaded.cache_groups, PAGE, length, is_len_fixed=True, max_step_tokens=PAGE, max_rows=rows, host_bytes=2**50
    )
    pages = rows * -(-length // PAGE) + 1
    plan = plan_cache(wanted, engine_config(kv_pages=pages).cache, 2**50)
    return CacheLayout(PAGE, rows, length, plan.groups)


def run(args: argparse.Namespace) -> None:
    config = read_config(args.tiny)
    config["num_hidden_layers"] = args.layers or config["num_hidden_layers"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        options = engine_config(
            model=folder, load_format="dummy", dtype=args.dtype, kv_dtype=args.kv_dtype, device=args.device,
            page_size=PAGE, max_model_len=args.context + PAGE, max_step_tokens=max(PAGE, args.streams),
            max_running_requests=args.streams, prefix_cache=False,
        )
        device = resolve_device(options.device.device, 0, options.parallel)
        start_triton(device)
        options = resolve_for_device(options, device.type)
        began = time.perf_counter()
        loaded = load_model(options, device, lambda stage, fraction: None)
        print(f"{args.layers} layers loaded in {time.perf_counter() - began:.1f} s", flush=True)
        for slots in args.slots:
            measure(args, options, loaded, slots, device)


def measure(
    args: argparse.Namespace, options: Any, loaded: LoadedModel, slots: int, device: torch.device
) -> None:
    """Print a line for each share, with so many hot slots (0: all on the device)."""
    options, own = replace(options, cache=replace(options.cache, hot_slots=slots)), loaded
    if slots:
        family = loaded.family.hosting(loaded.spec, slots)
        specs = family.cache_specs(loaded.spec, loaded.kv_dtype)
        own = replace(loaded, groups=own_groups(specs, range(len(specs)), loaded.ranks.tensor))
    assembly = Assembly.of(options, own, device)
    streams = Streams(assembly, lay_out(own, args.streams, args.context), args.context)
    precompile(lambda: streams.capture(NoRecorder()), f"hot streams {slots} {args}", device)
    top_k = loaded.spec.indexer.top_k
    choice = SyntheticChoice(device, args.context // 4, top_k)
    with replaced_selection(loaded.model, choice):
        streams.capture(Recorder(device) if device.type == "cuda" else NoRecorder())
        taken = sum(pool.num_bytes for pool in streams.runner.pools)
        for share in args.shares if slots else args.shares[:2]:
            choice.kept.fill_(round(share * top_k))
            before = streams.runner.swaps.totals
            time_ms = min(streams.run(args.steps) for _ in range(2))
            wanted, copied = (b - a for a, b in zip(before, streams.runner.swaps.totals, strict=True))
            print(
                f"{slots or 'no'} hot slots, {args.streams} x {args.context} tokens, caches {taken / 2**30:.2f} GiB: "
                f"overlap {share:.0%} {time_ms:.3f} ms a step, {copied / max(1, wanted):.1%} of wanted entries copied",
                flush=True
            )
    streams.runner.detach()


@contextmanager
def replaced_selection(model: torch.nn.Module, choice: SyntheticChoice) -> Iterator[None]:
    """In its body all indexers choose by ``choice``."""
    indexers = [module for module in model.modules() if isinstance(module, Indexer)]
    own = [indexer._select for indexer in indexers]
    for indexer in indexers:
        indexer._select = choice.select
    try:
        yield
    finally:
        for indexer, select in zip(indexers, own, strict=True):
            indexer._select = select


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--context", type=int, default=65536)
    parser.add_argument("--slots", type=lambda text: [int(n) for n in numbers(text)], default=[0, 1024])
    parser.add_argument("--shares", type=numbers, default=[0.9, 1.0, 0.75, 0.5, 0.25, 0.0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-dtype", default="float8_e4m3fn")
    parser.add_argument("--tiny", action="store_true", help="a small model instead")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
