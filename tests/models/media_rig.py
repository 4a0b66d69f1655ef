"""Tiny models for text and images: transformers' as oracle, and the engine over the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from headrace.base.config import engine_config
from headrace.base.media import MediaArray, MediaItem, MediaPlace, digest_of
from headrace.base.messages import EngineRequest, RequestOutput
from headrace.base.sampling import ALL_LOGPROBS, SamplingSpec, StopSpec
from headrace.base.step import StepPlan
from headrace.scheduling import encoding
from headrace.service.build import build_engine
from headrace.service.engine import Engine

VOCAB = 120
IMAGE_ID, VIDEO_ID, START_ID, END_ID = 100, 101, 102, 103


def save_model(model: transformers.PreTrainedModel, folder: Path) -> Path:
    """Perturb norms and biases, which are constants in a fresh model, and write a checkpoint."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.dim():
                continue  # a scale of losses
            if "norm" in name or "ln_q" in name or name.endswith("bias"):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    model.eval().save_pretrained(folder)
    return folder


def start_engine(folder: Path, **options: Any) -> Engine:
    """In this process, on the CPU in float32."""
    options = {"max_model_len": 512, "page_size": 4, "kv_pages": 200, "max_running_requests": 8, **options}
    return build_engine(engine_config(
        model=str(folder), device="cpu", dtype="float32", skip_tokenizer=True, attention_backend="reference", **options
    ))


@dataclass
class Prompt:
    """Token ids with placeholders, and what stands there."""

    ids: list[int] = field(default_factory=list)
    items: list[MediaItem] = field(default_factory=list)

    def text(self, *ids: int) -> Prompt:
        """Add tokens."""
        self.ids += ids
        return self

    def add(
        self, kind: str, values: np.ndarray, count: int, *, grid: Sequence[int] = (), name: str = "pixel_values",
        token: int = IMAGE_ID, runs: Sequence[Sequence[int]] | None = None, **numbers: float
    ) -> Prompt:
        """Add an item of ``count`` placeholders. ``runs``: token ids of its whole format, placeholders among them."""
        start = len(self.ids)
        ids = [token] * count if runs is None else [i for run in runs for i in run]
        self.ids += ids
        found: list[tuple[int, int]] = []
        for at, one in enumerate(ids, start):
            if one == token and found and sum(found[-1]) == at:
                found[-1] = (found[-1][0], found[-1][1] + 1)
            elif one == token:
                found.append((at, 1))
        digest = digest_of(kind, "", [values.tobytes(), str(grid).encode()])
        place = MediaPlace(kind, digest, found, tuple(grid), numbers)
        self.items.append(MediaItem(place, {name: MediaArray.of(values)}))
        return self


def to_tensor(array: MediaArray) -> torch.Tensor:
    """The array again."""
    return torch.from_numpy(np.frombuffer(array.data, dtype=array.dtype).reshape(array.shape).copy())


def run(
    engine: Engine, prompts: Sequence[Prompt], num_tokens: int = 8, *, logprobs: bool = True, adapter: str = ""
) -> list[list[RequestOutput]]:
    """Outputs of greedy requests that come together; the logprobs of all tokens with each."""
    spec = SamplingSpec(num_logprobs=ALL_LOGPROBS) if logprobs else SamplingSpec()
    found: dict[str, list[RequestOutput]] = {}
    for i, prompt in enumerate(prompts):
        engine.submit(EngineRequest(
            f"r{i}", list(prompt.ids), spec, StopSpec(num_tokens), media=list(prompt.items), adapter=adapter
        ))
        found[f"r{i}"] = []
    while engine.has_work:
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
        engine.check()
    return [found[f"r{i}"] for i in range(len(prompts))]


def run_beside(engine: Engine, stream: Prompt, prompts: Sequence[Prompt]) -> list[list[RequestOutput]]:
    """`run` beside a request that decodes, so that media are encoded in pieces: one layer a step."""
    found, pieces = watch_beside(engine, stream, prompts)
    assert set(pieces) == {0, 1}
    return found


def watch_beside(
    engine: Engine, stream: Prompt, prompts: Sequence[Prompt]
) -> tuple[list[list[RequestOutput]], list[int]]:
    """`run` beside a request that decodes, and how many pieces of media each step encoded."""
    pieces, execute = [], engine.executor.execute

    def watch(plan: StepPlan) -> Any:
        pieces.append(plan.media.num_pieces)
        return execute(plan)

    engine.submit(EngineRequest(
        "stream", list(stream.ids), SamplingSpec(), StopSpec(30), media=list(stream.items)
    ))
    while not any(output.token_ids for output in engine.step()):
        pass
    before, encoding.BESIDE_TOKENS = encoding.BESIDE_TOKENS, 1
    try:
        engine.executor.execute = watch
        found = run(engine, prompts)
    finally:
        encoding.BESIDE_TOKENS = before
    media = engine.executor.facts.media
    assert media is not None and media.num_pieces > 1
    assert sum(pieces) % media.num_pieces == 0
    return found, pieces


def run_short_of_pages(
    folder: Path, prompts: Sequence[Prompt], num_tokens: int = 24, **options: Any
) -> list[list[RequestOutput]]:
    """`run` where pages suffice for all prompts and for few outputs, so that requests are retracted. The prompts have
    no beginnings in common."""
    pages = [-(-len(prompt.ids) // 4) + 1 for prompt in prompts]
    longest = 4 * max(pages) + num_tokens
    engine = start_engine(folder, **{
        "kv_pages": max(sum(pages), longest // 4 + 2), "max_model_len": longest, "max_step_tokens": 64, **options
    })
    engine._scheduler._admission.forecast.share = 0.0  # too many are let in
    outputs = run(engine, prompts, num_tokens, logprobs=False)
    assert engine.stats().retracted_total > 0
    engine.close()
    return outputs


def tokens_of(outputs: Sequence[RequestOutput]) -> list[int]:
    """The request's output; fails with its error."""
    assert outputs[-1].finish is not None and outputs[-1].finish.error is None, outputs[-1].finish
    return [token for output in outputs for token in output.token_ids]


def logprobs_of(outputs: Sequence[RequestOutput]) -> torch.Tensor:
    """[tokens, V] by token id."""
    entries = [entry for output in outputs for entry in output.logprobs or []]
    rows = torch.empty(len(entries), VOCAB)
    for row, entry in zip(rows, entries, strict=True):
        row[torch.tensor(entry.top_ids)] = torch.tensor(entry.top_logprobs)
    return rows


def ask_oracle(
    model: transformers.PreTrainedModel, prompt: Prompt, num_tokens: int = 8, **inputs: Any
) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens and their logprobs [tokens, V], each by a whole forward pass."""
    ids, tokens, rows = list(prompt.ids), [], []
    with torch.no_grad():
        found = model.generate(
            torch.tensor([ids]), max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False,
            output_logits=True, return_dict_in_generate=True, pad_token_id=0, eos_token_id=None, **inputs
        )
    tokens = found.sequences[0, len(ids) :].tolist()
    rows = torch.cat(found.logits).float().log_softmax(-1)
    return tokens, rows


def compare(
    outputs: Sequence[RequestOutput], expected: tuple[list[int], torch.Tensor], *, atol: float = 2e-4
) -> None:
    """The same tokens and logprobs."""
    assert tokens_of(outputs) == expected[0]
    torch.testing.assert_close(logprobs_of(outputs), expected[1], atol=atol, rtol=1e-3)
