"""A GGUF file of random weights of Llama-3.1-8B's shape, typed as Q4_K_M: ``python -m benchmarks.gguf_model FILE``.

Q6_K are the head, and in some half of the layers the values' and the MLP's last product; Q4_K is the rest.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np

LAYERS, WIDTH, INNER, KV_WIDTH, VOCABULARY = 32, 4096, 14336, 1024, 128256
BYTES = {"Q4_K": 144, "Q6_K": 210}
"""Of a block of 256 weights."""


def draw_blocks(chance: np.random.Generator, kind: str, count: int) -> np.ndarray:
    """Random codes under fixed scales that give weights of some 0.02, [count, bytes]."""
    blocks = chance.integers(0, 256, (count, BYTES[kind]), dtype=np.uint8)
    if kind == "Q4_K":  # d and dmin first
        blocks[:, :4] = np.array([8e-5, 6e-4], dtype=np.float16).view(np.uint8)
    else:  # d last
        blocks[:, 208:] = np.array([1e-5], dtype=np.float16).view(np.uint8)
    return blocks


def has_more_bits(layer: int) -> bool:
    """Whether a layer's values and last product are Q6_K."""
    return layer < LAYERS // 8 or layer >= 7 * LAYERS // 8 or (layer - LAYERS // 8) % 3 == 2


def list_matrices() -> dict[str, tuple[str, int, int]]:
    """Type, outputs and inputs by name."""
    found = {"token_embd": ("Q4_K", VOCABULARY, WIDTH), "output": ("Q6_K", VOCABULARY, WIDTH)}
    for layer in range(LAYERS):
        more = "Q6_K" if has_more_bits(layer) else "Q4_K"
        found |= {
            f"blk.{layer}.{name}": shape for name, shape in {
                "attn_q": ("Q4_K", WIDTH, WIDTH), "attn_k": ("Q4_K", KV_WIDTH, WIDTH),
                "attn_v": (more, KV_WIDTH, WIDTH), "attn_output": ("Q4_K", WIDTH, WIDTH),
                "ffn_gate": ("Q4_K", INNER, WIDTH), "ffn_up": ("Q4_K", INNER, WIDTH), "ffn_down": (more, WIDTH, INNER),
            }.items()
        }
    return found


def write_model(path: Path) -> None:
    """Write the file, 4.9 GB."""
    chance, writer = np.random.default_rng(1), gguf.GGUFWriter(path, "llama")
    for name, value in {
        "block_count": LAYERS, "context_length": 131072, "embedding_length": WIDTH, "feed_forward_length": INNER,
        "attention.head_count": 32, "attention.head_count_kv": 8, "vocab_size": VOCABULARY,
    }.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 500000.0)
    matrices = list_matrices()
    # all matrices repeat the same random blocks
    source = {kind: draw_blocks(chance, kind, INNER * WIDTH // 256) for kind in BYTES}
    for name, (kind, outputs, inputs) in matrices.items():
        count = outputs * inputs // 256
        blocks = np.resize(source[kind], (count, BYTES[kind])).reshape(outputs, -1)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType[kind])
    for name in ("output", *(f"blk.{layer}.{norm}" for layer in range(LAYERS) for norm in ("attn", "ffn"))):
        writer.add_tensor(f"{name}_norm.weight", np.ones(WIDTH, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    write_model(parser.parse_args().file)
