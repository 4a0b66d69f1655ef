"""`SuffixDrafter`: proposes what most often followed the longest context, in the request's own text or in earlier
outputs (suffix decoding, https://arxiv.org/abs/2411.04975). How much it proposes depends on how long the match is."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from headrace.scheduling.speculation.contexts import ContextIndex
from headrace.scheduling.speculation.drafter import NOTHING, DrafterOptions, Proposal

SLICE = 2048
"""Tokens that one `propose` indexes at most, some 2 ms of work; a long prompt takes several."""
MOST_CACHED_TOKENS = 1 << 18
"""Tokens of earlier outputs that are remembered at most; until the oldest half is dropped it may be twice as many, some
15 MiB."""
DOUBT = 1.5
"""Occurrences, divided by the length of the match, that are assumed to have gone on differently."""

_END = -1  # between remembered outputs; no context contains it


class _Outputs:
    """Earlier outputs, oldest first, bounded in number and in tokens."""

    def __init__(self, most_requests: int):
        self.index = ContextIndex(MOST_CACHED_TOKENS // 2)
        self._most = most_requests
        self._starts: deque[int] = deque()

    def add(self, token_ids: Sequence[int]) -> None:
        """Remember an output, at most the end of it that fits."""
        index = self.index
        self._starts.append(index.end)
        index.tokens.extend(token_ids[-(MOST_CACHED_TOKENS // 2) :])
        index.tokens.append(_END)
        while len(self._starts) > self._most or index.end - self._starts[0] > MOST_CACHED_TOKENS:
            self._starts.popleft()
        # In halves: each cut moves all that is behind it.
        if self._starts[0] - index.base > (index.end - index.base) // 2:
            index.index(index.end - index.indexed)
            index.drop(self._starts[0])

    def find(self, context: Sequence[int], depth: int) -> list[tuple[int, int]]:
        """See `ContextIndex.find`."""
        if not self._starts:
            return []
        self.index.index(SLICE)
        oldest = self._starts[0]
        return [found for found in self.index.find(context, depth) if found[1] > oldest]


class _Own:
    """A request's own tokens. ``num_given`` of them were there when it started."""

    __slots__ = ("index", "is_private", "num_given")

    def __init__(self, token_ids: Sequence[int], is_private: bool):
        self.index = ContextIndex(len(token_ids))
        self.index.tokens.extend(token_ids)
        self.is_private = is_private
        self.num_given = len(token_ids)


class _Path:
    """A way on from some occurrences. ``score`` is the number of tokens of it that are expected to be right."""

    __slots__ = ("_least", "_survival", "probabilities", "score", "token_ids")

    def __init__(self, least: float):
        self.token_ids: list[int] = []
        self.probabilities: list[float] = []
        self.score = 0.0
        self._least = least
        self._survival = 1.0

    def add(self, token: int, probability: float) -> bool:
        """Go on with a token; False, and unchanged, where that is too unlikely or the text ends."""
        survival = self._survival * probability
        if token == _END or survival < self._least:
            return False
        self._survival = survival
        self.score += survival
        self.token_ids.append(token)
        self.probabilities.append(probability)
        return True


class SuffixDrafter:
    """At each token of a proposal the occurrences that agree so far vote for the next one. Longer contexts have fewer
    occurrences, which agree more often, and may propose more tokens; of all lengths, and of the two sources, the way on
    with the most expected tokens is taken. See `DrafterOptions` for the bounds."""

    def __init__(self, options: DrafterOptions):
        self._depth = options.max_tree_depth
        self._factor = options.max_spec_factor
        self._least = options.min_token_prob
        self._own: dict[int, _Own] = {}
        self._outputs = _Outputs(options.max_cached_requests) if options.max_cached_requests else None

    def start(self, key: int, token_ids: Sequence[int], *, is_private: bool = False) -> None:
        self._own[key] = _Own(token_ids, is_private)

    def append(self, key: int, token_ids: Sequence[int]) -> None:
        self._own[key].index.tokens.extend(token_ids)

    def stop(self, key: int) -> None:
        own = self._own.pop(key)
        output = own.index.tokens[own.num_given :]
        if self._outputs is not None and output and not own.is_private:
            self._outputs.add(output)

    def propose(self, key: int, most: int, continuation: Sequence[int] = ()) -> Proposal:
        own = self._own[key]
        index, depth = own.index, self._depth
        if index.indexed < index.end:
            index.index(SLICE)
        context = [*index.tokens[-depth:], *continuation]
        best = _Path(self._least)
        found = index.find(context, depth)
        if found:
            best = self._best_path(index, found, most, list(continuation), best)
        if self._outputs is not None and not own.is_private:
            found = self._outputs.find(context, depth)
            if found:
                best = self._best_path(self._outputs.index, found, most, None, best)
        return Proposal(best.token_ids, best.probabilities) if best.token_ids else NOTHING

    def _best_path(
        self, index: ContextIndex, found: list[tuple[int, int]], most: int, tail: list[int] | None, best: _Path
    ) -> _Path:
        """The best way on from the occurrences of any length, or ``best``."""
        lengths = sorted({length for length, _ in found}, reverse=True)
        for length in lengths:
            limit = min(most, max(1, int(self._factor * length)))
            if limit <= best.score:  # shorter contexts propose no more
                break
            ends = [position - index.base for known, position in found if known >= length]
            path = self._follow(index, ends, length, limit, tail)
            if path.score > best.score:
                best = path
        return best

    def _follow(self, index: ContextIndex, ends: list[int], length: int, limit: int, tail: list[int] | None) -> _Path:
        """Go on from these ends, with the majority. ``tail`` is what follows the text, if that is known: a text that
        repeats itself goes on to do so."""
        text, size, path = index.tokens, len(index.tokens), _Path(self._least)
        token_ids = path.token_ids
        while len(token_ids) < limit:
            if len(ends) == 1 and ends[0] < size:  # nothing left to vote on
                run = text[ends[0] : ends[0] + limit - len(token_ids)]
                for known, token in enumerate(run, length + len(token_ids)):
                    if not path.add(token, 1 / (1 + DOUBT / known)):
                        return path
                ends = [ends[0] + len(run)]
                continue
            nexts = [text[end] if end < size else _behind(end - size, tail, token_ids) for end in ends]
            votes: dict[int, int] = {}
            for token in nexts:
                votes[token] = votes.get(token, 0) + 1
            chosen = max(votes, key=votes.__getitem__)  # of equals the latest
            doubt = DOUBT / (length + len(token_ids))
            if not path.add(chosen, votes[chosen] / (len(ends) + doubt)):
                return path
            ends = [end + 1 for end, token in zip(ends, nexts, strict=True) if token == chosen]
        return path


def _behind(offset: int, tail: list[int] | None, token_ids: list[int]) -> int:
    """The token so far behind the end of the text, which ``tail`` and then the proposal itself continue."""
    if tail is None:
        return _END
    return tail[offset] if offset < len(tail) else token_ids[offset - len(tail)]
