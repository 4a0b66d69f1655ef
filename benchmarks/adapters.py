"""LoRA adapters on one GPU: what they cost beside the base model. ``python -m benchmarks.adapters [--model FOLDER]``.

Rank 16 on all linears of Llama-3.1-8B with dummy weights: `offline256` with 0, 1, 8 and 64 adapters in the batch, one
request alone, base requests beside adapters, and the first token of an adapter that is on disk. Every cell is compared
with the same engine without adapters in the batch; prefix caches are emptied before each run.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.profiler import ProfilerActivity, profile

from benchmarks.cuda_trace import KERNELS, count_kernels, keep_after, print_kernels
from headrace.base.adapters import AdapterConfig, LoadAdapter
from headrace.base.config import EngineConfig, ModelConfig
from headrace.base.messages import EngineRequest
from headrace.base.parallel import DeviceConfig
from headrace.base.sampling import SamplingSpec, StopSpec
from headrace.layers.lora.contract import AdaptedPart, AdapterSites, AdapterWeights
from headrace.layers.lora.memory import AdapterMemory
from headrace.service.build import build_engine
from headrace.service.engine import Engine
from headrace.serving.bench import offline as workloads

HERE = Path(__file__).parent
RANK = 16
TRACED = 64
"""Tokens of each request at most, when kernels are traced."""
COLD_TURNS, PAUSE_S = 7, 1.0
"""Cold adapters, and seconds between them, in which memory is pinned for the next one."""


def make_weights(call: LoadAdapter, sites: AdapterSites, max_rank: int, memory: AdapterMemory) -> AdapterWeights:
    """Random additions to every linear, so small that dummy weights stay sane; stands for reading a file."""
    parts = []
    for site in sites.sites.values():
        if site.kind == "linear":
            a, b = random_matrix(RANK, site.in_features), random_matrix(site.out_features, RANK)
            parts.append(AdaptedPart(site.module, site.part, a=a, b=b))
    return AdapterWeights(parts, RANK, call.name, [])


@lru_cache
def random_matrix(rows: int, columns: int) -> torch.Tensor:
    """The same for the same shape: what is timed does not depend on values."""
    return torch.randn(rows, columns, dtype=torch.bfloat16) * 0.01


def run(engine: Engine, prompts: list[list[int]], output_lens: list[int], adapters: list[str]) -> float:
    """Seconds for all prompts at once, whose adapters are given in turns."""
    engine.reset_prefix_cache()
    requests = [
        EngineRequest(
            f"r{i}", prompt, SamplingSpec(), StopSpec(max_tokens=length),
            adapter=adapters[i % len(adapters)] if adapters else "",
        )
        for i, (prompt, length) in enumerate(zip(prompts, output_lens, strict=True))
    ]
    began = time.perf_counter()
    for request in requests:
        engine.submit(request)
    num_tokens = 0
    while engine.has_work:
        for output in engine.step():
            assert output.finish is None or output.finish.error is None, output.finish
            num_tokens += len(output.token_ids)
    seconds = time.perf_counter() - began
    assert num_tokens == sum(output_lens)
    return seconds


def write_adapter(engine: Engine, folder: Path, dtype: torch.dtype) -> None:
    """An adapter of PEFT on disk."""
    sites, tensors = engine.executor.adapters._own_banks.sites, {}
    for name, site in sites.sites.items():
        if site.kind == "linear":
            shapes = {"A": (RANK, site.in_features), "B": (site.out_features, RANK)}
            for letter, shape in shapes.items():
                tensors[f"base_model.model.{name}.lora_{letter}.weight"] = random_matrix(*shape).to(dtype, copy=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.rpartition(".")[2] for name, site in sites.sites.items() if site.kind == "linear"})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def trace(
    engine: Engine, prompts: list[list[int]], output_lens: list[int], adapters: list[str], after: float
) -> None:
    """Print where the device's time goes, after this share of the run."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run(engine, prompts, output_lens, adapters)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") in KERNELS]
    print_kernels(count_kernels(keep_after(events, after)), 24)


def measure_cold(engine: Engine, vocab_size: int, dtype: torch.dtype) -> None:
    """The first token of an adapter that must be read from the page cache, against the base model's; and once more,
    when the adapter is on the device."""
    prompt = [[(7 * i) % vocab_size for i in range(200)]]
    base = statistics.median(run(engine, prompt, [1], []) for _ in range(5))
    times = []
    with tempfile.TemporaryDirectory() as folder:
        write_adapter(engine, Path(folder), dtype)
        for turn in range(COLD_TURNS):
            began = time.perf_counter()
            engine.adapters.load(LoadAdapter(f"{dtype} {turn}", folder))
            read = time.perf_counter() - began
            first, again = (run(engine, prompt, [1], [f"{dtype} {turn}"]) for _ in range(2))
            times.append({"adds": read + first - base, "read": read, "first token": first, "second": again})
            time.sleep(PAUSE_S)
    for name in times[0]:
        told = ", ".join(f"{turn[name] * 1e3:.1f}" for turn in times)
        middle = statistics.median(turn[name] for turn in times) * 1e3
        print(f"cold, {str(dtype).removeprefix('torch.')}: {name:12s} {middle:7.1f} ms ({told})", flush=True)
    print(f"cold: base {base * 1e3:.1f} ms", flush=True)


