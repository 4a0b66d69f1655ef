"""``headrace bench quality``: what a smaller format of weights, or of cached keys and values, costs on a real text.

Each window of the text is scored by both models. Perplexity is exp of the mean loss on the text's tokens. The KL
divergence between the next-token distributions is taken over the tokens in both top lists, with all others as one: a
lower bound, and close where the rest has little probability.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace.base.errors import ConfigError
from headrace.base.option import split_list
from headrace.base.sampling import SamplingParams
from headrace.base.step import TokenLogprobs
from headrace.service.client.prompts import require_tokenizer
from headrace.serving.bench.options import QualityOptions
from headrace.serving.bench.report import write_json
from headrace.serving.offline.llm import LLM

PLAIN = "none"
NUM_TOP = 50
NUM_PROMPTS, PROMPT_LEN, OUTPUT_LEN = 8, 32, 32
COLUMNS = (
    "weights", "MB", "perplexity", "KL (nats)", "KL, 99th percentile", "same first token", "tokens until greedy differs"
)


@dataclass(frozen=True)
class ModelScores:
    """Scores of one model: ``tokens`` are the logprobs at each position of the text (except the first of each
    window), ``outputs`` greedy continuations of excerpts (token ids), ``num_bytes`` the size of the weights."""

    num_bytes: int
    tokens: list[TokenLogprobs]
    outputs: list[list[int]]


@dataclass(frozen=True)
class QualityRow:
    """``kl`` in nats per token, ``kl_p99`` its 99th percentile over positions; ``agreement``: share of positions with
    the same argmax; ``same_len``: mean number of greedy tokens before the first difference, of 32."""

    weights: str
    num_bytes: int
    perplexity: float
    kl: float = 0.0
    agreement: float = 1.0
    same_len: float = float(OUTPUT_LEN)
    kl_p99: float = 0.0


def run_quality_bench(
    options: QualityOptions, console: Console | None = None, **engine_options: Any
) -> list[QualityRow]:
    """Load the model (``engine_options`` are those of `headrace.LLM`, ``model`` among them) once plain and once in each
    form, print a table and write the output file if configured. Raises `ConfigError` for a text that is too short or an
    unknown format."""
    names = split_list(options.compare)
    if not names:
        raise ConfigError("compare names no weight format; try int8,int4", param="compare")
    text = read_text(options.text)
    plain = score_model(PLAIN, text, options, {"dtype": "float32", **engine_options})
    rows = [compare(PLAIN, plain, plain)]
    rows += [compare(name, score_model(name, text, options, engine_options), plain) for name in names if name != PLAIN]
    if console:
        print_rows(rows, f"{engine_options['model']}, {len(plain.tokens)} tokens", console)
    if options.output_file:
        write_json(
            options.output_file,
            {
                "num_tokens": len(plain.tokens), "options": engine_options,
                "rows": [dataclasses.asdict(row) for row in rows]
            }
        )
    return rows


def read_text(path: str | None) -> str:
    """The file's text, by default that of the package (Carroll 1865, Lincoln 1863)."""
    if path is None:
        return files("headrace.serving.bench").joinpath("quality.txt").read_text(encoding="utf-8")
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the text {path}: {error}", param="text") from error


