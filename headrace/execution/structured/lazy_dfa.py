"""`LazyDfa`: the states that a grammar's outputs can be in, as a DFA built on demand. Outputs in one state have the
same bitmask and the same forced text, so the grammar library computes these once per state.

An `Automaton` follows an output byte by byte: JSON of a schema (``json_automaton.py``), regular expressions
(``regex_automaton.py``), structural tags (``tag_automaton.py``). Refuses: computing bitmasks, and deciding what is
allowed. An automaton only has to tell states apart: it may distinguish too many or give up (None), after which the
library is asked for every token, but it must never merge two states that allow different tokens.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

MAX_WEIGHT = 65_536
"""The most memory of one grammar's states together, in units of `Automaton.weigh`. Beyond it all are dropped and built
anew."""
_ITEM = re.compile(rb"(?<!,),(?!,)")


class NotReadError(Exception):
    """The grammar uses something that no automaton supports. Not an error: bitmasks are just not shared."""


class Automaton(Protocol):
    """A configuration is all that the automaton remembers of the bytes so far, hashable: after equal configurations the
    same texts may follow."""

    start: Any
    byte_classes: bytes | None
    """[256]: a representative of each byte's equivalence class: bytes of one class lead to the same configuration from
    every configuration. It keeps the states' tables small; None where no classes are known."""

    def step(self, config: Any, byte: int) -> Any | None:
        """The configuration after one more byte; None where the automaton cannot tell."""

    def mask_key(self, config: Any) -> Hashable:
        """Equal for configurations with the same bitmask, that is after which the same single tokens may come. Coarser
        than the configuration: what is further away than one token can reach does not matter."""

    def weigh(self, config: Any) -> int:
        """A rough measure of a configuration's memory, in numbers or references that it holds."""


class Reach:
    """How far one token of the vocabulary can take an output. Configurations that differ only in what is further away
    share bitmasks."""

    def __init__(self, tokens: Sequence[bytes]):
        self._tokens = tokens

    @cached_property
    def items(self) -> int:
        """The most array items that one token can complete: counts the commas that have no comma beside them, as those
        between values, and two more for its ends."""
        return max((len(_ITEM.findall(token)) for token in self._tokens if b"," in token), default=0) + 2

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest token."""
        return max(map(len, self._tokens), default=0)


@dataclass(eq=False, slots=True)
class DfaState:
    """``next``: the following state by byte, None where the automaton gives up; filled on demand. ``mask_key``: see
    `LazyDfa.find_key`. ``forced``: the text that must follow, once it was asked for."""

    config: Any
    mask_key: object | None = None
    next: dict[int, DfaState | None] = field(default_factory=dict)
    forced: bytes | None = None


class LazyDfa:
    """The states of one grammar over the tokens of a vocabulary; ``tokens[i]`` is empty for special tokens. Shared by
    all outputs of the grammar, on one thread."""

    def __init__(self, automaton: Automaton, tokens: Sequence[bytes], *, max_weight: int = MAX_WEIGHT):
        self._automaton, self._tokens, self._max_weight, self._weight = automaton, tokens, max_weight, 0
        # Hash-consed: equal configurations are one state, whichever way an output came to them.
        self._states: dict[Any, DfaState] = {}
        self._mask_keys: dict[Hashable, object] = {}
        self.start = self._find(automaton.start)

    def __len__(self) -> int:
        return len(self._states)

    def step(self, state: DfaState, token: int) -> DfaState | None:
        """The state after a token; None when it is not known (a special token, or the automaton gave up)."""
        text = self._tokens[token] if token < len(self._tokens) else b""
        if not text:
            return None
        classes = self._automaton.byte_classes
        # The hot loop: one dict lookup per byte once the states are known.
        for byte in text if classes is None else text.translate(classes):
            following = state.next
            after = following[byte] if byte in following else self._advance(state, byte)
            if after is None:
                return None
            state = after
        return state

    def find_key(self, state: DfaState) -> object:
        """The same object for states with the same bitmask: a key for `BitmaskTable` that costs nothing to hash."""
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
            # Before the new state is added: it must survive, as its caller holds on to it.
            if self._weight > self._max_weight:
                self._forget()
            found = self._states[config] = DfaState(config)
        return found

    def _forget(self) -> None:
        """Drop all states. Outputs keep the ones that they are in, which go on as before; `next` is cleared so that
        they do not keep the others alive."""
        for state in self._states.values():
            state.next.clear()
        self._states.clear()
        self._mask_keys.clear()
        self._weight = 0
