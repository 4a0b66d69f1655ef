"""Loads and unloads adapters thousands of times and tells what stays behind: ``python -m benchmarks.adapter_cycles``.

A small random model on a CPU, or with ``--device cuda`` on a GPU. Each cycle reads an adapter of random rank from its
files, asks it for a token, and unloads it while it runs. Prints memory of the process and of the device, and open
files, every tenth of the cycles; fails when the last tenth has grown by more than ``--most-mib``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from headrace.base.adapters import AdapterConfig, LoadAdapter, UnloadAdapter
from headrace.base.config import CacheConfig, EngineConfig, ModelConfig
from headrace.base.messages import EngineRequest
from headrace.base.parallel import DeviceConfig
from headrace.base.sampling import SamplingSpec, StopSpec
from headrace.service.build import build_engine

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "silu",
    "bos_token_id": 1, "eos_token_id": 2,
}


MAX_RANK = 16
LINEARS = {
    "self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64), "mlp.gate_proj": (128, 64), "mlp.up_proj": (128, 64), "mlp.down_proj": (64, 128),
}
"""Outputs and inputs."""


def write_adapter(folder: Path, rank: int) -> Path:
    """An adapter of PEFT of that rank, with random numbers. Some are of DoRA, others replace the head."""
    folder.mkdir()
    tensors, has_magnitudes, has_head = dict[str, torch.Tensor](), rank % 4 == 1, rank % 4 == 2
    for layer in range(CONFIG["num_hidden_layers"]):
        for name, (outputs, inputs) in LINEARS.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, inputs) * 0.05
            tensors[f"{module}.lora_B.weight"] = torch.randn(outputs, rank) * 0.05
            if has_magnitudes:
                tensors[f"{module}.lora_magnitude_vector"] = torch.rand(outputs) + 0.5
    if has_head:
        tensors["base_model.model.lm_head.weight"] = torch.randn(CONFIG["vocab_size"], CONFIG["hidden_size"])
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [n.rpartition(".")[2] for n in LINEARS],
        "use_dora": has_magnitudes, "modules_to_save": ["lm_head"] if has_head else None,
    }))
    return folder


def memory_mib(device: str) -> float:
    """Of this process, most so far, and of the device, now."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return own + (torch.cuda.memory_allocated() / 2**20 if device == "cuda" else 0.0)


def count_descriptors() -> int:
    """Open files of this process."""
    return len(os.listdir("/proc/self/fd"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=10_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--most-mib", type=float, default=16.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        marks = run(Path(folder), args.cycles, args.device)
    return int(marks[-1] - marks[-2] > args.most_mib)


def run(folder: Path, cycles: int, device: str) -> list[float]:
    """MiB before the first cycle, and after each tenth of them."""
    draw = random.Random(0)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    paths = [write_adapter(folder / f"rank-{rank}", rank) for rank in range(1, MAX_RANK + 1)]
    engine = build_engine(EngineConfig(
        model=ModelConfig(model=str(folder), load_format="dummy", skip_tokenizer=True),
        cache=CacheConfig(kv_pages=64), device=DeviceConfig(device=device),
        adapters=AdapterConfig(enable_lora=True, max_loras=4, max_lora_rank=MAX_RANK, max_cpu_loras=8),
    ))
    marks = [memory_mib(device)]
    for cycle in range(cycles):
        name = f"a{draw.randrange(1000)}"
        engine.adapters.load(LoadAdapter(name, str(draw.choice(paths))))
        prompt = [draw.randrange(3, 500) for _ in range(draw.randint(1, 12))]
        engine.submit(EngineRequest(f"r{cycle}", prompt, SamplingSpec(), StopSpec(max_tokens=2), adapter=name))
        outputs = engine.step()
        engine.adapters.unload(UnloadAdapter(name))
        while engine.has_work:
            outputs += engine.step()
        assert outputs[-1].finish is not None and outputs[-1].finish.error is None, outputs[-1]
        if (cycle + 1) % max(1, cycles // 10) == 0:
            engine.check()
            marks.append(memory_mib(device))
            print(f"{cycle + 1:>7} cycles: {marks[-1]:.1f} MiB, {count_descriptors()} descriptors", flush=True)
    assert not engine.adapters.describe_all() and not engine.executor.adapters._sources  # type: ignore[attr-defined]
    engine.close()
    return marks


if __name__ == "__main__":
    sys.exit(main())
