"""DeepSeek-V4-Flash's shape on one GPU: ``python -m benchmarks.deepseek_v4 [--layers N] [--prompt 8192] [--new 64]``.

Weights are random, experts stay in MXFP4, caches in 8 bits; as many of the 43 layers as fit are built. Prints the
memory plan, the time of a prefill and of a decode step. ``--tiny`` runs the same on anything.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

FLASH = Path(__file__).parent / "models" / "deepseek-v4-flash" / "config.json"
RESERVE = 14 * 2**30
"""Bytes for the activations of the largest step, the caches, and what torch's allocator cannot use."""

TINY = {
    "vocab_size": 512, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 128, "q_lora_rank": 32,
    "o_lora_rank": 32, "o_groups": 2,
    "index_n_heads": 4, "index_head_dim": 64, "index_topk": 64, "n_routed_experts": 16, "moe_intermediate_size": 64,
    "num_hidden_layers": 5,
    "max_position_embeddings": 16384,
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
    """How many layers the GPU holds beside `RESERVE`."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    few, more = bytes_of(config, 5), bytes_of(config, 6)
    return min(config["num_hidden_layers"], 5 + (free - RESERVE - few) // (more - few))


def build(config: dict[str, Any], args: argparse.Namespace) -> Any:
    from headrace import LLM

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return LLM(
            folder, load_format="dummy", dtype=args.dtype, kv_dtype=args.kv_dtype, device=args.device,
            skip_tokenizer=True, prefix_cache=False, max_model_len=args.prompt + args.new, max_step_tokens=args.step,
            max_running_requests=4, memory_fraction=0.5,
        )


def build_what_fits(config: dict[str, Any], num_layers: int, args: argparse.Namespace) -> tuple[Any, int]:
    """With two layers less each time that there is no room."""
    from headrace.base.errors import ConfigError

    while True:
        try:
            return build({**config, "num_hidden_layers": num_layers}, args), num_layers
        except ConfigError as error:
            if num_layers <= 5:
                raise
            print(f"{num_layers} layers do not fit: {error}", flush=True)
            num_layers -= 2


def measure(llm: Any, prompt: list[int], num_new: int) -> float:
    """Seconds until the last of ``num_new`` tokens."""
    from headrace import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    outputs = llm.generate(prompt_token_ids=[prompt], sampling_params=params)
    seconds = time.perf_counter() - began
    assert len(outputs[0].outputs[0].token_ids) == num_new, outputs[0]
    return seconds


def run(args: argparse.Namespace) -> dict[str, Any]:
    config = read_config(args.tiny)
    began = time.perf_counter()
    wanted = args.layers or (config["num_hidden_layers"] if args.device == "cpu" else fit_layers(config))
    llm, num_layers = build_what_fits(config, wanted, args)
    with llm:
        ready = time.perf_counter() - began
        print(
            "\n".join(f"{line.name:36s} {line.num_bytes / 2**30:8.2f} GiB  {line.note}" for line in llm.memory_plan()),
            flush=True
        )
        prompt = [random.Random(0).randrange(2, config["vocab_size"]) for _ in range(args.prompt)]
        measure(llm, prompt, 3)  # compiles, and touches memory for the first time
        prefill = measure(llm, prompt, 1)
        print(f"prefill of {args.prompt}: {prefill:.3f} s", flush=True)
        whole = measure(llm, prompt, args.new)
        llm.check()
    decode = (whole - prefill) / (args.new - 1)
    row = {
        "layers": num_layers, "prompt": args.prompt, "new": args.new, "ready_s": round(ready, 1),
        "prefill_s": round(prefill, 3),
        "prefill_tokens_per_s": round(args.prompt / prefill), "decode_ms": round(1000 * decode, 2),
        "decode_ms_per_layer": round(1000 * decode / num_layers, 3),
    }
    print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=0, help="0: as many as fit")
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--step", type=int, default=8192, help="tokens of the largest step")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-dtype", default="float8_e4m3fn")
    parser.add_argument("--tiny", action="store_true", help="a small model instead")
    parser.add_argument("--json", type=Path, help="write the row here")
    args = parser.parse_args()
    row = run(args)
    if args.json:
        args.json.write_text(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
