"""What routes share that have texts read: which model may be asked, submission of the texts, and their results.

Refuses: answer formats (the routes' own) and how texts become tokens (``service/client/pooling``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from starlette.requests import Request

from headrace.base.errors import RequestError
from headrace.base.messages import ModelFacts
from headrace.base.pooling import PoolingFacts, PoolingKind
from headrace.service.client.pooling import Reader, Reading
from headrace.service.tokenization import LONG_TEXT
from headrace.serving.http.generation.context import context_of
from headrace.serving.http.generation.run import Ask, Generation, Prompt, collect_generation
from headrace.serving.http.generation.sampling import draw_request_id
from headrace.serving.http.protocol.pooling import ReadFields, ReadUsage

T = TypeVar("T")
ROUTES = {"embed": "embeddings", "classify": "classes"}


@dataclass(frozen=True, slots=True)
class Results:
    """What the engine made of the readings, packed, in their order."""

    request_id: str
    packed: list[bytes]
    generation: Generation

    @property
    def usage(self) -> ReadUsage:
        """Tokens read, all readings added up."""
        prompt_tokens = self.generation.usage().prompt_tokens
        return ReadUsage(prompt_tokens, prompt_tokens)


def require_kind(facts: ModelFacts, kind: PoolingKind) -> PoolingFacts:
    """The facts of a model that makes this; raises `RequestError` for another."""
    if facts.pooling is None:
        raise RequestError(
            f"{facts.model} generates text and makes no {ROUTES[kind]}; serve a model made for that, or start with "
            f"--task {kind}",
            param="model"
        )
    if facts.pooling.kind != kind:
        raise RequestError(f"{facts.model} makes {ROUTES[facts.pooling.kind]}, not {ROUTES[kind]}", param="model")
    return facts.pooling


def split_inputs(given: object, limit: int, param: str = "input") -> list[Prompt]:
    """One input or several: a text, token ids, or a list of only one of these; raises `RequestError` for a mixture."""
    if isinstance(given, str):
        return [given]
    items = cast("list[object]", given)
    if all(isinstance(item, int) for item in items):
        return [cast("list[int]", items)]
    if not (all(isinstance(item, str) for item in items) or all(isinstance(item, list) for item in items)):
        raise RequestError(f"{param} must be a string, token ids, or a list of only one of these", param=param)
    check_amount(len(items), limit, param)
    return cast("list[Prompt]", items)


def check_amount(count: int, limit: int, param: str) -> None:
    """Raise `RequestError` for more than ``limit`` texts."""
    if count > limit:
        raise RequestError(f"{param} may hold at most {limit} texts, got {count}", param=param)


def check_dimensions(dimensions: int | None, width: int) -> None:
    """Raise `RequestError` for more numbers than an embedding has."""
    if dimensions is not None and dimensions > width:
        raise RequestError(
            f"dimensions must be at most {width}, the width of this model's embeddings; got {dimensions}",
            param="dimensions"
        )


def reader_for(request: Request, truncate: int | None) -> Reader:
    """Makes readings for the served model."""
    context = context_of(request)
    return Reader.of(context.facts(), context.client.tokenizer, truncate)


async def tokenize(make: Callable[[], T], texts: Sequence[Prompt]) -> T:
    """What ``make`` makes of the texts; on a thread when they are long."""
    if sum(len(text) for text in texts if isinstance(text, str)) > LONG_TEXT:
        return await asyncio.to_thread(make)
    return make()


async def read_all(request: Request, readings: list[Reading], fields: ReadFields, prefix: str) -> Results:
    """Submit all readings and wait for their results; when one is refused none runs."""
    request_id = fields.request_id or fields.rid or draw_request_id(prefix)
    ask = Ask(
        request_id=request_id, prompts=[r.token_ids for r in readings], params=[r.spec for r in readings],
        namespace=fields.cache_salt or "",
        priority=fields.priority or 0,
    )
    generation, outputs = await collect_generation(request, ask)
    return Results(request_id, [output.outputs[0].pooled or b"" for output in outputs], generation)
