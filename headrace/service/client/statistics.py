"""Statistics of several engines, or of one engine's lives, as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import msgspec

from headrace.base.messages import EngineStats, ExpertStats, SpeculationStats


def sum_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """The statistics of several engines as one."""
    if len(stats) == 1:
        return stats[0]
    total: EngineStats = _add_up(stats)
    # Replicas that divide experts see the same loads, and each replica has loaded all adapters.
    experts = max((one.experts for one in stats), key=lambda own: sum(own.tokens_by_rank))
    num_loaded = max(one.adapters.num_loaded for one in stats)
    return msgspec.structs.replace(
        total, experts=experts, adapters=msgspec.structs.replace(total.adapters, num_loaded=num_loaded)
    )


def counters_of(stats: EngineStats) -> EngineStats:
    """The counters alone, with the gauges of an engine that has nothing: what one that has ended leaves behind."""
    left: EngineStats = _keep_counters(stats)
    return left


def continue_stats(past: EngineStats, stats: EngineStats) -> EngineStats:
    """The statistics of an engine whose counters go on from those that earlier ones in its place have left."""
    total: EngineStats = _add_up([past, stats])
    return total


def _keep_counters(record: Any) -> Any:
    match record:
        case SpeculationStats():
            return record
        case ExpertStats():
            return msgspec.structs.replace(record, balancedness=0.0)
    kept = {}
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if isinstance(value, msgspec.Struct):
            kept[name] = _keep_counters(value)
        elif name.endswith("_total"):
            kept[name] = value
    return type(record)(**kept)


def _add_up(values: Sequence[Any]) -> Any:
    """Add numbers; in lists by position, in dicts by key, in records by field."""
    first = values[0]
    if isinstance(first, msgspec.Struct):
        return type(first)(*map(_add_up, zip(*map(msgspec.structs.astuple, values), strict=True)))
    if isinstance(first, dict):
        return dict(sum(map(Counter, values), Counter()))
    if isinstance(first, list):
        return [sum(counts) for counts in zip_longest(*values, fillvalue=0)]
    return sum(values)
