"""Random engines and random loads on them: all features together, made from a seed, and each request alone in a plain
engine as the oracle."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from headrace.base.adapters import LoadAdapter
from headrace.base.admin import AcquireMemory, AdminCall, ReleaseMemory, ReplaceWeights
from headrace.base.config import engine_config
from headrace.base.grammar import Grammar
from headrace.base.messages import Call, EngineRequest, Finish, RequestOutput
from headrace.base.pooling import PoolingSpec, unpack_floats
from headrace.base.sampling import (
    ALL_LOGPROBS,
    Exclusion,
    LogitRules,
    Penalties,
    SamplingSpec,
    StopSpec,
    ThinkingLimit,
)
from headrace.base.step import TokenLogprobs
from headrace.service.build import build_engine
from headrace.service.control import Control
from headrace.service.engine import Engine

EOS, MAX_MODEL_LEN, LONGEST_PROMPT = 2, 96, 66
TIE, ROUNDING = 2e-4, 2e-3
"""Differences of logits, and of logprobs, that the order of sums may make."""
GRAMMARS = (
    Grammar.json_schema({
        "type": "object", "properties": {"name": {"type": "string", "maxLength": 5}, "n": {"type": "integer"}},
        "required": ["name", "n"], "additionalProperties": False,
    }),
    Grammar.json_object(), Grammar.regex(r"[a-f]{3,9}(\.[0-9]{2})?"), Grammar.choice(["red", "green", "greenish"]),
)


class Boom(RuntimeError):
    """What a broken kernel raises."""


@dataclass(frozen=True)
class Model:
    """A checkpoint and what it can be served with. ``drafters``: speculative_config; ``adapters``: folders."""

    folder: Path
    vocab: int
    drafters: list[dict[str, Any]] = field(default_factory=list)
    adapters: list[Path] = field(default_factory=list)
    options: dict[str, list[Any]] = field(default_factory=dict)


def draw_options(draw: random.Random, model: Model, disk: Path) -> dict[str, Any]:
    """Small caches and steps, and any of the features."""
    page_size = draw.choice((1, 2, 4, 8, 16))
    longest = -(-MAX_MODEL_LEN // page_size)
    options: dict[str, Any] = {
        "page_size": page_size, "kv_pages": longest + 2 + draw.choice((0, 1, longest // 2, 3 * longest)),
        "max_step_tokens": draw.choice((8, 9, 16, 64)), "max_running_requests": draw.choice((1, 2, 5, 64)),
        "overlap_depth": draw.choice((1, 2, 2)), "prefix_cache": draw.random() < 0.8,
        "policy": draw.choice(("fcfs", "longest-prefix", "priority")), "starvation_steps": draw.choice((1, 4, 256)),
        "share_prefix_in_batch": draw.random() < 0.7,
    }
    if options["prefix_cache"] and draw.random() < 0.5:
        options["host_cache_gb"] = draw.choice((0.0005, 0.02))
        if draw.random() < 0.5:
            options |= {"disk_cache": str(disk), "disk_cache_gb": draw.choice((0.001, 0.1))}
    if draw.random() < 0.6:
        drafter = draw.choice([{"method": "ngram", "prompt_lookup_min": 1}, {"method": "suffix"}, *model.drafters * 2])
        options["speculative_config"] = drafter | {"num_speculative_tokens": draw.choice((1, 2, 4, 7))}
    if model.adapters:
        options |= {"enable_lora": True, "max_loras": draw.choice((1, 2)), "max_cpu_loras": draw.choice((1, 4))}
        options["lora_modules"] = " ".join(f"a{i}={path}" for i, path in enumerate(model.adapters[:-1]))
    for name, values in model.options.items():
        if draw.random() < 0.5:
            options[name] = draw.choice(values)
    return options


def draw_sampling(draw: random.Random, vocab: int, most_tokens: int) -> tuple[SamplingSpec, StopSpec]:
    """Anything that acts on sampling and stopping, together."""
    held = [EOS, *draw.sample(range(3, vocab), draw.choice((0, 3, 40)))]
    min_tokens = min(draw.choice((0, 0, 2, 7)), most_tokens)
    grammar = draw.choice(GRAMMARS) if draw.random() < 0.2 else None
    rules = draw.choice((
        {}, {}, {"bias": {draw.randrange(3, vocab): draw.choice((3.0, -100.0)) for _ in range(3)}},
        {"bad_words": [[draw.randrange(3, vocab) for _ in range(1 + i % 2)] for i in range(12)]},
        {} if grammar else {"allowed_ids": sorted(draw.sample(range(2, vocab), 25))},
        {} if grammar else {"thinking": ThinkingLimit(draw.choice((0, 3)), draw.randrange(3, vocab))},
    ))
    penalties = Penalties(draw.choice((1.0, 1.3)), 0.4, 0.2, xtc=draw.choice((None, Exclusion(0.5, 0.05))))
    sampling = SamplingSpec(
        temperature=draw.choice((0.0, 0.0, 0.7, 1.2)), top_k=draw.choice((0, 0, 40)), top_p=draw.choice((1.0, 0.9)),
        min_p=draw.choice((0.0, 0.03)), seed=draw.randrange(100), num_logprobs=draw.choice((-1, -1, 0, ALL_LOGPROBS)),
        num_prompt_logprobs=draw.choice((-1, -1, -1, 2)), penalties=penalties if draw.random() < 0.3 else None,
        rules=LogitRules(min_tokens=min_tokens, held_ids=held, **rules) if rules or min_tokens else None,
        grammar=grammar,
    )
    most_tokens = max(min_tokens, min(draw.choice((1, 3, 10, 30)), most_tokens))
    return sampling, StopSpec(most_tokens, min_tokens, draw.choice(([EOS], [])), held[1:])


@dataclass
class Answer:
    """What came of a request. ``adapter``: the folder of its adapter."""

    request: EngineRequest
    adapter: Path | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    pooled: bytes = b""
    finish: Finish | None = None

    def take(self, output: RequestOutput) -> None:
        assert self.finish is None, "an output behind the last"
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        self.prompt_logprobs += output.prompt_logprobs or []
        self.pooled, self.finish = output.pooled or self.pooled, output.finish


class Load:
    """Submits, aborts, breaks and administers at random."""

    def __init__(self, seed: int, model: Model, disk: Path):
        self.draw, self.model = random.Random(seed), model
        self.options = draw_options(self.draw, model, disk)
        self.engine = open_engine(model.folder, **self.options)
        if self.draw.random() < 0.5:
            self.engine._scheduler._admission.forecast.share = 0.0  # too many are let in, so some are retracted
        self._control = Control(self.engine, lambda: None)
        self._adapters = {f"a{i}": path for i, path in enumerate(model.adapters[:-1])}
        self.answers: dict[str, Answer] = {}
        self._stems = [[self.draw.randrange(3, model.vocab) for _ in range(LONGEST_PROMPT)] for _ in range(2)]
        self._stems.append([7, 8, 9, 10, 11] * 13)
        self._breaks = 0.05 if self.draw.random() < 0.4 else 0.0
        self._is_breaking = False
        served = self.engine.executor._runner._model
        self._forward, served.forward = served.forward, self._forward_or_break

    def _forward_or_break(self, batch: Any) -> Any:
        if self._is_breaking:
            self._is_breaking = False
            raise self.draw.choice((Boom(), torch.OutOfMemoryError("none left")))
        return self._forward(batch)

    def run(self, num_actions: int) -> None:
        """All of it, to the end; nothing is left behind."""
        for _ in range(num_actions):
            self.act()
            self.step()
        while self.engine.has_work:
            self.step()
        assert all(answer.finish is not None for answer in self.answers.values())
        deadline = time.monotonic() + 10.0
        while not self.engine.reset_prefix_cache():  # pages are on their way to other tiers
            self.engine.step()
            assert time.monotonic() < deadline, "cached pages are in use by nobody"
        stats = self.engine.stats()
        assert stats.num_used_pages == stats.num_evictable_pages == stats.num_running == stats.num_queued == 0
        assert not stats.adapters.running and not stats.adapters.waiting

    def step(self) -> None:
        for output in self.engine.step():
            self.answers[output.request_id].take(output)
        self.engine.check()

    def act(self) -> None:
        draw, live = self.draw, [name for name, answer in self.answers.items() if answer.finish is None]
        for _ in range(draw.choice((0, 1, 1, 3))):
            self.submit()
        if live and draw.random() < 0.12:
            self.engine.abort(draw.choice(live))
        self._is_breaking |= draw.random() < self._breaks
        if draw.random() < 0.03:
            self.engine.reset_prefix_cache()
        if draw.random() < 0.03:
            self._call(ReplaceWeights(str(self.model.folder)))
        if not self.engine.has_work:
            self._call(ReleaseMemory(["kv_cache", "weights"]))
            self._call(AcquireMemory(["weights", "kv_cache"]))
        if self._adapters and draw.random() < 0.08:
            name, path = draw.choice(list(self._adapters)), draw.choice(self.model.adapters)
            if self._call(LoadAdapter(name, str(path), replaces=True)):
                self._adapters[name] = path

    def _call(self, call: AdminCall) -> bool:
        """Whether it succeeded; a load may not, where all of an adapter's memory is in use."""
        reply = self._control.answer(Call(1, call.method, msgspec.to_builtins(call)))
        while reply is None:
            self.step()
            reply = next(iter(self._control.poll()), None)
        assert reply.error is None or isinstance(call, LoadAdapter), reply.error
        return reply.error is None

    def submit(self) -> None:
        draw, model = self.draw, self.model
        prompt = draw.choice(self._stems)[: draw.choice((0, 16, 32, LONGEST_PROMPT, draw.randrange(LONGEST_PROMPT)))]
        if self.answers and draw.random() < 0.15:  # a conversation that goes on
            earlier = draw.choice(list(self.answers.values()))
            prompt = [*earlier.request.prompt_token_ids, *earlier.token_ids][: MAX_MODEL_LEN - 20]
        prompt = prompt + [draw.randrange(3, model.vocab) for _ in range(draw.choice((1, 3, 12)))]
        adapter = draw.choice(("", *self._adapters))
        pooling = PoolingSpec(label_ids=[5, 9, 30]) if draw.random() < 0.08 else None
        for _ in range(draw.choice((1, 1, 3)) if pooling is None else 1):
            sampling, stop = draw_sampling(draw, model.vocab, MAX_MODEL_LEN - len(prompt))
            request = EngineRequest(
                f"r{len(self.answers)}", prompt, sampling if pooling is None else SamplingSpec(), stop,
                draw.choice(("", "salt")), draw.randrange(3), pooling=pooling, adapter=adapter,
                origin=draw.choice(((), ("a",), ("b", "1"))),
            )
            self.answers[request.request_id] = Answer(request, self._adapters.get(adapter))
            self.engine.submit(request)


