"""``/metrics``: every series is documented, and counts what it says."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
from fake_apps import http_for
from prometheus_client.parser import text_string_to_metric_families

from headrace.base.messages import (
    EngineStats,
    HotSlotStats,
    SpeculationStats,
    StatsByTier,
    TierStats,
    TransferStats,
)
from headrace.base.server_config import OperationsConfig
from headrace.serving.http.transport.metrics import Metrics

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"


async def series(http) -> dict[tuple[str, tuple[str, ...]], float]:
    text = (await http.get("/metrics")).text
    return {
        (s.name, tuple(sorted(s.labels.values()))): s.value
        for f in text_string_to_metric_families(text)
        for s in f.samples
    }


def test_names_are_documented():
    documented = re.findall(r"^\| `(headrace_\w+)`", DOCUMENT.read_text(), re.MULTILINE)
    assert sorted(documented) == sorted(Metrics().names())


async def test_requests_are_counted(http, client):
    await http.post("/v1/completions", json={"prompt": ["abc", "d"], "max_tokens": 5, "n": 2, "seed": 1})
    await http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "stream": True}
    )
    await http.post("/v1/completions", json={"prompt": "BREAK1"})
    await http.post("/v1/completions", json={"prompt": "x", "n": 0})
    await http.get("/nope/xyz")
    await http.request("BREW", "/health")
    await http.get("/v1/models/fake-model")
    found = await series(http)
    assert (
        found["headrace_requests_finished_total", ("length",)] == 5
        and found["headrace_requests_finished_total", ("error",)] == 1
    )
    assert found["headrace_time_to_first_token_seconds_count", ()] == 4
    assert found["headrace_inter_token_latency_seconds_count", ()] == 4 * 4 + 2
    assert found["headrace_e2e_request_latency_seconds_count", ()] == 4
    assert found["headrace_request_generation_tokens_sum", ()] == 20 + 3 + 1
    assert found["headrace_request_prompt_tokens_sum", ()] == 4 + 2 + len("user: x\nassistant:") + 7
    assert found["headrace_http_requests_total", ("/v1/completions", "200", "POST")] == 1
    assert found["headrace_http_requests_total", ("/v1/completions", "400", "POST")] == 1
    assert found["headrace_http_requests_total", ("/v1/completions", "500", "POST")] == 1
    assert found["headrace_http_requests_total", ("404", "GET", "unmatched")] == 1
    assert found["headrace_http_requests_total", ("/health", "405", "other")] == 1
    assert found["headrace_http_requests_total", ("/v1/models/{model:path}", "200", "GET")] == 1
    assert found["headrace_http_requests_active", ()] == 1 and found["headrace_ready", ()] == 1


async def test_a_line_for_each_request_when_asked_for(client, caplog):
    async with http_for(client, operations=OperationsConfig(log_requests="line")) as http:
        with caplog.at_level("INFO", "headrace.serving.http.transport.access"):
            await http.get("/x%0a2026-01-01 INFO forged", headers={"X-Request-Id": "m e"})
    (line,) = [r.getMessage() for r in caplog.records]
    assert re.fullmatch(r"[\d.]+ GET /x%0A2026-01-01%20INFO%20forged -> 404 in [\d.]+ s, id m%20e", line)


async def test_engine_figures(http, client):
    found = await series(http)
    assert found["headrace_kv_cache_usage_ratio", ()] == 0.4 and found["headrace_kv_cache_evictable_ratio", ()] == 0.15
    assert [found[f"headrace_kv_{name}", ()] for name in ("pages", "used_pages", "evictable_pages")] == [100, 40, 15]
    client.state = "restarting"
    found = await series(http)
    assert found["headrace_ready", ()] == 0 and found["headrace_kv_pages", ()] == 100, "the last known figures"


TIERS = {
    **{f"headrace_host_cache_{name}": count for count, name in enumerate((
        "pages", "used_pages", "written_pages_total", "read_pages_total", "evicted_pages_total", "failed_pages_total",
        "hit_tokens_total", "late_requests_total",
    ), 1)},
    **{f"headrace_storage_cache_{name}": count for count, name in enumerate((
        "written_pages_total", "read_pages_total", "failed_pages_total", "hit_tokens_total", "late_requests_total",
    ), 11)},
    **{f"headrace_transfer_{name}_total": count for count, name in enumerate((
        "sent_requests", "received_requests", "lost_requests", "sent_pages", "received_pages",
    ), 21)},
    "headrace_hot_slots_wanted_entries_total": 31, "headrace_hot_slots_loaded_entries_total": 32,
}


async def test_every_tier_has_figures_from_the_first_scrape_on(http, client, monkeypatch):
    """Zeros before the first request, so that rates count it; then each tier's own."""
    found = await series(http)
    assert {name: found[name, ()] for name in TIERS} == dict.fromkeys(TIERS, 0)
    tiers = StatsByTier(
        TierStats(*range(1, 9)), TierStats(0, 0, 11, 12, 0, 13, 14, 15), TransferStats(*range(21, 26)),
        HotSlotStats(31, 32)
    )

    async def current() -> EngineStats:
        return EngineStats(tiers=tiers)

    monkeypatch.setattr(client, "stats", current)
    found = await series(http)
    assert {name: found[name, ()] for name in TIERS} == TIERS


async def test_applications_do_not_share_metrics(http):
    from fake_client import FakeClient

    await http.get("/health")
    async with http_for(FakeClient()) as other:
        assert ("headrace_http_requests_total", ("/health", "200", "GET")) not in await series(other)


async def test_speculation_is_counted_as_in_other_servers(http, client, monkeypatch):
    stats = EngineStats(speculation=SpeculationStats(5, 20, 9, [5, 3, 1]))

    async def current() -> EngineStats:
        return stats

    monkeypatch.setattr(client, "stats", current)
    found = await series(http)
    assert found["headrace_spec_decode_num_drafts_total", ()] == 5
    assert found["headrace_spec_decode_num_draft_tokens_total", ()] == 20
    assert found["headrace_spec_decode_num_accepted_tokens_total", ()] == 9
    name = "headrace_spec_decode_num_accepted_tokens_per_pos_total"
    assert [found[name, (str(position),)] for position in range(3)] == [5, 3, 1]
    shown = (await http.get("/server_info")).json()["stats"]
    assert shown["speculation"]["num_accepted_tokens"] == 9
    assert msgspec.convert(msgspec.to_builtins(stats), EngineStats) == stats  # as it comes from the engine
