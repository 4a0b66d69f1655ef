"""``headrace bench offline``: four fixed workloads through `headrace.LLM`, in this process.

Each workload maps ``(vocab_size, seed)`` to prompts (token ids) and output lengths. The order of the random calls is
part of its definition: results of the same workloads elsewhere stay comparable.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace.base.errors import ConfigError
from headrace.base.option import split_list
from headrace.base.sampling import SamplingParams
from headrace.service.client.outputs import GenerationOutput
from headrace.serving.bench.options import OfflineBenchOptions
from headrace.serving.bench.report import write_json
from headrace.serving.offline.llm import LLM

Workload = tuple[list[list[int]], list[int]]

MARGIN = 1000
"""Ids this close to either end of the vocabulary are not used: special tokens are there."""


def _random_ids(random: Random, vocab_size: int, count: int) -> list[int]:
    return [random.randrange(MARGIN, vocab_size - MARGIN) for _ in range(count)]


def make_latency1(vocab_size: int, seed: int = 1) -> Workload:
    """One request, 512 tokens in and 256 out: decode, bound by launch overhead and by reading the weights."""
    return [_random_ids(Random(seed), vocab_size, 512)], [256]


def make_offline256(vocab_size: int, seed: int = 0) -> Workload:
    """256 requests, 100 to 1024 tokens in and out: continuous batching, and attention bound by memory bandwidth."""
    random = Random(seed)
    prompt_lens, output_lens = ([random.randint(100, 1024) for _ in range(256)] for _ in range(2))
    return [_random_ids(random, vocab_size, length) for length in prompt_lens], output_lens


def make_prefill16x8k(vocab_size: int, seed: int = 2) -> Workload:
    """16 prompts of 8192 tokens, one token out: prefill, bound by arithmetic."""
    random = Random(seed)
    return [_random_ids(random, vocab_size, 8192) for _ in range(16)], [1] * 16


def make_sharedprefix(vocab_size: int, seed: int = 3) -> Workload:
    """512 prompts of 2112 tokens, the first 2048 of them equal, 16 out: the prefix cache."""
    random = Random(seed)
    prefix = _random_ids(random, vocab_size, 2048)
    return [prefix + _random_ids(random, vocab_size, 64) for _ in range(512)], [16] * 512


ALL: dict[str, Callable[..., Workload]] = {
    "latency1": make_latency1, "offline256": make_offline256, "prefill16x8k": make_prefill16x8k,
    "sharedprefix": make_sharedprefix,
}
COLUMNS = ("workload", "seconds", "tokens in", "out", "cached", "out/s", "total/s")


@dataclass(frozen=True)
class WorkloadRow:
    """One workload's best run. ``note``: why it was not run, or that it was cut."""

    workload: str
    seconds: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    note: str = ""

    @property
    def output_throughput(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def total_throughput(self) -> float:
        return (self.prompt_tokens + self.output_tokens) / self.seconds if self.seconds else 0.0


def run_offline_bench(
    options: OfflineBenchOptions, console: Console | None = None, **engine_options: Any
) -> list[WorkloadRow]:
    """Load a model (``engine_options`` are those of `headrace.LLM`, ``model`` among them), run the workloads, print a
    table to ``console`` and write the output file if configured. Raises `ConfigError` for an unknown workload."""
    names = split_list(options.workloads)
    unknown = [name for name in names if name not in ALL]
    if unknown or not names:
        raise ConfigError(f"workloads must be of {', '.join(ALL)}; got {options.workloads!r}", param="workloads")
    model = engine_options.pop("model")
    with LLM(model, skip_tokenizer=True, **engine_options) as llm:
        rows = [run_workload(llm, name, options) for name in names]
        if console:
            print_rows(rows, f"{model} on {llm.facts.device}, {llm.facts.dtype}", console)
    if options.output_file:
        write_json(
            options.output_file, {"model": model, "options": engine_options, "rows": [to_dict(row) for row in rows]}
        )
    return rows


def run_workload(llm: LLM, name: str, options: OfflineBenchOptions) -> WorkloadRow:
    """Run one workload, greedy and to full length, each repeat with an empty prefix cache; returns the fastest run."""
    all_prompts, output_lens = ALL[name](llm.facts.vocab_size)
    prompts, output_lens = all_prompts[: options.max_prompts], output_lens[: options.max_prompts]
    note = f"only the first {len(prompts)} of {len(all_prompts)} prompts" if len(prompts) < len(all_prompts) else ""
    longest = max(map(len, prompts)) + max(output_lens)
    if longest > llm.facts.max_model_len:
        return WorkloadRow(
            name, note=f"not run: needs {longest} tokens of context, the model has {llm.facts.max_model_len}"
        )
    # Warm-up: compiles and allocates outside the measurement.
    _generate(llm, [prompts[0][:64]], [2])
    runs = []
    # Without the reset every repeat after the first would hit the prefix cache.
    for _ in range(options.repeats):
        llm.reset_prefix_cache()
        began = time.perf_counter()
        outs = _generate(llm, prompts, output_lens)
        seconds = time.perf_counter() - began
        counts = (
            sum(map(len, prompts)), sum(len(out.outputs[0].token_ids) for out in outs),
            sum(out.num_cached_tokens for out in outs)
        )
        runs.append(WorkloadRow(name, seconds, *counts, note))
    return min(runs, key=lambda row: row.seconds)


def _generate(llm: LLM, prompts: list[list[int]], output_lens: list[int]) -> list[GenerationOutput]:
    params = [
        # full length and no detokenization: every run does the same work, and only the engine is measured
        SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False) for length in output_lens
    ]
    return llm.generate(prompt_token_ids=prompts, sampling_params=params)


def to_dict(row: WorkloadRow) -> dict[str, Any]:
    """A row as a dict, with throughputs."""
    return {
        **dataclasses.asdict(row), "output_throughput": row.output_throughput, "total_throughput": row.total_throughput
    }


def print_rows(rows: list[WorkloadRow], title: str, console: Console) -> None:
    """The rows as a table, notes below."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        cells = [f"{row.seconds:.2f}", *(f"{n:,}" for n in (row.prompt_tokens, row.output_tokens, row.cached_tokens))]
        cells += [f"{row.output_throughput:,.1f}", f"{row.total_throughput:,.1f}"]
        table.add_row(row.workload, *(cells if row.seconds else ["-"] * len(cells)))
    console.print(table)
    for row in rows:
        if row.note:
            console.print(f"{row.workload}: {row.note}", highlight=False)
