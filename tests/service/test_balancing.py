"""Balancing policies: bounds that always hold, and what they are worth on traffic of conversations."""

from __future__ import annotations

import random
from collections import OrderedDict, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.base.errors import PluginError
from headrace.service import balancing
from headrace.service.balancing import (
    BLOCK,
    LOAD_SHARE,
    POLICIES,
    TOKENS_PER_SAVED,
    CacheAware,
    LeastLoaded,
    Policy,
    PrefixIndex,
    ReplicaState,
    RoundRobin,
    RoutedRequest,
    create_policy,
    prefix_keys,
)


def states(*loads: int, room: int = 0) -> list[ReplicaState]:
    return [ReplicaState(i, running_tokens=load, num_kv_tokens=room) for i, load in enumerate(loads)]


def prompt(seed: int, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=num_tokens)


LOADS = st.lists(st.integers(0, 100_000), min_size=1, max_size=5)
# Few seeds and lengths, so that prompts share prefixes.
PROMPTS = st.builds(lambda seed, n: [*prompt(seed, 600)[:n], seed], st.integers(0, 3), st.integers(0, 600))
ASKS = st.lists(st.tuples(PROMPTS, st.sampled_from(["", "a"]), LOADS), max_size=40)


@given(ASKS, st.sampled_from(sorted(POLICIES.names())))
@settings(deadline=None)
def test_choices_are_offered_bounded_and_repeatable(asks, name):
    policy, twin = create_policy(name), create_policy(name)
    for token_ids, namespace, loads in asks:
        offered = states(*loads)[len(loads) // 2 :]  # some are down
        request = RoutedRequest(token_ids, namespace)
        choice = policy.choose(request, offered)
        assert choice == twin.choose(request, offered)
        assert choice.replica in {r.index for r in offered} and 0 <= choice.cached_len <= len(token_ids)
        load, least = loads[choice.replica], min(r.load for r in offered)
        if name == "least-loaded":
            assert load == least
        elif name == "cache-aware":
            assert load <= least * (1 + LOAD_SHARE) + TOKENS_PER_SAVED * len(token_ids)


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 3), min_size=1, max_size=12)), max_size=60),
       st.integers(1, 20))
def test_a_prefix_index_is_bounded_and_closed(steps, capacity):
    """Against the definition: the known prefixes are those of the most recently used chains."""
    index, recent = PrefixIndex(capacity), OrderedDict()
    for is_note, path in steps:
        keys = [hash(tuple(path[: i + 1])) for i in range(len(path))]
        if is_note:
            index.note(keys)
            for key in reversed(keys[:capacity]):
                recent[key] = None
                recent.move_to_end(key)
            while len(recent) > capacity:
                recent.popitem(last=False)
        known = [key in recent for key in keys]
        assert known == sorted(known, reverse=True), "closed under prefixes"
        assert index.match(keys) == sum(known) and len(index) == len(recent) <= capacity


@given(PROMPTS, PROMPTS)
def test_keys_are_those_of_shared_blocks(one, other):
    keys, others = (prefix_keys(RoutedRequest(ids)) for ids in (one, other))
    shared = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    assert len(keys) == len(one) // BLOCK and len(set(keys)) == len(keys)
    assert sum(a == b for a, b in zip(keys, others, strict=False)) == shared // BLOCK
    assert not set(keys) & set(prefix_keys(RoutedRequest(one, "tenant")))


def test_memory_is_bounded_by_the_cache_and_in_all():
    policy = CacheAware()
    for seed in range(50):
        policy.choose(RoutedRequest(prompt(seed, 1000)), states(0, 0, room=BLOCK * 40))
    assert all(len(policy._seen[i]) == 40 for i in (0, 1))
    limited = CacheAware()
    limited.choose(RoutedRequest(range(BLOCK * (balancing.MOST_BLOCKS + 100))), states(0))
    assert len(limited._seen[0]) == balancing.MOST_BLOCKS


def test_the_turns_of_a_conversation_stay_together_until_it_is_too_busy():
    policy, history = CacheAware(), prompt(1, 640)
    home = policy.choose(RoutedRequest(history), states(0, 0, 0)).replica
    loads = [500] * 3
    loads[home] = 500 + TOKENS_PER_SAVED * 640
    assert policy.choose(RoutedRequest([*history, 7]), states(*loads)) == (home, 640)
    loads[home] += 500 + BLOCK
    other = policy.choose(RoutedRequest([*history, 7]), states(*loads))
    assert other.replica != home and other.cached_len == 0


def test_a_short_prefix_that_all_share_draws_nobody():
    policy, system = CacheAware(), prompt(0, BLOCK)
    counts = [0, 0]
    loads = [0, 0]
    for seed in range(1, 41):
        choice = policy.choose(RoutedRequest(system + prompt(seed, 1000)), states(*loads))
        counts[choice.replica] += 1
        loads[choice.replica] += 1032
    assert counts == [20, 20]


