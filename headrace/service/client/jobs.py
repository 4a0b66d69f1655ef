"""`Job`: one prompt of an offline batch, and `JobMaker`, which tokenizes and checks it. Torch-free."""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

from headrace.base.config import EngineConfig
from headrace.base.messages import EngineRequest, ModelFacts
from headrace.base.pooling import PoolingSpec
from headrace.base.sampling import SamplingParams
from headrace.service.client.assembler import OutputAssembler, PooledAssembler
from headrace.service.client.media import MediaPrompt, with_media
from headrace.service.client.outputs import Collector
from headrace.service.client.prompts import RequestTags, encode_prompt, open_request, with_seed
from headrace.service.tokenization import Tokenizer
from headrace.service.tokenization.loading import open_tokenizer


@dataclass(slots=True)
class Job:
    """One prompt to run: its checked engine requests, and the assembler and collector of their outputs."""

    requests: list[EngineRequest]
    assembler: OutputAssembler | PooledAssembler
    collector: Collector


class JobMaker:
    """Makes the jobs of one client: their ids, seeds and token ids."""

    def __init__(self, config: EngineConfig):
        self._config = config
        self._seeds = random.Random(config.model.seed)
        self._ids = itertools.count()
        self._tokenizer: Tokenizer | None = None
        self._has_tried_tokenizer = False

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, loaded on first use; None when it has none."""
        if not self._has_tried_tokenizer:
            self._tokenizer = open_tokenizer(self._config.model, is_optional=True)
            self._has_tried_tokenizer = True
        return self._tokenizer

    def make(
        self, prompt: str | list[int] | MediaPrompt, params: SamplingParams | PoolingSpec, facts: ModelFacts, *,
        add_special_tokens: bool = True, priority: int = 0, adapter: str = ""
    ) -> Job:
        """Tokenize and check one prompt; raises `RequestError` naming what is wrong. ``adapter``: the name of a loaded
        one."""
        media, given = [], None
        if isinstance(prompt, MediaPrompt):
            media, given, prompt = prompt.items, prompt.text, prompt.token_ids
        text = prompt if isinstance(prompt, str) else None
        makes_text = isinstance(params, SamplingParams) and params.detokenize
        tokenizer = self.tokenizer if text is not None or makes_text else None
        ids = encode_prompt(prompt, tokenizer, add_special_tokens=add_special_tokens, most=facts.max_model_len)
        if isinstance(params, SamplingParams):
            params = with_seed(params, self._seeds)
        request_id = str(next(self._ids))
        requests, assembler = open_request(
            request_id, ids, params, facts=facts, tokenizer=tokenizer, priority=priority
        )
        requests = RequestTags(adapter=adapter).mark(with_media(requests, media, facts))
        return Job(requests, assembler, Collector(request_id, text or given, ids, len(requests)))


@contextlib.contextmanager
def defer_interrupt() -> Iterator[threading.Event]:
    """Within, the first Ctrl-C sets the yielded event, and the second one raises `KeyboardInterrupt`; the block then
    ends with `KeyboardInterrupt` if the event was set. An exception raised at any point inside a step would leave the
    engine in an unknown state. Does nothing off the main thread (signal handlers cannot be set there) or when the
    program has its own SIGINT handler."""
    noticed = threading.Event()
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield noticed
        return

    def note(_: int, __: FrameType | None) -> None:
        if noticed.is_set():
            raise KeyboardInterrupt
        noticed.set()

    signal.signal(signal.SIGINT, note)
    try:
        yield noticed
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if noticed.is_set():
        raise KeyboardInterrupt