def score_model(weights: str, text: str, options: QualityOptions, engine_options: dict[str, Any]) -> ModelScores:
    """The scores of a model in one form. ``weights`` is ``int8``, or ``w8a8/int8`` with the dtype of cached keys and
    values, or ``stored/auto/bfloat16`` with that of activations too."""
    stated = dict(zip(("quantization", "kv_dtype", "dtype"), weights.split("/"), strict=False))
    engine = {**engine_options, **stated}
    # one token beyond: each window is a prompt with one output token
    engine.setdefault("max_model_len", max(options.window, PROMPT_LEN + OUTPUT_LEN) + 1)
    with LLM(engine.pop("model"), **engine) as llm:
        ids = require_tokenizer(llm.tokenizer).encode(text, add_special_tokens=False)[: options.max_tokens]
        windows = [ids[at : at + options.window] for at in range(0, len(ids), options.window)]
        if len(windows[0]) <= PROMPT_LEN:
            raise ConfigError(f"the text has {len(ids)} tokens; it needs more than {PROMPT_LEN}", param="text")
        # Windows are scored separately; the first token of each has no logprob.
        tokens = [token for window in windows if len(window) > 1 for token in _score(llm, window)]
        num_bytes = next((line.num_bytes for line in llm.memory_plan() if line.name == "weights"), 0)
        return ModelScores(num_bytes, tokens, _continue(llm, ids))


def _continue(llm: LLM, ids: list[int]) -> list[list[int]]:
    """Greedy continuations of excerpts spread over the text."""
    step = max(1, (len(ids) - PROMPT_LEN) // NUM_PROMPTS)
    starts = [ids[at : at + PROMPT_LEN] for at in range(0, len(ids) - PROMPT_LEN, step)][:NUM_PROMPTS]
    greedy = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True, detokenize=False)
    return [
        list(output.outputs[0].token_ids) for output in llm.generate(prompt_token_ids=starts, sampling_params=greedy)
    ]


def _score(llm: LLM, window: list[int]) -> list[TokenLogprobs]:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=NUM_TOP, ignore_eos=True, detokenize=False)
    (output,) = llm.generate(prompt_token_ids=[window], sampling_params=params)
    return [token for token in output.prompt_logprobs or () if token is not None]


def compare(weights: str, own: ModelScores, plain: ModelScores) -> QualityRow:
    """The row of a weight format: ``own`` compared with ``plain``, position by position."""
    # mean negative log-likelihood in nats per token; perplexity is its exp
    loss = -sum(token.logprob for token in own.tokens) / len(own.tokens)
    pairs = list(zip(plain.tokens, own.tokens, strict=True))
    kls = sorted(divergence(a, b) for a, b in pairs)
    return QualityRow(
        weights, own.num_bytes, math.exp(loss),
        kl=sum(kls) / len(kls), kl_p99=kls[int(0.99 * (len(kls) - 1))],
        agreement=sum(a.top_ids[0] == b.top_ids[0] for a, b in pairs) / len(pairs),
        same_len=sum(count_same(a, b) for a, b in zip(plain.outputs, own.outputs, strict=True)) / len(own.outputs),
    )


def divergence(plain: TokenLogprobs, own: TokenLogprobs) -> float:
    """KL(plain || own) in nats between two next-token distributions: over the tokens in both top lists, and one
    event for all others. Merging events can only lower KL (data processing inequality), so this is a lower bound."""
    others = dict(zip(own.top_ids, own.top_logprobs, strict=True))
    both = [(p, others[token]) for token, p in zip(plain.top_ids, plain.top_logprobs, strict=True) if token in others]
    # Floor: rounding may leave nothing or less for the rest, which has no logarithm.
    rest = [max(1.0 - sum(math.exp(pair[side]) for pair in both), 1e-9) for side in (0, 1)]
    return max(0.0, sum(math.exp(p) * (p - q) for p, q in both) + rest[0] * math.log(rest[0] / rest[1]))


def count_same(a: list[int], b: list[int]) -> int:
    """The length of the common prefix of two outputs."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def print_rows(rows: list[QualityRow], title: str, console: Console) -> None:
    """Print one row per format to ``console``."""
    table = Table(*COLUMNS, title=title)
    for row in rows:
        table.add_row(
            row.weights, f"{row.num_bytes / 1e6:.0f}", f"{row.perplexity:.3f}", f"{row.kl:.5f}",
            f"{row.kl_p99:.4f}", f"{row.agreement:.1%}", f"{row.same_len:.1f} of {OUTPUT_LEN}",
        )
    console.print(table)