def test_idle_replicas_fill_their_caches_alike():
    policy = CacheAware()
    found = [policy.choose(RoutedRequest(prompt(seed, 320)), states(0, 0, 0)).replica for seed in range(6)]
    assert sorted(found) == [0, 0, 1, 1, 2, 2]


def test_a_restarted_replica_is_forgotten():
    policy, history = CacheAware(), prompt(1, 640)
    home = policy.choose(RoutedRequest(history), states(0, 0)).replica
    assert policy.choose(RoutedRequest(history), states(0, 0)).cached_len == 640
    policy.forget(home)
    assert policy.choose(RoutedRequest(history), states(0, 0)).cached_len == 0
    policy.forget(17)


def test_round_robin_passes_over_those_that_are_down():
    policy, request = RoundRobin(), RoutedRequest([1])
    three = states(0, 0, 0)
    assert [policy.choose(request, three).replica for _ in range(4)] == [0, 1, 2, 0]
    assert [policy.choose(request, [three[0], three[2]]).replica for _ in range(3)] == [2, 0, 2]


def test_least_loaded_breaks_ties_by_pages_then_in_turn():
    policy, request = LeastLoaded(), RoutedRequest([1])
    assert [policy.choose(request, states(5, 5, 5)).replica for _ in range(4)] == [0, 1, 2, 0]
    full = [replace(one, kv_usage=0.5 + one.index / 10) for one in states(5, 5, 5)]
    assert policy.choose(request, full[::-1]).replica == 0


def test_policies_have_names(monkeypatch):
    with pytest.raises(PluginError, match="cache-aware"):
        create_policy("fastest")

    class Last:
        plugin_api = 1

        def choose(self, request, replicas):
            return balancing.Choice(replicas[-1].index)

    monkeypatch.setattr(balancing, "Last", Last, raising=False)
    POLICIES.add("last", "headrace.service.balancing:Last", is_out_of_tree=True)
    monkeypatch.setattr(POLICIES, "_entries", dict(POLICIES._entries))
    try:
        assert create_policy("last").choose(RoutedRequest([1]), states(0, 0)).replica == 1
    finally:
        del POLICIES._entries["last"]


class SimulatedReplica:
    """A prefix cache of so many tokens with exact LRU, and the requests that run."""

    def __init__(self, room: int):
        self.cache: OrderedDict[tuple[int, ...], None] = OrderedDict()
        self.running: deque[int] = deque()
        self.room, self.served = room, 0

    def match(self, ids: tuple[int, ...]) -> int:
        return next((n for n in range(len(ids) // BLOCK, 0, -1) if ids[: n * BLOCK] in self.cache), 0) * BLOCK

    def store(self, ids: tuple[int, ...]) -> None:
        for n in range(len(ids) // BLOCK, 0, -1):
            self.cache[ids[: n * BLOCK]] = None
            self.cache.move_to_end(ids[: n * BLOCK])
        while len(self.cache) * BLOCK > self.room:
            self.cache.popitem(last=False)


def converse(policy: Policy, *, num_replicas: int = 4, num_turns: int = 600) -> tuple[float, float, float]:
    """Conversations of up to 10 turns over one system prompt, 24 at a time, each turn 96 tokens in and 64 out; a turn
    runs until 12 later ones have come. Returns the hit rate, that of an oracle (one cache of any size that all replicas
    share), and the busiest replica's share over the mean one."""
    rng = random.Random(5)
    replicas = [SimulatedReplica(room=12_000) for _ in range(num_replicas)]
    everything = SimulatedReplica(room=1 << 60)
    system = prompt(999, 256)
    talks: list[list[int]] = []
    hits = ideal = asked = 0
    in_flight: deque[tuple[int, int]] = deque()
    for _ in range(num_turns):
        if len(talks) < 24:
            talks.append(list(system))
        talk = rng.choice(talks)
        talk += rng.choices(range(1000), k=96)
        while len(in_flight) >= 12:
            index, tokens = in_flight.popleft()
            replicas[index].running.remove(tokens)
        offered = [
            ReplicaState(i, num_running=len(r.running), running_tokens=sum(r.running), num_kv_tokens=r.room)
            for i, r in enumerate(replicas)
        ]
        index = policy.choose(RoutedRequest(list(talk)), offered).replica
        chosen = replicas[index]
        hits, ideal = hits + chosen.match(tuple(talk)), ideal + everything.match(tuple(talk))
        asked, chosen.served = asked + len(talk), chosen.served + 1
        talk += rng.choices(range(1000), k=64)
        chosen.store(tuple(talk))
        everything.store(tuple(talk))
        chosen.running.append(len(talk))
        in_flight.append((index, len(talk)))
        if len(talk) > 256 + 10 * 160:
            talks.remove(talk)
    return hits / asked, ideal / asked, max(r.served for r in replicas) / (num_turns / num_replicas)


def test_conversations_hit_nearly_as_often_as_with_an_oracle():
    rate, ideal, busiest = converse(CacheAware())
    assert rate > 0.9 * ideal
    assert rate > 1.5 * max(converse(RoundRobin())[0], converse(LeastLoaded())[0])
    assert busiest < 1.2, "and the load is spread"
