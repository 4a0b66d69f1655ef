"""Loads and unloads adapters thousands of times and tells what stays behind: ``python -m benchmarks.adapter_cycles``.

A small random model on a CPU, or with ``--device cuda`` on a GPU. Each cycle loads an adapter of random rank, asks it
for a token, and unloads it while it runs. Prints memory of the process and of the device every tenth of the cycles;
fails when the last tenth has grown by more than ``--most-mib``.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import tempfile
from pathlib import Path

import torch

from headrace.base.adapters import AdapterConfig, LoadAdapter, UnloadAdapter
from headrace.base.config import CacheConfig, EngineConfig, ModelConfig
from headrace.base.messages import EngineRequest
from headrace.base.parallel import DeviceConfig
from headrace.base.sampling import SamplingSpec, StopSpec
from headrace.layers.lora.contract import AdaptedPart, AdapterSites, AdapterWeights
from headrace.layers.lora.memory import AdapterMemory
from headrace.service.build import build_engine

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "silu",
    "bos_token_id": 1, "eos_token_id": 2,
}


def make_weights(call: LoadAdapter, sites: AdapterSites, max_rank: int, memory: AdapterMemory) -> AdapterWeights:
    """Random numbers; the adapter's name says its rank. Some replace the head."""
    rank, parts = 1 + hash(call.name) % max_rank, []
    for site in sites.sites.values():
        if site.kind == "linear":
            a, b = torch.randn(rank, site.in_features), torch.randn(site.out_features, rank)
            parts.append(AdaptedPart(site.module, site.part, a=a * 0.05, b=b * 0.05))
    if rank % 4 == 0:
        size = CONFIG["vocab_size"], CONFIG["hidden_size"]
        parts.append(AdaptedPart("head", weight=torch.randn(size)))
    return AdapterWeights(parts, rank, call.name, [])


def memory_mib(device: str) -> float:
    """Of this process, most so far, and of the device, now."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return own + (torch.cuda.memory_allocated() / 2**20 if device == "cuda" else 0.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=10_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--most-mib", type=float, default=16.0)
    args = parser.parse_args()
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        engine = build_engine(EngineConfig(
            model=ModelConfig(model=folder, load_format="dummy", skip_tokenizer=True),
            cache=CacheConfig(kv_pages=64), device=DeviceConfig(device=args.device),
            adapters=AdapterConfig(enable_lora=True, max_loras=4, max_lora_rank=16, max_cpu_loras=8),
        ))
    engine.executor.adapters._read = make_weights  # type: ignore[attr-defined]
    marks = [memory_mib(args.device)]
    for cycle in range(args.cycles):
        name = f"a{draw.randrange(1000)}"
        engine.adapters.load(LoadAdapter(name))
        prompt = [draw.randrange(3, 500) for _ in range(draw.randint(1, 12))]
        engine.submit(EngineRequest(f"r{cycle}", prompt, SamplingSpec(), StopSpec(max_tokens=2), adapter=name))
        engine.step()
        engine.adapters.unload(UnloadAdapter(name))
        while engine.has_work:
            engine.step()
        if (cycle + 1) % max(1, args.cycles // 10) == 0:
            engine.check()
            marks.append(memory_mib(args.device))
            print(f"{cycle + 1:>7} cycles: {marks[-1]:.1f} MiB", flush=True)
    assert not engine.adapters.describe_all() and not engine.executor.adapters._sources  # type: ignore[attr-defined]
    engine.close()
    return int(marks[-1] - marks[-2] > args.most_mib)


if __name__ == "__main__":
    sys.exit(main())
