"""`GrammarStore`: grammars by their source, compiled on threads of its own and kept for the next request.

Refuses: requests and rows.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from headrace.base.errors import ConfigError, ModelError, UnsupportedFeature
from headrace.base.grammar import Grammar, Vocabulary
from headrace.execution.structured.jumps import JumpFinder
from headrace.execution.structured.library import (
    CompiledGrammar,
    GrammarLibrary,
    LeftToOthers,
    choose_library,
)

MAX_KEPT = 256
NUM_WORKERS = 2

Choose = Callable[..., tuple[str, Callable[..., GrammarLibrary]]]


class GrammarStore:
    """``read_vocabulary`` reads the tokenizer; it is called on a worker, when the first grammar comes."""

    def __init__(
        self, read_vocabulary: Callable[[], Vocabulary], vocab_size: int, eos_ids: Sequence[int], *,
        choose: Choose = choose_library,
        max_kept: int = MAX_KEPT,
    ):
        self.eos_ids = frozenset(eos_ids)
        self._read_vocabulary, self._vocab_size, self._choose, self._max_kept = (
            read_vocabulary, vocab_size, choose, max_kept
        )
        self._eos_list = list(eos_ids)
        self._workers = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="grammar")
        self._futures: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()
        self._lock = threading.Lock()  # guards what follows
        self._vocabulary: Vocabulary | None = None
        self._libraries: dict[str, GrammarLibrary] = {}
        self.jumps: JumpFinder | None = None

    def prepare(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """The grammar, now or later; the same future for equal ones. Called from one thread only."""
        future = self._futures.get(grammar)
        if future is None:
            future = self._futures[grammar] = self._workers.submit(self._compile, grammar)
        self._futures.move_to_end(grammar)
        while len(self._futures) > self._max_kept and next(iter(self._futures.values())).done():
            self._futures.popitem(last=False)
        return future

    def find(self, grammar: Grammar) -> CompiledGrammar:
        """A grammar whose future was done. One that was dropped since (its request was retracted, and many others came
        meanwhile) is compiled again, and the caller waits."""
        return self.prepare(grammar).result()

    def close(self) -> None:
        """Compile nothing more."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        tried: list[str] = []
        while True:
            name, factory = self._choose(grammar, *tried)
            with self._lock:
                library = self._libraries.get(name) or self._open(name, factory)
            try:
                return library.compile(grammar)
            except LeftToOthers:
                tried.append(name)

    def _open(self, name: str, factory: Callable[..., GrammarLibrary]) -> GrammarLibrary:
        if not self._eos_list:
            raise UnsupportedFeature(
                "structured outputs need an end-of-text token, which this model does not state", param="grammar"
            )
        if self._vocabulary is None:
            try:
                self._vocabulary = self._read_vocabulary()
            except (ConfigError, ModelError) as error:
                raise UnsupportedFeature(
                    f"structured outputs need the model's tokenizer: {error.message}", param="grammar"
                ) from error
            if self._vocabulary.encode is not None:
                self.jumps = JumpFinder(self._vocabulary)
        self._libraries[name] = library = factory(self._vocabulary, self._vocab_size, self._eos_list)
        return library
