"""Balancing policies: which of several engines gets a request. Torch-free, and without processes and sockets, so that
whatever spreads requests over engines can use it.

Refuses: health and retries; the caller offers only engines that take requests.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple, Protocol

import msgspec

from headrace.base.registry import Registry

ENTRY_POINT_GROUP = "headrace.balancing"

BLOCK = 32
"""Tokens per block of a known prefix: shorter shared prefixes are not worth a choice."""
MOST_BLOCKS = 1 << 16
"""Most blocks remembered of one replica, about 10 MB."""
TOKENS_PER_SAVED = 4
"""How many tokens of load a replica may have more than the least loaded one, for each prompt token that its cache
saves."""
LOAD_SHARE = 0.5
"""How much busier than the least loaded replica, as a share of that one's load, a replica may be that has all of the
prompt in its cache; in proportion less for one that has a part of it."""


class ReplicaState(msgspec.Struct, frozen=True):
    """The load of one engine. ``prefill_tokens``: prompt tokens that are not computed yet; ``running_tokens``: prompt
    and output tokens of the choices that are past their prompts, which each step reads. ``kv_usage``: share of its KV
    pages that requests hold. ``num_kv_tokens``: what its cache has room for, 0 if unknown. ``name``: stays the
    same when engines come and go, and over restarts."""

    index: int
    num_queued: int = 0
    num_running: int = 0
    prefill_tokens: int = 0
    running_tokens: int = 0
    kv_usage: float = 0.0
    num_kv_tokens: int = 0
    name: str = ""

    @property
    def load(self) -> int:
        """Outstanding tokens."""
        return self.prefill_tokens + self.running_tokens


class RoutedRequest(msgspec.Struct, frozen=True):
    """What policies see of a request. ``token_ids`` that one policy gets are all arrays of one type, or none of them
    is. ``namespace``: see `headrace.base.messages.EngineRequest`. ``affinity``: names the conversation, if the client
    does."""

    token_ids: Sequence[int]
    namespace: str = ""
    affinity: str = ""


class Choice(NamedTuple):
    """The chosen replica, and how many tokens of the prompt it probably has in its cache."""

    replica: int
    cached_len: int = 0


class Policy(Protocol):
    """Decides one request after the other, in one thread. The same calls lead to the same choices."""

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaState]) -> Choice:
        """Choose one of ``replicas``, of which there is at least one, in the order of their indices."""

    def forget(self, index: int) -> None:
        """The cache of a replica is empty: it was restarted, or reset."""


POLICIES: Registry[type[Policy]] = Registry("balancing policy")
POLICIES.add(
    "cache-aware", "headrace.service.balancing:CacheAware",
    doc="the longest known prefix, unless that replica is much busier than the least loaded one"
)
POLICIES.add("least-loaded", "headrace.service.balancing:LeastLoaded", doc="the fewest outstanding tokens")
POLICIES.add(
    "consistent-hash", "headrace.service.balancing:ConsistentHash",
    doc="always the same for a conversation, or a beginning of prompts; few move when replicas come and go"
)
POLICIES.add("round-robin", "headrace.service.balancing:RoundRobin", doc="one after the other")


def add_installed_policies() -> None:
    """Register the policies of installed packages, without importing them."""
    POLICIES.add_installed(ENTRY_POINT_GROUP)


def create_policy(name: str) -> Policy:
    """Build a policy; raises `PluginError` that lists the known names or has the original error."""
    add_installed_policies()
    policy: Policy = POLICIES.make(name)
    return policy


class RoundRobin:
    """The next replica in the order of indices."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaState]) -> Choice:
        """See `Policy`."""
        self._last = next((r.index for r in replicas if r.index > self._last), replicas[0].index)
        return Choice(self._last)

    def forget(self, index: int) -> None:
        """Nothing is remembered of a cache."""


class ConsistentHash:
    """The replica with the highest hash of its name and the request's key (rendezvous hashing): only the requests of a
    replica that goes away move to others. The key is ``affinity``, or the first block of the prompt. Several routers
    choose alike."""

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaState]) -> Choice:
        """See `Policy`."""
        key = request.affinity.encode("utf-8", "surrogatepass")
        key = key or array("q", request.token_ids[:BLOCK]).tobytes() + request.namespace.encode()
        return Choice(max(replicas, key=lambda replica: self._weigh(key, replica)).index)

    def forget(self, index: int) -> None:
        """Nothing is remembered of a cache."""

    def _weigh(self, key: bytes, replica: ReplicaState) -> bytes:
        name = (replica.name or str(replica.index)).encode()
        return blake2b(key, digest_size=8, salt=blake2b(name, digest_size=16).digest()).digest()