def open_engine(folder: Path, **options: Any) -> Engine:
    return build_engine(engine_config(
        model=str(folder), device="cpu", dtype="float32", threads=1, max_model_len=MAX_MODEL_LEN, **options
    ))


class Oracle:
    """Plain engines, one for each adapter, that compute one request at a time, each prompt whole."""

    def __init__(self, model: Model):
        self._model, self._engines = model, dict[Path | None, Engine]()

    def check(self, answer: Answer) -> None:
        """Fails where a request alone is told something else."""
        assert answer.finish is not None
        error, alone = answer.finish.error, self._ask(answer)
        has_ended = answer.finish.reason == "abort" or (error is not None and error.kind == "step_failed")
        length = len(answer.token_ids) if has_ended else None
        expected, said = alone.token_ids[:length], answer.token_ids
        if said != expected:
            pairs = zip(said, alone.token_ids, strict=False)
            place = next((i for i, pair in enumerate(pairs) if pair[0] != pair[1]), len(said))
            assert place < len(said) and self._is_tie(answer, place), (answer, alone)
            return
        assert has_ended or answer.finish == alone.finish, (answer, alone)
        assert len(answer.logprobs) == (len(said) if answer.request.sampling.num_logprobs >= 0 else 0)
        compare(answer.logprobs, alone.logprobs[:length])
        if not has_ended:
            assert unpack_floats(answer.pooled) == [] or differ(answer.pooled, alone.pooled) < ROUNDING
        if not has_ended or answer.prompt_logprobs:
            compare(answer.prompt_logprobs, alone.prompt_logprobs[: len(answer.prompt_logprobs) if has_ended else None])

    def _engine(self, adapter: Path | None) -> Engine:
        if adapter not in self._engines:
            own = {} if adapter is None else {"enable_lora": True, "lora_modules": f"a={adapter}"}
            self._engines[adapter] = open_engine(
                self._model.folder, page_size=16, kv_pages=20, prefix_cache=False, overlap_depth=1,
                max_running_requests=1, **own
            )
        return self._engines[adapter]

    def _ask(self, answer: Answer) -> Answer:
        engine = self._engine(answer.adapter)
        name = "a" if answer.adapter is not None else ""
        alone = Answer(msgspec.structs.replace(answer.request, namespace="", adapter=name))
        engine.submit(alone.request)
        while engine.has_work:
            for output in engine.step():
                alone.take(output)
        return alone

    def _is_tie(self, answer: Answer, place: int) -> bool:
        """Whether logits changed by at most `TIE` may lead to the token at a place, and to those before it."""
        sampler = self._engine(answer.adapter).executor._runner._sampler
        sample, generator, token = sampler.sample, torch.Generator().manual_seed(1), answer.token_ids[place]
        try:
            for trial in range(40):
                def shifted(logits: torch.Tensor, *rest: Any, trial: int = trial) -> Any:
                    ids = torch.arange(logits.shape[1])
                    favoured = (ids == token, ids <= token, ids >= token, ids < token, ids > token)
                    at_random = torch.rand(len(ids), generator=generator) < 0.5
                    wanted = favoured[trial] if trial < len(favoured) else at_random
                    return sample(logits + TIE * torch.where(wanted | (ids == token), 1.0, -1.0), *rest)

                sampler.sample = shifted
                if self._ask(answer).token_ids[: place + 1] == answer.token_ids[: place + 1]:
                    return True
            return False
        finally:
            sampler.sample = sample

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()


def differ(one: bytes, other: bytes) -> float:
    """The largest difference of two pooled results."""
    return max(abs(a - b) for a, b in zip(unpack_floats(one), unpack_floats(other), strict=True))


def compare(found: list[TokenLogprobs], expected: list[TokenLogprobs]) -> None:
    """The same tokens with the same logprobs. Which are the best may differ where two are equal."""
    assert [each and each.token_id for each in found] == [each and each.token_id for each in expected]
    for mine, its in zip(found, expected, strict=True):
        for ours, theirs in zip([mine.logprob, *mine.top_logprobs], [its.logprob, *its.top_logprobs], strict=True):
            assert abs(ours - theirs) < ROUNDING, (mine, its)
