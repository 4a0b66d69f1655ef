"""`TextDrafter`: guesses the next tokens of a request from text alone, on the host; and the registry of its methods.

Refuses: deciding how many guesses are worth verifying (`policy.py`), and drafters that compute on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from headrace.base.registry import Registry
from headrace.base.speculation import SpeculativeOptions

ENTRY_POINT_GROUP = "headrace.drafters"


class Proposal(NamedTuple):
    """Tokens that may follow. ``probabilities[i]``: the drafter's estimate, from 0 to 1, that token i is right if all
    before it are. It need not be calibrated: the policy learns how far it can be trusted."""

    token_ids: list[int]
    probabilities: list[float]


NOTHING = Proposal([], [])
"""The proposal of a drafter that has no guess. Callers must not change its lists."""


class DrafterOptions(NamedTuple):
    """What a drafter may be told; the fields of the speculative config that concern text. Each drafter reads those that
    it knows."""

    prompt_lookup_min: int = 5
    prompt_lookup_max: int = 5
    max_tree_depth: int = 24
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1
    max_cached_requests: int = 10000


class TextDrafter(Protocol):
    """One engine's drafter of one method. Requests are named by integers; none is known before `start`.

    All calls come from the engine's thread between steps, so none may take long: work that grows with a prompt is
    done lazily, in slices, by `propose`. An out-of-tree drafter sets ``plugin_api`` (see `Registry`).
    """

    def __init__(self, options: DrafterOptions): ...

    def start(self, key: int, token_ids: Sequence[int], *, is_private: bool = False) -> None:
        """A request, with all its tokens known by now. ``is_private``: what it says must not serve others, and what
        others said must not serve it (timing would tell)."""

    def append(self, key: int, token_ids: Sequence[int]) -> None:
        """Output tokens of the request that were committed, in order."""

    def propose(self, key: int, most: int, continuation: Sequence[int] = ()) -> Proposal:
        """Guess at most ``most`` tokens that follow the known ones and then ``continuation``, which is assumed: a step
        in flight verifies it."""

    def stop(self, key: int) -> None:
        """The request is over. Its output may be remembered for others, unless it is private."""


TEXT_DRAFTERS: Registry[type[TextDrafter]] = Registry("text drafter")
TEXT_DRAFTERS.add(
    "ngram", "headrace.scheduling.speculation.ngram:NgramDrafter",
    doc="what followed the latest occurrence of the last few tokens in the prompt or output"
)
TEXT_DRAFTERS.add(
    "suffix", "headrace.scheduling.speculation.suffix:SuffixDrafter",
    doc="what most often followed the longest matching context in the request's own text or in earlier outputs"
)


def make_text_drafter(method: str, options: SpeculativeOptions) -> TextDrafter:
    """The drafter of a method, which may be out-of-tree; raises `PluginError` if it is unknown or cannot be loaded."""
    if method not in TEXT_DRAFTERS:
        TEXT_DRAFTERS.add_installed(ENTRY_POINT_GROUP)
    low, high = options.lookup
    drafter: TextDrafter = TEXT_DRAFTERS.make(method, DrafterOptions(
        low, high, options.suffix_decoding_max_tree_depth, options.suffix_decoding_max_spec_factor,
        options.suffix_decoding_min_token_prob, options.suffix_decoding_max_cached_requests
    ))
    return drafter
