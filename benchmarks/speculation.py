"""Decode throughput with drafts against without, on one GPU: ``python -m benchmarks.speculation [--models ...]``.

Weights are random, so a drafter of method ``bench`` stands for a real one: an EAGLE-3 head of the usual size whose
drafts are right at a set rate. ``auto`` lets the policy choose how many drafts to verify, as without a fixed number.
Engines run in turns, each once per round; a row has the median ratio of seconds to the engine without drafts.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.forms import build

PROMPT_LEN = 128
STEPS_SHOWN = 24


def tokens_per_step(rate: float, drafts: int) -> float:
    """Expected tokens of a step, the sampled one included."""
    return sum(rate**i for i in range(drafts + 1))


def measure(llm: Any, streams: int, output_len: int, seed: int) -> float:
    """Seconds to decode, from the first token of the last prompt on."""
    from headrace import SamplingParams

    llm.reset_prefix_cache()
    prompts = [[(7 + seed + i * 131 + j * j * 17) % 30_000 for j in range(PROMPT_LEN)] for i in range(streams)]
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    many = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    llm.generate(prompt_token_ids=prompts, sampling_params=[one] * streams)  # the prompts' prefix is stored
    began = time.perf_counter()
    outs = llm.generate(prompt_token_ids=prompts, sampling_params=[many] * streams)
    seconds = time.perf_counter() - began
    assert all(len(o.outputs[0].token_ids) == output_len for o in outs)
    return seconds


Steps = dict[tuple[int, int, int, int], list[float]]
"""Milliseconds of steps of decodes alone by number of streams, rows, entries (rounded to 16) and drafts per row."""


def watch_steps(drafting: Any, steps: Steps, streams: int) -> None:
    """Also write down what the scheduler hears of its steps."""
    note_time = type(drafting).note_time

    def note(lengths: Sequence[int], seconds: float, *, num_tokens: int, num_proposals: int) -> None:
        entries = sum(lengths)
        steps[streams, len(lengths), entries if entries < 16 else -(-entries // 16) * 16, num_proposals].append(
            1e3 * seconds
        )
        note_time(drafting, lengths, seconds, num_tokens=num_tokens, num_proposals=num_proposals)

    drafting.note_time = note


def print_steps(label: str, steps: Steps) -> None:
    """The kinds of steps that took most of the time."""
    longest = sorted(steps.items(), key=lambda item: -sum(item[1]))[:STEPS_SHOWN]
    for (streams, rows, entries, made), times in sorted(longest):
        print(
            f"  {label}, {streams} streams: {len(times)} steps of {rows} rows, {entries} entries, {made} made: median "
            f"{statistics.median(times):.3f} ms, {sum(times) / 1e3:.3f} s", flush=True,
        )


def configure(label: str, drafts: int) -> dict[str, Any]:
    """``off``, or a rate with ``auto`` behind it or not."""
    if label == "off":
        return {"method": "off"}
    rate = float(label.removesuffix("auto"))
    return {"method": "bench", "acceptance_rate": rate, "num_speculative_tokens": drafts}


def run(model: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    seconds: dict[tuple[str, int], list[float]] = {}
    accepted: dict[tuple[str, int], list[float]] = {}
    for label in ("off", *args.rates, "off"):
        config = configure(label, args.drafts)
        with build(model, {**args.options, "speculative_config": json.dumps(config)}) as llm:
            drafting = llm._client._engine._scheduler._drafting
            if label.endswith("auto"):
                drafting._policy._fixed = None
            times_of_steps: Steps = defaultdict(list)
            for streams in args.streams:
                measure(llm, streams, 8, 1)
                watch_steps(drafting, times_of_steps, streams)
                steps, tokens = llm.stats().steps_total, llm.stats().generation_tokens_total
                times = [measure(llm, streams, args.output_len, 100 * r) for r in range(args.rounds)]
                steps, tokens = llm.stats().steps_total - steps, llm.stats().generation_tokens_total - tokens
                seconds.setdefault((label, streams), []).extend(times)
                accepted.setdefault((label, streams), []).append(tokens / steps / streams)
                rate = round(tokens / steps / streams, 2)
                print(model, label, streams, [round(s, 4) for s in times], rate, flush=True)
            if args.steps:
                print_steps(label, times_of_steps)
        del llm
        gc.collect()
    rows = []
    for (label, streams), times in seconds.items():
        base = statistics.median(seconds["off", streams])
        rows.append({
            "model": model, "drafts": label, "streams": streams, "seconds": round(statistics.median(times), 4),
            "tokens_per_s": round(streams * args.output_len / statistics.median(times)),
            "speedup": round(base / statistics.median(times), 3),
            "tokens_per_step": round(statistics.mean(accepted[label, streams]), 2),
        })
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["llama-3.1-8b"], help="folders under benchmarks/models")
    parser.add_argument(
        "--rates", nargs="*", default=["0.76", "0auto"], help="acceptance rates; with auto behind: adaptive"
    )
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 64, 256])
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--options", type=json.loads, default={}, help="JSON object of engine options")
    parser.add_argument("--steps", action="store_true", help="print what kinds of steps the time went to")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    rows = [row for model in args.models for row in run(model, args)]
    print(f"\n{'model':14s} {'drafts':>9s} {'streams':>7s} {'tok/s':>8s} {'speedup':>8s} {'tok/step':>8s}")
    for r in rows:
        print(
            f"{r['model']:14s} {r['drafts']:>9s} {r['streams']:7d} {r['tokens_per_s']:8d} {r['speedup']:8.3f} "
            f"{r['tokens_per_step']:8.2f}"
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
