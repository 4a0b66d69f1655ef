"""Which parts there are for so many GPUs, in order of importance. Torch-free, and nothing is run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.forms import find_form, read_config
from benchmarks.roofline import Shape

MOST_LIMIT_S = 440
"""A part's longest limit; with up to 35 s to end its processes it stays below eight minutes."""
LLAMA, LLAMA_SMALL, QWEN = "llama-3.3-70b", "llama-3.1-8b", "qwen3-30b-a3b"
V3, V4 = "deepseek-v3:fp8-block", "deepseek-v4-flash"
WORKLOADS = ("latency1", "offline256", "prefill16x8k")
V4_LAYERS = 43
GPU_BYTES = 141e9
V3_RESERVE = 38e9
"""Bytes of a GPU that weights leave to one whole parameter in bfloat16 (15 GB) while filling it, caches, graphs."""
SKEWED = {"scoring_func": "sigmoid", "initializer_range": 0.5}
"""Of DeepSeek-V4's config.json, with which the router's random bias decides: most scores are near 0 or 1, and all
tokens prefer the same experts."""
DISPATCH_TOKENS = 128

Options = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One process. ``kind``: the benchmark, which says how its results are read; ``command``: its arguments, without
    ``--json FILE``; ``work``: times what the model is given, compared with parts of fewer GPUs."""

    name: str
    kind: str
    gpus: int
    model: str
    way: str
    command: tuple[str, ...]
    limit_s: float = MOST_LIMIT_S
    work: int = 1

    @property
    def options(self) -> Options:
        """Engine options in its command."""
        place = self.command.index("--options") + 1 if "--options" in self.command else 0
        return json.loads(self.command[place]) if place else {}


def ways_of(options: Options) -> str:
    """Sizes as tables name them: ``PP 2 x TP 2``, ``DP 4 + EP 4``; ``one GPU`` where nothing is divided."""
    names = {"pipeline_parallel_size": "PP", "data_parallel_size": "DP", "tensor_parallel_size": "TP"}
    sizes = [f"{name} {options[key]}" for key, name in names.items() if options.get(key, 1) > 1]
    experts = f" + EP {count_gpus(options)}" if options.get("enable_expert_parallel") else ""
    return (" x ".join(sizes) or "one GPU") + experts


def count_gpus(options: Options) -> int:
    """That an engine with such options takes."""
    keys = ("pipeline_parallel_size", "data_parallel_size", "tensor_parallel_size")
    return options.get(keys[0], 1) * options.get(keys[1], 1) * options.get(keys[2], 1)


def tp(size: int, **more: Any) -> Options:
    return {"tensor_parallel_size": size, **more}


def dp(size: int, **more: Any) -> Options:
    return {"data_parallel_size": size, **more}


def name_of(model: str, way: str, *more: str) -> str:
    """Of a part's files."""
    words = (model, way.replace(" x ", "-").replace(" + ", "-").replace(" ", ""), *more)
    return "-".join(words).replace(":", "-").lower()


def cuda(
    model: str, options: Options, cells: tuple[str, ...] = WORKLOADS, *, note: str = "", copies: int = 1,
    starts: bool = False,
) -> Part:
    """Workloads of `benchmarks.cuda`, ``copies`` times the requests of each. ``starts``: times a start, too."""
    way = ways_of(options)
    command = ["benchmarks.cuda", "--models", model, "--workloads", *cells, "--repeats", "1"]
    command += [*([] if starts else ["--no-startup"]), "--copies", str(copies), "--options", json.dumps(options)]
    told = f"{way}, {note}" if note else way
    more = [note.replace(" ", "-")] if note else ["copies"] if copies > 1 else []
    name = name_of(model, way, *more)
    return Part(name, "cuda", count_gpus(options), model, told, tuple(command), work=copies)


def trace(model: str, options: Options, workload: str) -> Part:
    """Which share of the kernels' time is communication."""
    command = ("benchmarks.cuda_trace", model, workload, "--most-tokens", "32", "--options", json.dumps(options))
    way = ways_of(options)
    return Part(f"trace-{name_of(model, way, workload)}", "trace", count_gpus(options), model, way, command, 300)


def flash(
    options: Options, copies: int = 1, *, cells: tuple[str, ...] = ("decode1", "prefill8k", "decode64"), note: str = ""
) -> Part:
    """All layers of DeepSeek-V4-Flash. Copies of the cells' requests are spread evenly over the replicas."""
    if copies > 1:
        options = {**options, "data_parallel_policy": "round-robin"}
    way = ways_of(options)
    command = (
        "benchmarks.deepseek_v4", "--layers", str(V4_LAYERS), "--cells", ",".join(cells), "--copies", str(copies),
        "--options", json.dumps(options),
    )
    told, more = (f"{way}, {note}", [note.replace(",", "").replace(" ", "-")]) if note else (way, [])
    return Part(name_of(V4, way, *more), "deepseek_v4", count_gpus(options), V4, told, command, work=copies)


def collectives(ranks: int) -> Part:
    """All-reduce, all-gather and all-to-all by size, beside NCCL's."""
    command = ("benchmarks.collectives", "--ranks", str(ranks))
    return Part(f"collectives-{ranks}", "collectives", ranks, "-", f"{ranks} ranks", command, 180)


