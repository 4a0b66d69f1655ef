"""DeepSeek-V4-Flash's shape on one GPU: ``python -m benchmarks.deepseek_v4 [--layers N] [--cells CELL,...]``.

Weights are random, experts stay in MXFP4, caches in 8 bits; as many of the 43 layers as fit are built. Prints the
memory plan, the seconds from the start to the first token, and each cell of `CELLS`: the time of a prefill or a decode
step. ``--trace`` adds the kernels by their share of the time. ``--tiny`` runs the same on anything.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from headrace.kernels.early import start_early
from headrace.service.bytecode import keep_bytecode

FLASH = Path(__file__).parent / "models" / "deepseek-v4-flash" / "config.json"
RESERVE = 14 * 2**30
"""Bytes for the activations of the largest step, the caches, and what torch's allocator cannot use."""

CELLS = {
    "prefill64": (1, 64), "prefill256": (1, 256), "decode1": (1, 8192), "prefill8k": (1, 8192),
    "decode64": (64, 2048), "prefill128k": (1, 131072),
}
"""Requests and prompt length; ``decode`` is timed behind the prompts, ``prefill`` is the prompt."""
FEW, NUM_NEW = 48, 240
"""Output tokens of the two runs of a decode cell: the few are more than its prompts take steps. 64 prompts take 6 s,
give or take a thousandth: of so many steps between them a fifth of a millisecond."""

TRACED = 24
"""Decode steps of a trace."""

TINY = {
    "vocab_size": 512, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 128, "q_lora_rank": 32,
    "o_lora_rank": 32, "o_groups": 2,
    "index_n_heads": 4, "index_head_dim": 64, "index_topk": 64, "n_routed_experts": 16, "moe_intermediate_size": 64,
    "num_hidden_layers": 5,
    "max_position_embeddings": 262144,
}


def read_config(tiny: bool) -> dict[str, Any]:
    config = json.loads(FLASH.read_text())
    return {**config, **TINY} if tiny else config


def bytes_of(config: dict[str, Any], num_layers: int) -> int:
    """Of all weights, found by building the model nowhere."""
    import torch

    from headrace.layers.build import Build
    from headrace.models.catalog import find_family

    family = find_family(config["architectures"][0])
    spec = family.read_config({**config, "num_hidden_layers": num_layers})
    model = family.build_model(spec, Build(torch.device("meta"), torch.bfloat16, 512))
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


def fit_layers(config: dict[str, Any]) -> int:
    """How many layers the GPU holds beside `RESERVE`. Imports torch as the start of an `LLM` does, of which it takes a
    part."""
    with keep_bytecode():
        start_early()
        import torch

        free, _ = torch.cuda.mem_get_info()
        few, more = bytes_of(config, 5), bytes_of(config, 6)
    return min(config["num_hidden_layers"], 5 + (free - RESERVE - few) // (more - few))


def build(config: dict[str, Any], args: argparse.Namespace) -> Any:
    from headrace import LLM

    cells = [CELLS[name] for name in args.cells]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return LLM(
            folder, load_format="dummy", dtype=args.dtype, kv_dtype=args.kv_dtype, device=args.device,
            skip_tokenizer=True, prefix_cache=False, max_model_len=max(length for _, length in cells) + NUM_NEW + 1,
            max_step_tokens=args.step, max_running_requests=max(count for count, _ in cells),
            memory_fraction=args.memory_fraction, graphs=args.graphs, moe_experts=args.moe_experts,
            hot_slots=args.hot_slots, page_size=128 if args.hot_slots else None, **args.options,
        )


def build_what_fits(config: dict[str, Any], num_layers: int, args: argparse.Namespace) -> tuple[Any, int]:
    """With two layers less each time that there is no room, once a failed start has given its memory back."""
    from headrace.base.errors import ConfigError

    while True:
        try:
            return build({**config, "num_hidden_layers": num_layers}, args), num_layers
        except ConfigError as error:
            if num_layers <= 5:
                raise
            print(f"{num_layers} layers do not fit: {error}", flush=True)
            num_layers -= 2


def measure(llm: Any, prompts: list[list[int]], num_new: int) -> float:
    """Seconds until all have ``num_new`` tokens."""
    from headrace import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params)
    seconds = time.perf_counter() - began
    assert all(len(output.outputs[0].token_ids) == num_new for output in outputs), outputs[0]
    return seconds


def run_cell(llm: Any, name: str, vocab_size: int, copies: int) -> dict[str, float]:
    """Milliseconds of a prefill, or of a decode step behind one, of ``copies`` times the cell's requests."""
    count, length = CELLS[name]
    draw = random.Random(0)
    prompts = [[draw.randrange(2, vocab_size) for _ in range(length)] for _ in range(count * copies)]
    if count * length <= 8192:
        measure(llm, prompts, 2)  # touches memory for the first time
    prefill = measure(llm, prompts, 1)
    row = {"prefill_ms": round(1000 * prefill, 1), "tokens_per_s": round(copies * count * length / prefill)}
    if name.startswith("decode"):
        # of steps in which all decode: those beside prompts, and those of the last few, take the same in both runs
        few, whole = measure(llm, prompts, FEW), measure(llm, prompts, NUM_NEW)
        row["decode_ms"] = round(1000 * (whole - few) / (NUM_NEW - FEW), 3)
    return row


