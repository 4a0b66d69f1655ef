"""Grammars by llguidance. It bounds its own work by fuel, lets other threads run, and refuses what it cannot enforce.

Refuses: sources that `bounds` and `check_schema` refuse.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import llguidance
import msgspec
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark

from headrace.base.errors import RequestError
from headrace.base.grammar import Grammar, Vocabulary
from headrace.execution.structured.bounds import check_ebnf, check_regex
from headrace.execution.structured.lark import HEADER, embed_json, quote, slash
from headrace.execution.structured.regex_states import START, RegexStates, read_states
from headrace.execution.structured.schema import check_schema
from headrace.execution.structured.structural_tag import to_lark

JSON_OPTIONS = {
    "whitespace_flexible": True,
    # A space, or a line break and its indentation: a model cannot be caught writing blanks for ever.
    "whitespace_pattern": r" |\r?\n[ \t]{0,40}",
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
    # Without \u escapes: they would let a property be named twice, once in disguise.
    "json_allowed_escapes": '"\\bfnrt',
}
LIMITS = {"initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 200_000, "step_max_items": 5_000, "max_lexer_states": 50_000, "max_grammar_size": 200_000, "verbose_errors": False}
MAX_MASKS = 1024
"""Kept of all grammars together, 5 to 30 KB each."""
MAX_MESSAGE = 400
MAX_THREADS = 8
SHORT_S = 0.02
"""A grammar that is compiled in less is compiled once for each thread."""


class _TokenizerFace:
    """A vocabulary in the shape llguidance asks for."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, eos_ids: Sequence[int]):
        known = vocabulary.tokens[:vocab_size]
        self.tokens = known + [b""] * (vocab_size - len(known))
        self.special_token_ids = sorted(i for i in vocabulary.special_ids | set(eos_ids) if i < vocab_size)
        self.eos_token_id, self.bos_token_id = eos_ids[0], None
        self.split_greedily: Callable[[str], list[int]] | None = None

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokens of a text. Grammars do not force any (`HEADER`), so the longest will do."""
        raw = text.encode() if isinstance(text, str) else text
        return self.split_greedily(raw.decode("utf-8", "replace")) if self.split_greedily is not None else []


class KnownMasks:
    """The latest masks [W] of numbered states, by grammar and state."""

    def __init__(self) -> None:
        self._masks: OrderedDict[tuple[int, int], np.ndarray] = OrderedDict()

    def find(self, key: tuple[int, int]) -> np.ndarray | None:
        """The mask, if it is known."""
        return self._masks.get(key)

    def keep(self, key: tuple[int, int], mask: np.ndarray) -> None:
        """A mask that was computed."""
        self._masks[key] = mask.copy()
        while len(self._masks) > MAX_MASKS:
            self._masks.popitem(last=False)


@dataclass(eq=False, slots=True)
class Places:
    """Where outputs of one grammar can stand: ``number`` is the grammar's, ``forced`` what must follow, by state."""

    number: int
    states: RegexStates
    forced: dict[int | None, bytes] = field(default_factory=dict)


class GuidanceMatcher:
    """A `Matcher`. While ``places`` tell where the output stands, what is known of a state need not be computed again, and
    ``inner`` is told of tokens only when it is asked."""

    def __init__(self, inner: llguidance.LLMatcher, places: Places | None = None):
        self._inner, self._places = inner, places
        self._state: int | None = START if places is not None else None
        self._untold: list[int] = []

    @property
    def inner(self) -> llguidance.LLMatcher:
        """The library's own, told of all tokens."""
        self._tell()
        return self._inner

    @property
    def key(self) -> tuple[int, int] | None:
        """The grammar and the state; None when that is not told."""
        return None if self._state is None or self._places is None else (self._places.number, self._state)

    def accept(self, token_ids: Sequence[int]) -> None:
        """See `Matcher`."""
        self._untold += token_ids
        for token in token_ids:
            if self._places is not None and self._state is not None:
                self._state = self._places.states.step(self._state, token)
        if self._state is None:
            self._tell()

    def read_forced(self) -> bytes:
        """See `Matcher`. A special token has a byte before it that no text holds."""
        forced: dict[int | None, bytes] = {} if self._state is None or self._places is None else self._places.forced
        if self._state not in forced:
            forced[self._state] = self.inner.compute_ff_bytes().split(b"\xff", 1)[0]
        return forced[self._state]

    @property
    def error(self) -> str | None:
        """See `Matcher`."""
        return f"the grammar cannot go on: {_first_line(self._inner.get_error())}" if self._inner.is_error() else None

    def _tell(self) -> None:
        if self._untold:
            self._inner.consume_tokens(self._untold)
            self._untold = []


class GuidanceGrammar:
    """A `CompiledGrammar`: matchers nobody advances. Copies of one share what has been computed of the grammar, and wait for
    one another as they compute: outputs take turns in being copies of each."""

    plain = None

    def __init__(self, library: GuidanceLibrary, origins: list[llguidance.LLMatcher], places: Places | None):
        self.library = library
        self._origins, self._places = itertools.cycle(origins), places

    def start(self) -> GuidanceMatcher:
        """See `CompiledGrammar`."""
        return GuidanceMatcher(next(self._origins).deep_copy(), self._places)


