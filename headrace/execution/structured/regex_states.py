"""`RegexAutomaton`: where an output stands in a regular expression: what is allowed next depends on nothing else.

ASCII alone: where an output holds anything else, and for expressions beyond what `regex_nodes` reads, nothing is told.
"""

from __future__ import annotations

from headrace.execution.structured.reach import Reach
from headrace.execution.structured.regex_nodes import Move, Nodes, NotReadError, Repeat, read_nodes

MAX_PLACES = 256
"""Nodes that an output may be in at once: what it takes to go on grows with them."""

Counts = tuple[int, ...]
Inside = frozenset[tuple[int, Counts]]
"""Nodes that an output may be in, each with the counts that run there."""

BEFORE, PAST = -1, -2
"""Stand for counts that no token takes to a bound: below both, or between them."""


class RegexAutomaton:
    """An `Automaton`. Bytes beyond ASCII are not told: classes were read as if there were nothing else, so that after
    anything else one would be in more places than are known here."""

    def __init__(self, nodes: Nodes, reach: Reach, *, is_quoted: bool = False):
        """``is_quoted``: outputs are JSON strings; else they are what the expression matches."""
        self._nodes = nodes
        start = self._close({(0, ())})
        if start is None:
            raise NotReadError
        self.start: Inside = start
        kinds = {bits for edges in nodes.edges for bits, _ in edges}
        self.classes = _find_classes(kinds)
        # What takes nothing that is known here may take nothing at all, and its counts never reach what they must.
        self._may_round = any(nodes.counts) and 0 not in kinds
        self._longest = reach.find_longest(_list_bytes(kinds), is_quoted=is_quoted) if self._may_round else 0

    def advance(self, inside: Inside, byte: int) -> Inside | None:
        """See `Automaton`."""
        if byte > 127:
            return None
        edges = self._nodes.edges
        return self._close(
            {(target, counts) for node, counts in inside for bits, target in edges[node] if bits >> byte & 1}
        )

    def summarise(self, inside: Inside) -> Inside:
        """See `Automaton`. Counts mean nothing while no token takes them to a bound."""
        if not self._may_round:
            return inside
        return frozenset(
            (node, tuple(map(self._round, self._nodes.counts[node], counts))) if counts else (node, counts) for node,
            counts in inside
        )

    def weigh(self, inside: Inside) -> int:
        """See `Automaton`."""
        return 4 + sum(1 + len(counts) for _, counts in inside)

    def _round(self, repeat: Repeat, count: int) -> int:
        if not repeat.least:
            return count
        furthest = count + self._longest // repeat.least + 1  # one that is begun may end at once
        if furthest < repeat.low:
            return BEFORE
        return PAST if count >= repeat.low and (repeat.high is None or furthest < repeat.high) else count

    def _close(self, places: set[tuple[int, Counts]]) -> Inside | None:
        """With all that is reached for nothing, less what leads nowhere but there; None when that is nothing, or too
        much."""
        edges, jumps, end, pending = self._nodes.edges, self._nodes.jumps, self._nodes.end, list(places)
        while pending:
            node, counts = pending.pop()
            for move, target in jumps[node]:
                place = target, counts
                if move is not Move.PLAIN:
                    if (after := _count(move, self._nodes.counts[node], counts)) is None:
                        continue
                    place = target, after
                if place not in places:
                    places.add(place)
                    pending.append(place)
            if len(places) > MAX_PLACES:
                return None
        return frozenset([place for place in places if edges[place[0]] or place[0] == end]) or None


def _count(move: Move, repeats: tuple[Repeat, ...], counts: Counts) -> Counts | None:
    """The counts after a move; None if they are against it."""
    if move is Move.ENTER:
        return (*counts, 1)
    repeat, count = repeats[-1], counts[-1]
    if move is Move.LEAVE:
        return counts[:-1] if count >= repeat.low else None
    if repeat.high is None:
        return (*counts[:-1], min(count + 1, repeat.low))
    return (*counts[:-1], count + 1) if count < repeat.high else None


def _list_bytes(kinds: set[int]) -> bytes:
    return bytes(byte for byte in range(128) if any(bits >> byte & 1 for bits in kinds))


def _find_classes(kinds: set[int]) -> bytes:
    """For each byte the least that is in the same of these."""
    first: dict[tuple[bool, ...], int] = {}
    return bytes(
        byte if byte > 127 else first.setdefault(tuple(bool(bits >> byte & 1) for bits in kinds), byte)
        for byte in range(256)
    )


def read_regex(pattern: str, reach: Reach, *, is_quoted: bool = False) -> RegexAutomaton | None:
    """The automaton of an expression; None when it is beyond the part that is read."""
    try:
        return RegexAutomaton(read_nodes(pattern), reach, is_quoted=is_quoted)
    except NotReadError:
        return None
