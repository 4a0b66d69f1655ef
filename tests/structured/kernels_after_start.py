"""Run by `test_cuda_compiled_ahead` in a process and with a Triton cache of its own: ``python kernels_after_start.py
MODEL OPTIONS`` prints, as JSON, the kernels compiled before the first request and the pairs of request and kernel
compiled after it. OPTIONS are more of the engine's, as JSON. What processes compiled for this one counts as compiled
before."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from typing import Any

from triton import knobs

from headrace import LLM, Grammar, SamplingParams

CUTS = ({}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 5, "top_p": 0.9, "min_p": 0.1})
EDITS = (
    {}, {"presence_penalty": 0.5, "repetition_penalty": 1.1}, {"logit_bias": {5: 1.0}, "bad_words": ["ab", "abcd"]},
    {"logprobs": 2, "seed": 3},
    {"frequency_penalty": 0.3, "min_tokens": 2, "allowed_token_ids": list(range(9, 200)), "logprobs": 0},
)
GRAMMAR = {"grammar": Grammar.regex("[a-f]{3}-[0-9]{2,4}"), "ignore_eos": False}
LENGTHS = (
    [5], [5] * 40, [17, 300, 3], [600], [2048], [3, 700, 1500, 40, 3000], [900] * 33, [5000],
    [5] * 16 + [5000], [5] * 32 + [5000], [5] * 64 + [5000],  # long prompts beside numbers between two captured ones
)


def kinds() -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Lengths of prompts, and how their outputs are sampled."""
    for lengths in LENGTHS:
        yield lengths, {"temperature": 0}
        yield lengths, {}
    for edit in EDITS:
        yield [6], {"temperature": 0, **edit}
        for cut in CUTS:
            yield [5, 6, 7], {**cut, **edit}
    for more in (
        {"temperature": 0}, {}, {"top_p": 0.9, "seed": 1}, {"min_p": 0.1, "frequency_penalty": 0.3, "logprobs": 3},
        {"temperature": 0, "presence_penalty": 0.3}
    ):
        yield [5], {**GRAMMAR, **more}
        yield [5] * 9, {**GRAMMAR, **more}
    yield [50, 90], {"prompt_logprobs": 2}
    yield [40, 41], {"n": 3, "temperature": 0.7}


def main(model: str, options: dict[str, Any]) -> None:
    compiled: list[str] = []
    found: list[str] = []

    def note(*, metadata: dict[str, Any], cache_hit: bool, src: Any = None, **_: Any) -> None:
        (found if cache_hit else compiled).append(
            f"{metadata['name']} {getattr(src, 'constants', '')} {getattr(src, 'attrs', '')}"
        )

    knobs.compilation.listener = note
    rng = random.Random(0)
    with LLM(model, load_format="dummy", device="cuda", seed=3, **options) as llm:
        before, after = [*compiled, *found], []
        for lengths, kind in kinds():
            compiled.clear()
            params = SamplingParams(**{"max_tokens": 4, "ignore_eos": True, **kind})
            llm.generate(
                prompt_token_ids=[[rng.randrange(3, 300) for _ in range(n)] for n in lengths], sampling_params=params
            )
            after += [(f"{lengths} {kind}", name) for name in compiled]
        num_drafts = llm.stats().speculation.num_draft_tokens
    print(json.dumps({"before": before, "after": after, "num_drafts": num_drafts}))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