class GuidanceLibrary:
    """A `GrammarLibrary`."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, eos_ids: Sequence[int]):
        face = _TokenizerFace(vocabulary, vocab_size, eos_ids)
        self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(face), eos_token=list(eos_ids))
        face.split_greedily = self._tokenizer.greedy_tokenize
        self._tokens = [b"" if i in vocabulary.special_ids else token for i, token in enumerate(face.tokens)]
        self._limits = llguidance.LLParserLimits(**LIMITS)
        self._known, self._numbers = KnownMasks(), itertools.count()
        self._num_threads = max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2))
        self._pool = llguidance.LLExecutor(num_threads=self._num_threads)
        texts = {i: vocabulary.tokens[i].decode("utf-8", "replace") for i in vocabulary.special_ids if i < len(face.tokens)}
        self._special_ids = {text: i for i, text in texts.items() if text}

    def compile(self, grammar: Grammar) -> GuidanceGrammar:
        """See `GrammarLibrary`. The first mask is computed too: it is the slowest, and shows a grammar that allows nothing."""
        try:
            text = HEADER + self._read(grammar)
        except RequestError:
            raise
        except (ValueError, RecursionError) as error:
            raise _complain(grammar, str(error)) from error
        began = time.perf_counter()
        origins = [self._open(grammar, text)]
        if time.perf_counter() - began < SHORT_S:
            origins += [self._open(grammar, text) for _ in range(1, self._num_threads)]
        states = self._read_states(grammar)
        return GuidanceGrammar(self, origins, None if states is None else Places(next(self._numbers), states))

    def _open(self, grammar: Grammar, text: str) -> llguidance.LLMatcher:
        origin = llguidance.LLMatcher(self._tokenizer, llguidance.LLMatcher.grammar_from_lark(text), log_level=0, limits=self._limits)
        allowed = b"" if origin.is_error() else origin.compute_bitmask()
        if origin.is_error():
            raise _complain(grammar, origin.get_error())
        if not any(allowed):
            raise _complain(grammar, "it allows no output")
        return origin

    def _read_states(self, grammar: Grammar) -> RegexStates | None:
        """Expressions and choices stand in numbered states."""
        if grammar.kind == "regex":
            return read_states(grammar.text, self._tokens)
        if grammar.kind == "choice":
            return read_states("|".join(map(re.escape, msgspec.json.decode(grammar.text))), self._tokens)
        return None

    def _read(self, grammar: Grammar) -> str:
        kind, text = grammar.kind, grammar.text
        match kind:
            case "json_schema":
                schema = msgspec.json.decode(text)
                if schema is False:
                    raise RequestError("the schema false allows no output", param=kind)
                check_schema(schema, kind)
                return "start: " + embed_json(schema, JSON_OPTIONS)
            case "json_object":
                return "start: " + embed_json({"type": "object"}, JSON_OPTIONS)
            case "regex":
                check_regex(text, kind)
                return "start: " + slash(text)
            case "ebnf":
                check_ebnf(text, kind)
                return any_to_lark(text)
            case "choice":
                return "start: " + " | ".join(map(quote, msgspec.json.decode(text)))
            case "structural_tag":
                return to_lark(msgspec.json.decode(text), JSON_OPTIONS, self._special_ids)
        raise RequestError(f"unknown kind of grammar {kind!r}", param="grammar")

    def fill(self, matchers: Sequence[GuidanceMatcher], masks: np.ndarray) -> None:
        """See `GrammarLibrary`."""
        assert masks.dtype == np.int32 and masks.flags.c_contiguous and len(masks) == len(matchers)
        asked: list[tuple[GuidanceMatcher, int]] = []
        for place, matcher in enumerate(matchers):
            known = None if matcher.key is None else self._known.find(matcher.key)
            if known is None:
                asked.append((matcher, place))
            else:
                masks[place] = known
        if asked:
            work = [(matcher.inner, place) for matcher, place in asked]
            self._pool.unsafe_compute_mask_ptr(work, masks.ctypes.data, masks.shape[1] * masks.itemsize, len(masks))
            for matcher, place in asked:
                if matcher.key is not None and matcher.error is None:
                    self._known.keep(matcher.key, masks[place])


def _complain(grammar: Grammar, reason: str) -> RequestError:
    return RequestError(f"the {grammar.kind} cannot be used as a grammar: {_first_line(reason)}", param=grammar.kind)


def _first_line(text: str) -> str:
    """Its messages go on with the grammar and the state of the parser."""
    if "NoExtensionBias" in text:
        return "it cannot be begun; does a '$ref' refer to itself, or a rule to nothing but itself?"
    return text.strip().split("\n<state>", 1)[0].replace("\n", " ").removesuffix(" <non-verbose/>")[:MAX_MESSAGE]
