"""`BalancingOptions`: the JSON object of ``--eplb-config``, with the keys of vLLM (expert-parallel load balancing)."""

from __future__ import annotations

from dataclasses import dataclass, fields

from headrace.base.errors import ConfigError
from headrace.base.option import Section, option, read_object, suggest

OPTION = "eplb_config"


@dataclass(frozen=True, kw_only=True)
class BalancingOptions(Section):
    """When experts move between ranks, and how many copies there are."""

    step_interval: int = option(3000, "steps between two looks at the loads of experts", low=1)
    window_size: int = option(1000, "steps before a look whose loads count", low=1)
    num_redundant_experts: int = option(
        0, "second copies of busy experts, in each layer; with the experts a multiple of the ranks", low=0, high=65536
    )
    log_balancedness: bool = option(False, "log at each look how evenly the ranks are loaded")


def parse_eplb_config(text: str | None) -> BalancingOptions:
    """The options of ``--eplb-config``; raises `ConfigError` naming what is wrong and what is known."""
    if not text:
        return BalancingOptions()
    stated = read_object(text, OPTION, example='{"num_redundant_experts": 8}')
    known = [item.name for item in fields(BalancingOptions)]
    for name in stated:
        if name not in known:
            hint = suggest(name, known, otherwise=f"; known: {', '.join(known)}")
            raise ConfigError(f"{OPTION}: no key {name[:80]!r}{hint}", param=OPTION)
    try:
        return BalancingOptions(**stated)
    except ConfigError as error:
        raise ConfigError(f"{OPTION}: {error}", param=OPTION) from error
