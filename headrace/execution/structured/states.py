"""`States`: where an output stands in a grammar, found by an automaton of our own: two outputs in one state have one
mask and one forced text, which need be computed only once. Built as outputs come to new states. Refuses: computing
masks.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Protocol

MAX_WEIGHT = 65_536
"""Of the states of one grammar, together; then it begins anew."""


class Automaton(Protocol):
    """Reads a part of the grammars, byte by byte. An inside is what it makes of the bytes so far: equal insides have
    equal futures."""

    start: Hashable
    classes: bytes | None
    """For each byte one that may be put in its place, whatever the inside; None where nothing is known of that."""

    def advance(self, inside: Hashable, byte: int) -> Hashable | None:
        """The inside after one more byte; None where it cannot tell."""

    def summarise(self, inside: Hashable) -> Hashable:
        """Equal for insides after which the same single tokens may come, whatever may come behind those."""

    def weigh(self, inside: Hashable) -> int:
        """How much memory it takes, in small integers."""


@dataclass(eq=False, slots=True)
class State:
    """``next``: by byte. ``mask_key``: see `States.find_key`, once somebody asked. ``forced``: the text that must
    follow, once it is known."""

    inside: Hashable
    mask_key: object | None = None
    next: dict[int, State | None] = field(default_factory=dict)
    forced: bytes | None = None


class States:
    """The states of one grammar over the bytes of a vocabulary; ``tokens[i]`` is empty where token i is no text."""

    def __init__(self, automaton: Automaton, tokens: list[bytes], *, max_weight: int = MAX_WEIGHT):
        self._automaton, self._tokens, self._max_weight, self._weight = automaton, tokens, max_weight, 0
        self._classes, self._states = automaton.classes, dict[Hashable, State]()
        self._mask_keys: dict[Hashable, object] = {}
        self.start = self._find(automaton.start)

    def __len__(self) -> int:
        return len(self._states)

    def step(self, state: State, token: int) -> State | None:
        """The state after a token; None when it is not told."""
        text = self._tokens[token] if token < len(self._tokens) else b""
        if not text:
            return None
        for byte in text if self._classes is None else text.translate(self._classes):
            following = state.next
            after = following[byte] if byte in following else self._advance(state, byte)
            if after is None:
                return None
            state = after
        return state

    def find_key(self, state: State) -> object:
        """The same object for states whose masks are the same."""
        if state.mask_key is None:
            state.mask_key = self._mask_keys.setdefault(self._automaton.summarise(state.inside), object())
        return state.mask_key

    def _advance(self, state: State, byte: int) -> State | None:
        inside = self._automaton.advance(state.inside, byte)
        after = state.next[byte] = None if inside is None else self._find(inside)
        return after

    def _find(self, inside: Hashable) -> State:
        """The one state of an inside. Older ones stay with the outputs that are in them when all are forgotten."""
        found = self._states.get(inside)
        if found is None:
            self._weight += self._automaton.weigh(inside)
            if self._weight > self._max_weight:
                self._forget()
            found = self._states[inside] = State(inside)
        return found

    def _forget(self) -> None:
        for state in self._states.values():
            state.next.clear()
        self._states.clear()
        self._mask_keys.clear()
        self._weight = 0
