"""Sizing arithmetic: budgets are kept, minimums hold, errors name the fix."""

from __future__ import annotations

import sys
from bisect import bisect_left
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.cache import CACHE_POLICIES, CacheGroup, CacheSpec, group_layers
from headrace.base.config import CacheConfig
from headrace.base.errors import ConfigError
from headrace.memory import plan as plan_module
from headrace.memory.plan import (
    CPU_KV_LIMIT,
    CPU_SOFT_LIMIT,
    CacheDemand,
    check_host,
    kv_budget,
    memory_lines,
    plan_cache,
    soft_budget,
)
from headrace.memory.pools import group_page_bytes
from headrace.models.catalog import find_family

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))
from deepseek_v4_tiny import published_config

FULL = CacheSpec("full", 2, 64, 64, "float32")
WINDOW = CacheSpec("sliding_window", 2, 64, 64, "float32", window=512)


def demand(
    groups: list[CacheGroup], *, length: int = 2048, fixed: bool = False, step: int = 256, rows: int = 8,
    page_size: int = 16
) -> CacheDemand:
    return CacheDemand(groups, page_size, length, is_len_fixed=fixed, max_step_tokens=step, max_rows=rows)


def test_kv_pages_are_taken_exactly():
    plan = plan_cache(demand([CacheGroup(FULL, [0, 1])]), CacheConfig(kv_pages=200), 0)
    assert [g.num_pages for g in plan.groups] == [200] and plan.max_model_len == 2048


def test_one_group_takes_the_whole_budget():
    page = group_page_bytes(CacheGroup(FULL, [0, 1]), 16)
    assert page == 2 * 16 * 2 * 128 * 4
    plan = plan_cache(demand([CacheGroup(FULL, [0, 1])]), CacheConfig(), 500 * page + page - 1)
    assert plan.groups[0].num_pages == 500


def test_context_is_lowered_to_what_fits_unless_the_user_set_it():
    groups = [CacheGroup(FULL, [0])]
    plan = plan_cache(demand(groups), CacheConfig(kv_pages=11), 0)
    assert plan.max_model_len == 160
    with pytest.raises(ConfigError, match="set max_model_len to 160 or less") as caught:
        plan_cache(demand(groups, fixed=True), CacheConfig(kv_pages=11), 0)
    assert caught.value.param == "max_model_len"
    with pytest.raises(ConfigError, match="holds 4 tokens: give the cache more memory"):  # no context is that short
        plan_cache(demand(groups, page_size=1), CacheConfig(kv_pages=5), 0)
    assert plan_cache(demand(groups, length=160, fixed=True), CacheConfig(kv_pages=11), 0).max_model_len == 160


def test_no_memory_at_all_is_a_clear_error():
    with pytest.raises(ConfigError, match="memory_fraction"):
        plan_cache(demand([CacheGroup(FULL, [0])]), CacheConfig(), 1000)


def test_window_share_is_honoured():
    groups = [CacheGroup(WINDOW, [0, 1, 2]), CacheGroup(FULL, [3])]
    plan = plan_cache(demand(groups, step=16), CacheConfig(kv_pages=1000, window_share=0.5), 0)
    assert [g.num_pages for g in plan.groups] == [500, 1000]


def test_window_group_alone_is_the_base():
    plan = plan_cache(demand([CacheGroup(WINDOW, [0])], length=8192), CacheConfig(kv_pages=100), 0)
    assert plan.groups[0].num_pages == 100 and plan.max_model_len == 8192  # 512 + 2 * 256 tokens need 67


def test_model_without_cache():
    assert plan_cache(demand([]), CacheConfig(), 0).groups == []


def test_cpu_budget_is_capped():
    assert kv_budget("cpu", 2**40, 0.9) == CPU_KV_LIMIT
    assert kv_budget("cpu", 2**30, 0.5) == 2**29
    assert kv_budget("cuda", 2**40, 0.5) == 2**39


@settings(max_examples=150, deadline=None)
@given(
    budget=st.integers(2**22, 2**32), length=st.sampled_from([64, 1000, 32768, 131072]),
    window=st.sampled_from([16, 512, 4096]), step=st.sampled_from([16, 1024, 8192]), rows=st.integers(1, 512),
    layers=st.tuples(st.integers(1, 5), st.integers(1, 20)), share=st.none() | st.floats(0.01, 1.0),
)
def test_budget_is_kept_and_every_group_can_serve_the_longest_request(
    budget, length, window, step, rows, layers, share
):
    spec = CacheSpec("sliding_window", 2, 64, 64, "float32", window=window)
    groups = [CacheGroup(FULL, list(range(layers[0]))), CacheGroup(spec, list(range(layers[0], sum(layers))))]
    plan = plan_cache(
        CacheDemand(groups, 16, length, is_len_fixed=False, max_step_tokens=step, max_rows=rows),
        CacheConfig(window_share=share), budget
    )
    full, windowed = plan.groups
    assert sum(g.num_pages * group_page_bytes(g, 16) for g in plan.groups) <= budget
    assert (full.num_pages - 1) * 16 >= plan.max_model_len
    assert (windowed.num_pages - 1) * 16 >= min(plan.max_model_len, window + step)
    assert windowed.num_pages <= full.num_pages
    assert plan.max_model_len <= length


FLASH_28 = {
    "head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "num_hidden_layers": 28, "sliding_window": 128,
    "compress_ratios": [0, 0, *[4, 128] * 13],
}