def measure_stall(engine: Engine, vocab_size: int) -> None:
    """The longest time between two tokens of a request while another begins: of the base model, and of an adapter that
    is read from the page cache and put on the device meanwhile."""
    prompt = [(5 * i) % vocab_size for i in range(64)]
    with tempfile.TemporaryDirectory() as folder:
        write_adapter(engine, Path(folder), torch.bfloat16)
        for adapter in ("", "beside0", "", "beside1"):  # the first of each warms up
            engine.reset_prefix_cache()
            engine.submit(EngineRequest("long", prompt, SamplingSpec(), StopSpec(max_tokens=400)))
            gaps, last, load, asked = [], 0.0, None, 0
            while engine.has_work:
                for output in engine.step():
                    if output.request_id != "long" or not output.token_ids:
                        continue
                    now = time.perf_counter()
                    gaps.append(now - last)
                    last = now
                    if len(gaps) == 50 and adapter:
                        load = engine.adapters.begin_load(LoadAdapter(adapter, folder))
                    elif not asked and len(gaps) >= 150 and (load is None or load.done()):
                        asked, stop = len(gaps), StopSpec(max_tokens=1)
                        engine.submit(EngineRequest("other", prompt[::-1], SamplingSpec(), stop, adapter=adapter))
                engine.adapters.settle()
            times = statistics.median(gaps[1:]), max(gaps[50:asked]), max(gaps[asked:])
            median, reading, beginning = (f"{seconds * 1e3:.2f} ms" for seconds in times)
            name = "adapter" if adapter else "base"
            print(f"stall: {name:8s} median {median}, while read {reading}, when it begins {beginning}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=HERE / "models" / "llama-3.1-8b")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--graphs", default="on")
    parser.add_argument("--most", type=int, default=256, help="requests of a workload")
    parser.add_argument("--counts", default="1,8,64,mixed", help="adapters in the batch; mixed: 8, and half base")
    parser.add_argument("--cold", action="store_true", help="adapters that must be read alone, without workloads")
    parser.add_argument("--no-cold", action="store_true", help="workloads alone")
    parser.add_argument("--workloads", default="latency1,offline256")
    parser.add_argument("--trace", type=float, help="print kernels of each cell, after this share of its first tokens")
    args = parser.parse_args()
    vocab_size = json.loads((args.model / "config.json").read_text())["vocab_size"]
    began = time.perf_counter()
    engine = build_engine(EngineConfig(
        model=ModelConfig(model=str(args.model), load_format="dummy", dtype="bfloat16", skip_tokenizer=True),
        device=DeviceConfig(device=args.device, graphs=args.graphs),
        adapters=AdapterConfig(enable_lora=True, max_loras=args.slots, max_lora_rank=RANK),
    ))
    for line in engine.executor.memory:
        print(f"{line.name:24s} {line.num_bytes / 2**30:8.2f} GiB  {line.note}", flush=True)
    gc.collect()
    gc.freeze()  # as `headrace.LLM` does: a collection in a run would look at the whole model
    if not args.no_cold:
        for dtype in (torch.bfloat16, torch.float32):
            measure_cold(engine, vocab_size, dtype)
        measure_stall(engine, vocab_size)
    if args.cold:
        return engine.close()
    engine.executor.adapters._read = make_weights
    names = [f"a{i:0{i}d}" for i in range(args.slots)]
    for name in names:
        engine.adapters.load(LoadAdapter(name))
    print(f"ready after {time.perf_counter() - began:.1f} s", flush=True)
    cells: dict[str, list[str]] = {"base": []}
    for count in args.counts.split(","):
        if count == "mixed":
            cells["half base, 8 adapters"] = [part for name in names[:8] for part in (name, "")]
        else:
            cells[f"{count} adapters"] = names[: int(count)]
    for workload in args.workloads.split(","):
        prompts, output_lens = (part[: args.most] for part in workloads.ALL[workload](vocab_size))
        seconds: dict[str, float] = {}
        for cell, adapters in cells.items():
            if workload == "latency1" and cell not in ("base", "1 adapters"):
                continue
            run(engine, prompts, [min(4, length) for length in output_lens], adapters)  # loads, and warms up
            seconds[cell] = statistics.median(run(engine, prompts, output_lens, adapters) for _ in range(args.repeats))
            share = seconds["base"] / seconds[cell]
            print(f"{workload:12s} {cell:24s} {seconds[cell]:8.3f} s  {100 * share:6.1f} % of base", flush=True)
            if args.trace is not None:
                trace(engine, prompts, [min(TRACED, length) for length in output_lens], adapters, args.trace)
    engine.close()


if __name__ == "__main__":
    main()