class LeastLoaded:
    """The replica with the fewest outstanding tokens; of equals the one with the most free KV pages, then the next in
    the order of indices."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaState]) -> Choice:
        """See `Policy`."""
        chosen = min(replicas, key=lambda r: (r.load, r.kv_usage, r.index <= self._last, r.index))
        self._last = chosen.index
        return Choice(chosen.index)

    def forget(self, index: int) -> None:
        """Nothing is remembered of a cache."""


def prefix_keys(request: RoutedRequest) -> list[int]:
    """A key for each prefix of whole blocks, shortest first. Python's hash of bytes is keyed by a secret of the process
    (SipHash), so that nobody can make prompts that collide."""
    ids = request.token_ids
    if not isinstance(ids, array):  # copying from one type to another takes five times as long as all the rest
        ids = array("q", ids)
    packed, size = ids.tobytes(), BLOCK * ids.itemsize
    keys, key = [], hash(request.namespace)
    for begin in range(0, len(packed) - size + 1, size):
        key = hash((key, packed[begin : begin + size]))
        keys.append(key)
    return keys


class PrefixIndex:
    """The prefixes that one replica has seen, at most ``capacity`` keys; the least recently used are forgotten first,
    as in the replica's own cache.

    A prefix is always more recent than its extensions. So what is forgotten is never the beginning of what is kept,
    and the length of a match can be found by bisection. ``known``: the keys, the least recently used first.
    """

    def __init__(self, capacity: int):
        self._capacity = capacity
        self.known: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.known)

    def match(self, keys: Sequence[int]) -> int:
        """How many of the keys, from the first on, are known."""
        if not keys or keys[0] not in self.known:
            return 0
        if keys[-1] in self.known:
            return len(keys)
        return bisect_left(keys, True, key=lambda key: key not in self.known)

    def note(self, keys: Sequence[int]) -> None:
        """The replica gets a prompt with these keys."""
        for key in reversed(keys[: self._capacity]):
            self.known[key] = None
            self.known.move_to_end(key)
        while len(self.known) > self._capacity:
            self.known.popitem(last=False)


class CacheAware:
    """The replica that saves the most prompt tokens over the least loaded one, of those that are not too much busier;
    else the least loaded.

    Saving ``gain`` tokens allows a load of up to ``least + TOKENS_PER_SAVED * gain + LOAD_SHARE * least * gain / len``,
    where ``least`` is the smallest load and ``len`` that of the prompt. The turns of a conversation therefore stay
    together, a short prefix that all prompts share draws nobody, and a long one spreads over the replicas as load
    demands.
    """

    def __init__(self) -> None:
        self._seen: dict[int, PrefixIndex] = {}
        self._last = -1

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaState]) -> Choice:
        """See `Policy`."""
        keys, last = prefix_keys(request), self._last
        seen = [self._seen_by(r) for r in replicas]
        first = keys[0] if keys else 0
        matches = [index.match(keys) * BLOCK if first in index.known else 0 for index in seen]
        loads = [r.prefill_tokens + r.running_tokens for r in replicas]  # `load`, without a call for each
        least_load = min(loads)
        # Of equally loaded ones: the longest match, then the emptiest cache, so that all caches are used; then in turn.
        least = min(
            (-matches[at], len(seen[at].known), replicas[at].index <= last, at)
            for at, load in enumerate(loads) if load == least_load
        )[-1]
        best, most = least, 0
        for at, match in enumerate(matches):
            gain = match - matches[least]
            if gain <= 0:
                continue
            slack = TOKENS_PER_SAVED * gain + LOAD_SHARE * least_load * gain / max(1, len(request.token_ids))
            is_better = gain > most or (gain == most and loads[at] < loads[best])
            if is_better and loads[at] <= least_load + slack:
                best, most = at, gain
        seen[best].note(keys)
        self._last = replicas[best].index
        return Choice(self._last, matches[best])

    def forget(self, index: int) -> None:
        """See `Policy`."""
        self._seen.pop(index, None)

    def _seen_by(self, replica: ReplicaState) -> PrefixIndex:
        seen = self._seen.get(replica.index)
        if seen is None:
            room = replica.num_kv_tokens // BLOCK or MOST_BLOCKS
            seen = self._seen[replica.index] = PrefixIndex(min(room, MOST_BLOCKS))
        return seen
