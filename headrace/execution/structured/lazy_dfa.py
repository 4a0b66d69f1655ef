"""`LazyDfa`: the states of a grammar's outputs, built as outputs come to them. Outputs in one state have the same
bitmask and the same forced text, which the grammar library then computes once.

An `Automaton` reads grammars byte by byte: JSON of a schema (``json_automaton.py``), regular expressions
(``regex_automaton.py``), structural tags (``tag_automaton.py``). Refuses: computing bitmasks. Where an automaton cannot
tell, the library is asked for every token.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

MAX_WEIGHT = 65_536
"""Of the states of one grammar together. Beyond it they are built anew."""
_ITEM = re.compile(rb"(?<!,),(?!,)")


class NotReadError(Exception):
    """The grammar holds something beyond the part that an automaton reads."""


class Automaton(Protocol):
    """A configuration is what the automaton remembers of the bytes so far: after equal ones, the same may follow."""

    start: Any
    byte_classes: bytes | None
    """For each byte one that may stand for it in every configuration; None where nothing is known of that."""

    def step(self, config: Any, byte: int) -> Any | None:
        """The configuration after one more byte; None where the automaton cannot tell."""

    def mask_key(self, config: Any) -> Hashable:
        """Equal for configurations after which the same single tokens may come, whatever may follow those."""

    def weigh(self, config: Any) -> int:
        """How much memory a configuration takes, in small integers."""


class Reach:
    """How far one token may take an output. Configurations that differ only in what is further away share bitmasks."""

    def __init__(self, tokens: Sequence[bytes]):
        self._tokens = tokens

    @cached_property
    def items(self) -> int:
        """Items of an array that a token may pass, at most: commas between values have no comma beside them."""
        return max((len(_ITEM.findall(token)) for token in self._tokens if b"," in token), default=0) + 2

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest token."""
        return max(map(len, self._tokens), default=0)


@dataclass(eq=False, slots=True)
class DfaState:
    """``next``: by byte. ``mask_key``: see `LazyDfa.find_key`. ``forced``: the text that must follow, once known."""

    config: Any
    mask_key: object | None = None
    next: dict[int, DfaState | None] = field(default_factory=dict)
    forced: bytes | None = None


class LazyDfa:
    """The states of one grammar over the tokens of a vocabulary; ``tokens[i]`` is empty where token i is no text."""

    def __init__(self, automaton: Automaton, tokens: Sequence[bytes], *, max_weight: int = MAX_WEIGHT):
        self._automaton, self._tokens, self._max_weight, self._weight = automaton, tokens, max_weight, 0
        self._states: dict[Any, DfaState] = {}
        self._mask_keys: dict[Hashable, object] = {}
        self.start = self._find(automaton.start)

    def __len__(self) -> int:
        return len(self._states)

    def step(self, state: DfaState, token: int) -> DfaState | None:
        """The state after a token; None when it is not known."""
        text = self._tokens[token] if token < len(self._tokens) else b""
        if not text:
            return None
        classes = self._automaton.byte_classes
        for byte in text if classes is None else text.translate(classes):
            following = state.next
            after = following[byte] if byte in following else self._advance(state, byte)
            if after is None:
                return None
            state = after
        return state

    def find_key(self, state: DfaState) -> object:
        """The same object for states with the same bitmask."""
        if state.mask_key is None:
            state.mask_key = self._mask_keys.setdefault(self._automaton.mask_key(state.config), object())
        return state.mask_key

    def _advance(self, state: DfaState, byte: int) -> DfaState | None:
        config = self._automaton.step(state.config, byte)
        after = state.next[byte] = None if config is None else self._find(config)
        return after

    def _find(self, config: Any) -> DfaState:
        found = self._states.get(config)
        if found is None:
            self._weight += self._automaton.weigh(config)
            if self._weight > self._max_weight:
                self._forget()
            found = self._states[config] = DfaState(config)
        return found

    def _forget(self) -> None:
        """Outputs keep the states that they are in."""
        for state in self._states.values():
            state.next.clear()
        self._states.clear()
        self._mask_keys.clear()
        self._weight = 0
