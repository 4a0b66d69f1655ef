"""What a grammar library must offer, the registry of libraries, and `GrammarStore`: compiled grammars by their source.

Refuses: requests, rows, bitmasks of a step.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from typing import Protocol

import numpy as np

from headrace.base.errors import ConfigError, ModelError, PluginError, UnsupportedFeature
from headrace.base.grammar import Grammar, Vocabulary
from headrace.base.registry import Registry
from headrace.execution.structured.forced_tokens import ForcedTokens
from headrace.execution.structured.lazy_dfa import LazyDfa

INSTALL = "pip install llguidance, which headrace depends on"
MAX_COMPILED = 256
NUM_WORKERS = 2


class Matcher(Protocol):
    """The state of one output in a grammar. Methods never raise for a token that is not allowed: see ``error``."""

    def accept(self, token_ids: Sequence[int]) -> None:
        """Advance by tokens. A token that the grammar does not allow leaves the matcher with an ``error``."""

    def copy(self) -> Matcher:
        """Another one in the same state, which advances by itself."""

    def forced_bytes(self) -> bytes:
        """The text that must come next; empty where there is a choice, or where the output may end."""

    @property
    def error(self) -> str | None:
        """Why the matcher cannot go on: a token that was not allowed, or the library's limit on work per token."""


class CompiledGrammar(Protocol):
    """A grammar compiled for one vocabulary, shared by any number of outputs. ``library`` fills the bitmasks of its
    matchers. ``states``: of its outputs, which share bitmasks by them; None for a grammar that no automaton reads."""

    library: GrammarLibrary
    states: LazyDfa | None

    def start(self) -> Matcher:
        """A matcher at the beginning of an output."""


class GrammarLibrary(Protocol):
    """Made once per vocabulary. `compile` is called on worker threads, also while `fill` runs on the engine's thread,
    and must not hold the interpreter lock for long."""

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raises `RequestError` when the grammar is wrong, asks for what the library does not enforce exactly, allows
        no output, or is too large. Takes bounded time and memory."""

    def fill(self, matchers: Sequence[Matcher], bitmasks: np.ndarray) -> None:
        """Write the tokens that matcher i allows next into ``bitmasks[i]``, [len(matchers), ceil(V / 32)] int32, in
        the layout of `headrace.kernels.sample`. End-of-text is allowed only where the output may end."""


class LibraryFactory(Protocol):
    """A registry entry: makes the library for a vocabulary of ``vocab_size`` ids, of which ``eos_ids`` end the text."""

    def __call__(self, vocabulary: Vocabulary, vocab_size: int, eos_ids: Sequence[int]) -> GrammarLibrary: ...


GRAMMAR_LIBRARIES: Registry[LibraryFactory] = Registry("grammar library")
"""Queried with a `Grammar`: an entry supports the kinds that it enforces exactly or refuses."""

GRAMMAR_LIBRARIES.add(
    "llguidance", "headrace.execution.structured.llguidance:GuidanceLibrary",
    supports=lambda _: None if find_spec("llguidance") else "the package llguidance is not installed",
    doc="JSON schemas, regular expressions, GBNF and Lark grammars, choices, structural tags",
)


def choose_library(grammar: Grammar) -> tuple[str, LibraryFactory]:
    """The library with the highest priority that supports a grammar, by name; raises `UnsupportedFeature` that says
    what to install."""
    reasons: dict[str, str | None] = {}
    for entry in GRAMMAR_LIBRARIES:
        reasons[entry.name] = GRAMMAR_LIBRARIES.reason_against(entry.name, grammar)
        if reasons[entry.name] is None:
            try:
                return entry.name, GRAMMAR_LIBRARIES.load(entry.name)
            except PluginError as error:
                reasons[entry.name] = error.message
    listing = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise UnsupportedFeature(
        f"no grammar library here serves this {grammar.kind} ({listing}); {INSTALL}", param=grammar.kind
    )


Choose = Callable[[Grammar], tuple[str, Callable[..., GrammarLibrary]]]


class GrammarStore:
    """Compiles grammars on threads of its own and keeps the ``max_compiled`` used last.

    ``read_vocabulary`` reads the tokenizer; it is called on a worker thread, when the first grammar comes.
    ``forced_tokens`` is None until then, and if the tokenizer cannot encode text.
    """

    def __init__(
        self, read_vocabulary: Callable[[], Vocabulary], vocab_size: int, eos_ids: Sequence[int], *,
        choose: Choose = choose_library, max_compiled: int = MAX_COMPILED,
    ):
        self.eos_ids = frozenset(eos_ids)
        self.forced_tokens: ForcedTokens | None = None
        self._read_vocabulary, self._vocab_size, self._choose = read_vocabulary, vocab_size, choose
        self._eos_list, self._max_compiled = list(eos_ids), max_compiled
        self._workers = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="grammar")
        self._futures: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()
        self._lock = threading.Lock()  # guards what the workers share: ``_vocabulary`` and ``_libraries``
        self._vocabulary: Vocabulary | None = None
        self._libraries: dict[str, GrammarLibrary] = {}

    def prepare(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """A future of the compiled grammar, the same for equal grammars. Called from one thread only: the cache has no
        lock."""
        future = self._futures.get(grammar)
        if future is None:
            future = self._futures[grammar] = self._workers.submit(self._compile, grammar)
        self._futures.move_to_end(grammar)
        # One that is still being compiled is not dropped: it would be compiled again, at once.
        while len(self._futures) > self._max_compiled and next(iter(self._futures.values())).done():
            self._futures.popitem(last=False)
        return future

    def find(self, grammar: Grammar) -> CompiledGrammar:
        """The compiled grammar of a request whose future was done. If it was evicted since (the request was retracted,
        and many other grammars came meanwhile), it is compiled again and the caller blocks."""
        return self.prepare(grammar).result()

    def close(self) -> None:
        """Compile nothing more."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        name, factory = self._choose(grammar)
        with self._lock:
            # Compiling runs outside of the lock: it may take long, and several grammars compile at once.
            library = self._libraries.get(name) or self._open(name, factory)
        return library.compile(grammar)

    def _open(self, name: str, factory: Callable[..., GrammarLibrary]) -> GrammarLibrary:
        """Make a library, and read the vocabulary first if no library was made before. The caller holds the lock."""
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
                self.forced_tokens = ForcedTokens(self._vocabulary)
        self._libraries[name] = library = factory(self._vocabulary, self._vocab_size, self._eos_list)
        return library
