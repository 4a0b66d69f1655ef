"""Reading a checkpoint into a device's memory: ``python -m benchmarks.weights [--model llama-3.1-8b] [--folder DIR]``.

Writes a safetensors checkpoint of the model's shapes in several files, all from one buffer of random numbers, which
leaves it in the page cache. Then times reading alone (`open_weights`, tensors dropped as they come) for several numbers
of threads, and loading the model (`load_model`: parameters are made, filled and finished), each in the same process.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import struct
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.forms import read_config
from headrace.base.config import ModelConfig, engine_config
from headrace.execution.device import resolve_device, set_threads
from headrace.execution.loading import load_model
from headrace.models.checkpoint import open_weights
from headrace.models.source import resolve_source

NUM_FILES = 5
RANDOM_BYTES = 64 << 20
ITEM_BYTES = 2


def tensors_of(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a dense decoder's checkpoint, in the order such files have."""
    width, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    dim = config.get("head_dim") or width // heads
    kv_width = config.get("num_key_value_heads", heads) * dim
    yield "model.embed_tokens.weight", (config["vocab_size"], width)
    for layer in range(config["num_hidden_layers"]):
        shapes = {
            "input_layernorm": (width,), "mlp.down_proj": (width, inner), "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "post_attention_layernorm": (width,), "self_attn.k_proj": (kv_width, width),
            "self_attn.o_proj": (width, heads * dim),
            "self_attn.q_proj": (heads * dim, width), "self_attn.v_proj": (kv_width, width),
        }
        if config["model_type"] == "qwen3":
            shapes |= {"self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,)}
        for name, shape in shapes.items():
            yield f"model.layers.{layer}.{name}.weight", shape
    yield "model.norm.weight", (width,)
    if not config.get("tie_word_embeddings"):
        yield "lm_head.weight", (config["vocab_size"], width)


def write_checkpoint(model: str, folder: Path) -> int:
    """Write config and weights; returns the bytes of the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = read_config(model)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = list(tensors_of(config))
    total = sum(math.prod(shape) for _, shape in tensors) * ITEM_BYTES
    files: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(NUM_FILES)]
    passed = 0
    for name, shape in tensors:
        files[min(NUM_FILES - 1, passed * NUM_FILES // total)].append((name, shape))
        passed += math.prod(shape) * ITEM_BYTES
    values = torch.empty(RANDOM_BYTES // ITEM_BYTES, dtype=torch.bfloat16).normal_(
        0.0, 0.02, generator=torch.Generator().manual_seed(0)
    )
    data = memoryview(values.view(torch.uint8).numpy())
    paths = [folder / f"model-{i + 1:05d}-of-{NUM_FILES:05d}.safetensors" for i in range(NUM_FILES)]
    index = {name: path.name for path, held in zip(paths, files, strict=True) for name, _ in held}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )
    with ThreadPoolExecutor(NUM_FILES) as pool:
        list(pool.map(lambda pair: write_file(*pair, data), zip(paths, files, strict=True)))
    return total


def write_file(path: Path, tensors: list[tuple[str, tuple[int, ...]]], data: memoryview) -> None:
    """One safetensors file whose tensors repeat ``data``."""
    header: dict[str, Any] = {}
    size = 0
    for name, shape in tensors:
        num_bytes = math.prod(shape) * ITEM_BYTES
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [size, size + num_bytes]}
        size += num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        while size > 0:
            size -= file.write(data[: min(size, len(data))])


def read(folder: Path, device: torch.device, threads: int) -> float:
    """Seconds to bring all tensors to the device, with so many threads."""
    source = resolve_source(ModelConfig(model=str(folder)))
    torch.set_num_threads(threads)
    began = time.perf_counter()
    for _, tensor in open_weights(source, device=device):
        del tensor
    wait_for(device)
    return time.perf_counter() - began


def load(folder: Path, device: torch.device) -> float:
    """Seconds of `load_model`."""
    set_threads(None)
    began = time.perf_counter()
    loaded = load_model(
        engine_config(model=str(folder), dtype="bfloat16", device=str(device)), device, lambda stage, fraction: None
    )
    wait_for(device)
    seconds = time.perf_counter() - began
    first = next(loaded.model.parameters())
    assert torch.isfinite(first).all(), "the weights are numbers"
    return seconds


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def choose_folder(num_bytes: int) -> Path:
    """Memory if there is room for files in it, else the usual place."""
    memory = Path("/dev/shm")
    has_room = memory.is_dir() and shutil.disk_usage(memory).free > 1.2 * num_bytes
    return Path(tempfile.mkdtemp(prefix="weights-", dir=memory if has_room else None))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", help="a folder under benchmarks/models")
    parser.add_argument(
        "--folder", type=Path,
        help="where the checkpoint is, or is written if there is none; kept; default: a temporary one"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 4, 8, 16])
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    device = resolve_device(args.device)
    config = read_config(args.model)
    total = sum(math.prod(shape) for _, shape in tensors_of(config)) * ITEM_BYTES
    folder = args.folder or choose_folder(total)
    try:
        if not (folder / "config.json").exists():
            began = time.perf_counter()
            write_checkpoint(args.model, folder)
            print(f"{total / 1e9:.1f} GB written to {folder} in {time.perf_counter() - began:.1f} s", flush=True)
        if device.type == "cuda":
            torch.zeros(1, device=device)
        for threads in args.threads:
            seconds = [read(folder, device, threads) for _ in range(args.repeats)]
            print(
                f"read, {threads:2d} threads: " + ", ".join(f"{s:.2f} s ({total / s / 1e9:.1f} GB/s)" for s in seconds),
                flush=True
            )
        seconds = [load(folder, device) for _ in range(args.repeats)]
        print("load_model: " + ", ".join(f"{s:.2f} s ({total / s / 1e9:.1f} GB/s)" for s in seconds), flush=True)
    finally:
        if args.folder is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