def dispatch(model: str, ranks: int, tokens: tuple[int, ...] = ()) -> Part:
    """One mixture's tokens to their experts and back, by dispatcher."""
    command = ["benchmarks.expert_dispatch", "--ranks", str(ranks), "--model", model]
    command += ["--tokens", *map(str, tokens)] if tokens else []
    name = "-".join(["dispatch", model, str(ranks), *map(str, tokens)])
    return Part(name, "dispatch", ranks, model, f"{ranks} ranks", tuple(command), 240)


def pair(half: int) -> Part:
    """As many prefill as decode servers, on a GPU each, with so many times the load of one of each."""
    command = [
        "benchmarks.disaggregation", "--model", LLAMA_SMALL, "--pair", f"{half}:{half}", "--streams", str(32 * half),
        "--every", str(0.4 / half), "--ways", "pair", *(["one"] if half == 1 else []),
    ]
    way = f"{half} prefill + {half} decode"
    return Part(f"pair-{half}-{half}", "pair", 2 * half, LLAMA_SMALL, way, tuple(command), work=half)


def fit_layers(gpus: int, *, divides_attention: bool) -> int:
    """How many of DeepSeek-V3's layers in FP8 that many GPUs hold, each an equal share of the experts."""
    config, costs = read_config(V3), find_form(V3).costs
    room, most = GPU_BYTES - V3_RESERVE, config["num_hidden_layers"]
    for layers in range(most, config["first_k_dense_replace"], -1):
        shape = Shape.of({**config, "num_hidden_layers": layers})
        plain = costs.linear * shape.matmul_parameters + 2 * costs.head * shape.head_parameters
        experts = costs.expert * shape.num_experts * shape.expert_parameters
        if plain / (gpus if divides_attention else 1) + experts / gpus <= room:
            return layers
    return config["first_k_dense_replace"] + 1


def shape_v3(gpus: int, layers: int) -> Iterator[Part]:
    """DeepSeek-V3's shape in FP8, with so many layers, or as many as fit (0)."""
    for options, divides in ((tp(gpus), True), (dp(gpus, enable_expert_parallel=True), False)):
        count = layers or fit_layers(gpus, divides_attention=divides)
        yield cuda(V3, with_overrides(options, num_hidden_layers=count), note=f"{count} layers")


def with_overrides(options: Options, **overrides: Any) -> Options:
    return {**options, "config_overrides": json.dumps(overrides)}


def moving(gpus: int) -> Options:
    """DP and EP with a copy of an expert on each rank. A look comes after so many steps that a cell has some, and its
    43 moves are over before the next."""
    config = {"step_interval": 150, "window_size": 100, "num_redundant_experts": gpus, "log_balancedness": True}
    return dp(gpus, enable_expert_parallel=True, enable_eplb=True, eplb_config=json.dumps(config))


def balancing(gpus: int) -> Iterator[Part]:
    """Experts that move against such that do not, with a router that prefers some. The second of two runs counts,
    before which the experts have moved."""
    for options, note in ((dp(gpus, enable_expert_parallel=True), "experts stay"), (moving(gpus), "experts move")):
        yield flash(with_overrides(options, **SKEWED), gpus, cells=("decode64", "decode64"), note=f"skewed, {note}")


def list_two() -> Iterator[Part]:
    """What is measured of small models on two GPUs alone."""
    yield cuda(LLAMA_SMALL, tp(2), ("latency1", "prefill16x8k", "sharedprefix", "offline256"), starts=True)
    yield trace(LLAMA_SMALL, tp(2), "latency1")
    yield trace(QWEN, tp(2), "latency1")
    yield cuda(LLAMA_SMALL, {}, ("offline256",))
    yield cuda(LLAMA_SMALL, dp(2), ("offline256",), copies=2)
    yield trace(LLAMA_SMALL, tp(2), "offline256")


def list_all(gpus: int, layers: int) -> Iterator[Part]:
    fp8, half = f"{LLAMA}:fp8", gpus // 2
    yield collectives(gpus)
    yield cuda(LLAMA, tp(gpus))
    if gpus == 2:
        yield from list_two()
    yield flash(tp(gpus, enable_expert_parallel=True))
    if gpus == 8:
        yield flash(moving(gpus), gpus, note="redundant experts")
    yield flash(dp(gpus, enable_expert_parallel=True), gpus)
    if gpus == 8:
        yield from shape_v3(gpus, layers)
    yield cuda(fp8, tp(gpus))
    yield cuda(LLAMA, {"pipeline_parallel_size": 2, **tp(half)})
    for options in (tp(gpus), tp(gpus, enable_expert_parallel=True), dp(gpus)):
        yield cuda(QWEN, options)
    yield dispatch("qwen3-30b", gpus)
    for ranks in (2, 4, 8):
        if ranks <= gpus:
            yield dispatch("deepseek-v3", ranks, (DISPATCH_TOKENS,))
    yield pair(half)
    if gpus == 8:
        yield from balancing(gpus)
    # what the others are compared with
    yield cuda(LLAMA, tp(2))
    yield cuda(fp8, {})
    yield cuda(fp8, tp(2))
    yield cuda(QWEN, {})
    yield cuda(QWEN, tp(2))
    yield flash(tp(2, enable_expert_parallel=True))
    yield collectives(2)
    yield pair(1)
    for workload in ("latency1", "prefill16x8k", "offline256"):
        yield trace(LLAMA, tp(gpus), workload)


def list_parts(gpus: int, layers: int = 0) -> list[Part]:
    """All parts of 2, 4 or 8 GPUs, each once. ``layers``: of DeepSeek-V3's shape; 0: as many as fit."""
    return list({part.name: part for part in list_all(gpus, layers)}.values())