def count_streams(hot_slots: int, page_size: int, budget: int) -> int:
    """Requests of 65,536 tokens that fit ``budget`` bytes of a GPU with 28 layers of DeepSeek-V4-Flash."""
    family = find_family("DeepseekV4ForCausalLM")
    spec = family.read_config(published_config(**FLASH_28))
    if hot_slots:
        family = family.hosting(spec, hot_slots)
    groups = group_layers(family.cache_specs(spec, "float8_e4m3fn"))
    policies = [CACHE_POLICIES.load(group.spec.kind)(group.spec, page_size) for group in groups]

    def fits(rows: int) -> bool:
        wanted = CacheDemand(
            groups, page_size, 65536, is_len_fixed=True, max_step_tokens=8192, max_rows=rows, host_bytes=2**40
        )
        try:
            plan = plan_cache(wanted, CacheConfig(), budget)
        except ConfigError:
            return False
        needed = [rows * policy.peak_pages(65536) + 1 for policy in policies]
        return all(group.num_pages >= least for group, least in zip(plan.groups, needed, strict=True))

    return bisect_left(range(1, 1000), True, key=lambda rows: not fits(rows))


def test_hot_slots_let_more_streams_into_the_same_memory():
    """As published: about three times as many with twice the top-k, fewer with more."""
    plain, hot, wide = (count_streams(slots, 128, 32 * 2**30) for slots in (0, 1024, 4096))
    assert plain > 100 and hot >= 2.8 * plain and 2.0 * plain <= wide < hot


def test_what_hot_slots_take_is_planned():
    """Of the device by request, of host memory by page; the lesser of the two decides."""
    spec = CacheSpec("mla", 1, 64, 48, "float16", hot_slots=7)
    hosted, key = CacheGroup(spec, [0, 1]), CacheGroup(CacheSpec("full", 1, 8, 8, "float16"), [0, 1])
    page, key_page = group_page_bytes(hosted, 16), group_page_bytes(key, 16)
    wanted = replace(demand([hosted, key]), max_rows=3, host_bytes=40 * page, max_model_len=320)
    assert wanted.hot_bytes >= 4 * 8 * 2 * 64 * 2
    plan = plan_cache(wanted, CacheConfig(), wanted.hot_bytes + 100 * key_page)
    assert [group.num_pages for group in plan.groups] == [40, 40], "host memory is the bound"
    plan = plan_cache(wanted, CacheConfig(), wanted.hot_bytes + 30 * key_page)
    assert [group.num_pages for group in plan.groups] == [30, 30]
    lines = memory_lines(weights=1, activations=0, graphs=0, plan=plan, page_size=16, free=0, max_rows=3)
    assert lines[1].num_bytes == wanted.hot_bytes and "7 hot slots for each of 3 requests" in lines[1].note
    with pytest.raises(ConfigError, match="lower max_running_requests"):
        plan_cache(wanted, CacheConfig(), wanted.hot_bytes)
    with pytest.raises(ConfigError, match="hot_host_gb"):
        plan_cache(replace(wanted, host_bytes=page), CacheConfig(), 2**40)
    with pytest.raises(ConfigError, match="41 pages take"):
        plan_cache(wanted, CacheConfig(kv_pages=41), 2**40)


def test_host_memory_that_others_have_taken_since_is_an_error(monkeypatch: pytest.MonkeyPatch):
    spec = CacheSpec("mla", 1, 64, 48, "float16", hot_slots=7)
    hosted, other = CacheGroup(spec, [0, 1], 40), CacheGroup(FULL, [0, 1], 40)
    needed = 40 * group_page_bytes(hosted, 16)
    monkeypatch.setattr(plan_module, "free_bytes", lambda _: needed)
    check_host([hosted, other], 16)
    monkeypatch.setattr(plan_module, "free_bytes", lambda _: needed - 1)
    with pytest.raises(ConfigError, match="free some"):
        check_host([hosted, other], 16)
    check_host([other], 16)


def test_memory_lines_add_up_and_skip_what_is_empty():
    groups = [CacheGroup(FULL, [0, 1])]
    plan = plan_cache(demand(groups), CacheConfig(kv_pages=200), 0)
    lines = memory_lines(weights=1000, activations=0, graphs=0, plan=plan, page_size=16, free=5)
    assert [line.name for line in lines] == ["weights", "KV full", "free"]
    assert lines[1].num_bytes == 200 * group_page_bytes(plan.groups[0], 16)
    assert "3,184 tokens" in lines[1].note


def test_on_a_cpu_stored_prefixes_may_take_as_much_as_the_weights_do():
    assert (
        soft_budget("cuda", 10**9) == 0 and soft_budget("cpu", 10**9) == 10**9 // 2
        and soft_budget("cpu", 10**6) == CPU_SOFT_LIMIT
    )
    page = group_page_bytes(CacheGroup(FULL, [0, 1]), 16)
    group = plan_cache(demand([CacheGroup(FULL, [0, 1])]), CacheConfig(), 500 * page, 200 * page).groups[0]
    assert (group.num_pages, group.soft_pages) == (500, 200)
    chosen = plan_cache(demand([CacheGroup(FULL, [0, 1])]), CacheConfig(kv_pages=300), 500 * page, 200 * page).groups[0]
    assert (chosen.num_pages, chosen.soft_pages) == (300, 0), "what the user sets is what may be used"
    groups = plan_cache(
        demand([CacheGroup(WINDOW, [0]), CacheGroup(FULL, [1])]), CacheConfig(), 2000 * page, 1000 * page
    ).groups
    assert (
        sum(g.soft_pages * group_page_bytes(g, 16) for g in groups) <= 1000 * page
        and all(0 < g.soft_pages <= g.num_pages for g in groups)
    )