Traced = dict[str, tuple[int, float, float]]
"""Launches of each kernel, microseconds, and microseconds of its own."""


def trace_cell(llm: Any, name: str, vocab_size: int, step: int, most: int = 24) -> None:
    """Print the kernels of a cell's prefill, and of a decode step in which all its requests decode, by the time that
    they take. ``step``: tokens of the largest step."""
    from benchmarks.cuda_trace import count_kernels, find_idle, record

    count, length = CELLS[name]
    prompts = [[random.Random(i).randrange(2, vocab_size) for _ in range(length)] for i in range(count)]

    def trace(num_new: int) -> tuple[float, float, Traced]:
        events = record(llm, lambda: measure(llm, prompts, num_new))
        kernels = {kernel: (launches, us, own) for kernel, launches, us, own in count_kernels(events)}
        return *find_idle([(e["ts"], e["dur"]) for e in events]), kernels

    def tell(kind: str, total: float, idle: float, kernels: Traced, steps: int) -> None:
        launches, ms = sum(launches for launches, _, _ in kernels.values()) / steps, total / 1e3 / steps
        print(f"-- {name}, {kind}: {ms:.2f} ms, {100 * idle / total:.0f} % idle, {launches:.0f} launches")
        for kernel, (launches, us, own) in sorted(kernels.items(), key=lambda item: -item[1][2])[:most]:
            each = f"{launches / steps:7.1f} x {own / launches:7.1f} us, {us / launches:.1f} in all"
            print(f"{own / 1e3 / steps:9.3f} ms {each}  {kernel}")

    tell("prefill", *trace(1), 1)
    if not name.startswith("decode"):
        return
    # as in `run_cell`: what a longer run has more of are steps in which all decode
    few = -(-count * length // step) + 2
    (total, idle, kernels), (longer, longer_idle, more) = trace(few), trace(few + TRACED)
    rest = {}
    for kernel, (launches, us, own) in more.items():
        launches_before, us_before, own_before = kernels.get(kernel, (0, 0.0, 0.0))
        if launches > launches_before:
            rest[kernel] = launches - launches_before, us - us_before, own - own_before
    tell("a decode step behind it", longer - total, longer_idle - idle, rest, TRACED)


def run(args: argparse.Namespace) -> dict[str, Any]:
    config = read_config(args.tiny)
    began = time.perf_counter()
    wanted = args.layers or (config["num_hidden_layers"] if args.device == "cpu" else fit_layers(config))
    llm, num_layers = build_what_fits(config, wanted, args)
    cells: dict[str, Any] = {}
    with llm:
        measure(llm, [[2, 3, 4]], 1)
        row = {"layers": num_layers, "first_token_s": round(time.perf_counter() - began, 1), "cells": cells}
        print(
            "\n".join(f"{line.name:36s} {line.num_bytes / 2**30:8.2f} GiB  {line.note}" for line in llm.memory_plan()),
            flush=True
        )
        print(f"{num_layers} layers, first token after {row['first_token_s']} s", flush=True)
        for name in args.cells:
            cells[name] = run_cell(llm, name, config["vocab_size"], args.copies)
            print(name, "  ".join(f"{key} {value}" for key, value in cells[name].items()), flush=True)
            if name in args.trace:
                trace_cell(llm, name, config["vocab_size"], args.step)
            llm.check()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=0, help="0: as many as fit")
    parser.add_argument("--cells", type=lambda text: text.split(","), default=list(CELLS), help=", ".join(CELLS))
    parser.add_argument("--copies", type=int, default=1, help="times the requests of each cell: one a replica")
    parser.add_argument("--trace", type=lambda text: text.split(","), default=[], help="cells to trace")
    parser.add_argument("--step", type=int, default=8192, help="tokens of the largest step")
    parser.add_argument("--memory-fraction", type=float, default=0.9)
    parser.add_argument("--hot-slots", type=int, default=0, help="entries of a request on the device, 0: all")
    parser.add_argument("--graphs", default="on", help="CUDA graphs: on, lazy or off")
    parser.add_argument("--moe-experts", default="auto", help="how experts are computed")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-dtype", default="float8_e4m3fn")
    parser.add_argument("--tiny", action="store_true", help="a small model instead")
    parser.add_argument("--options", type=json.loads, default={}, help="JSON object of more engine options")
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)7d ms %(name)s %(message)s")
    row = run(args)
    if args.json:
        args.json.write_text(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
