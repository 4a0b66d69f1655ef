"""Engines and a remote store between them: prefixes that one has computed serve the other, and a store that dies, hangs
or lies costs requests nothing but time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_tiers_served import GB, complete, save

from headrace.base.config import engine_config
from headrace.base.messages import EngineRequest
from headrace.base.sampling import SamplingSpec, StopSpec
from headrace.memory.storage import PAGE_STORES, isolated, lane
from headrace.service.build import build_engine
from headrace.service.engine import Engine

PLUGIN = """
import os, time
from pathlib import Path

class Store:
    plugin_api = 1

    def __init__(self, options):
        self.folder = Path(options.config["folder"])
        self.orders = Path(options.config["orders"])

    def exists(self, names):
        while (self.orders / "sleep").exists():
            time.sleep(0.01)
        return [(self.folder / name).exists() for name in names]

    def get(self, names, buffers):
        (self.orders / "asked").touch()
        found = []
        for number, (name, buffer) in enumerate(zip(names, buffers)):
            path = self.folder / name
            found.append(path.exists())
            if found[-1]:
                buffer[:] = path.read_bytes()
            if (self.orders / "die").exists():
                os.abort()
            while (self.orders / "hang").exists():
                time.sleep(0.01)
            if (self.orders / "raise").exists():
                raise OSError("the network is down")
            if (self.orders / "lie").exists():
                buffer[: len(buffer) // 2] = bytes(len(buffer) // 2)
        return found

    def put(self, names, buffers):
        for name, buffer in zip(names, buffers):
            partial = self.folder / f"{name}.{os.getpid()}.part"
            partial.write_bytes(buffer)
            partial.rename(self.folder / name)
        return [True] * len(names)

    def close(self):
        pass
"""


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Makes engines of one model that share a store, whose pages are in ``pages`` and whose orders in ``orders``."""
    site, pages, orders = (tmp_path / name for name in ("site", "pages", "orders"))
    for folder in (site, pages, orders):
        folder.mkdir()
    (site / "obedient_shelf.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(site))
    PAGE_STORES.add("obedient", "obedient_shelf:Store", is_out_of_tree=True)
    own = json.dumps({"folder": str(pages), "orders": str(orders)})
    folder, options, _ = save("Llama", tmp_path / "model")
    engines: list[Engine] = []

    def build(**more: Any) -> Engine:
        remote = {"host_cache_gb": GB, "remote_cache": "obedient", "remote_cache_config": own}
        engines.append(build_engine(engine_config(model=folder, skip_tokenizer=True, **options | remote | more)))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


@pytest.fixture
def prompts() -> list[list[int]]:
    """Of several pages, with nothing in common."""
    return [[(7 * number + 3 * at) % 50 + 1 for at in range(60)] for number in range(3)]


def await_written(engine: Engine, pages: Path) -> None:
    """Until pages stop coming."""
    count, since = -1, time.monotonic()
    while time.monotonic() - since < 0.5:
        complete(engine, [[5]])
        if (found := len(list(pages.iterdir()))) != count:
            count, since = found, time.monotonic()
        time.sleep(0.02)
    assert count > 0


def test_engines_share_their_prefixes_through_a_store(
    build: Callable[..., Engine], prompts: list[list[int]], tmp_path: Path
):
    first, second = build(), build()
    expected = complete(first, prompts)
    await_written(first, tmp_path / "pages")
    assert complete(second, prompts) == expected
    found = second.stats().tiers.storage
    assert found.read_pages_total > 0 and found.failed_pages_total == 0
    others = [[*prompts[0][:40], *range(number, number + 20)] for number in (1, 21)]
    again = complete(second, others)
    await_written(second, tmp_path / "pages")
    read = first.stats().tiers.storage.read_pages_total
    assert complete(first, others) == again, "and back"
    assert first.stats().tiers.storage.failed_pages_total == 0 and first.stats().tiers.storage.read_pages_total > read


@pytest.mark.parametrize("order", ["die", "hang", "raise", "lie"])
def test_a_store_that_fails_in_the_middle_of_a_read_costs_a_computation(
    order: str, build: Callable[..., Engine], prompts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The request was admitted to the wait for its pages; it gets its tokens, and no page stays behind."""
    monkeypatch.setattr(isolated, "RESTART_S", 0.1)
    monkeypatch.setattr(lane, "GET_TIMEOUT_S", 0.5)
    monkeypatch.setattr(lane, "PAUSE_S", 0.2)
    writer = build()
    expected = complete(writer, prompts)
    await_written(writer, tmp_path / "pages")
    engine, orders = build(), tmp_path / "orders"
    (orders / order).touch()
    assert complete(engine, prompts) == expected
    assert (orders / "asked").exists(), "the store was reading"
    tiers = engine.stats().tiers
    assert tiers.storage.read_pages_total == 0 and tiers.host.failed_pages_total == 0
    assert tiers.storage.failed_pages_total > 0
    (orders / order).unlink()
    until = time.monotonic() + 60
    while engine.stats().tiers.storage.read_pages_total == 0:
        assert time.monotonic() < until, "the store is not asked any more"
        assert engine.reset_prefix_cache()
        assert complete(engine, prompts) == expected
        time.sleep(0.05)
    engine.check()


def test_a_slow_store_delays_each_request_once_and_is_asked_again_after_its_pause(
    build: Callable[..., Engine], prompts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lane, "EXISTS_TIMEOUT_S", 0.3)
    monkeypatch.setattr(lane, "PAUSE_S", 3.0)
    writer = build()
    expected = complete(writer, prompts)
    await_written(writer, tmp_path / "pages")
    engine, orders = build(), tmp_path / "orders"
    (orders / "sleep").touch()
    paused_from = time.monotonic()
    assert complete(engine, prompts) == expected
    assert engine.stats().tiers.storage.read_pages_total == 0
    (orders / "sleep").unlink()
    assert engine.reset_prefix_cache()
    if time.monotonic() < paused_from + 2.0:
        assert complete(engine, prompts) == expected
        assert engine.stats().tiers.storage.read_pages_total == 0, "it is left alone"
        assert engine.reset_prefix_cache()
    time.sleep(max(0.0, paused_from + 3.6 - time.monotonic()))
    assert complete(engine, prompts) == expected
    assert engine.stats().tiers.storage.read_pages_total > 0
    engine.check()


def test_requests_that_wait_together_for_a_store_that_dies_all_end(
    build: Callable[..., Engine], prompts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its process is killed while it reads for several of them."""
    monkeypatch.setattr(isolated, "RESTART_S", 60.0)
    writer = build()
    expected = complete(writer, prompts)
    await_written(writer, tmp_path / "pages")
    before = {child.pid for child in psutil.Process().children()}
    engine, orders = build(), tmp_path / "orders"
    (store,) = [child for child in psutil.Process().children() if child.pid not in before]
    (orders / "hang").touch()
    tokens: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    for name, prompt in zip(tokens, prompts, strict=True):
        engine.submit(EngineRequest(name, prompt, SamplingSpec(), StopSpec(max_tokens=4)))
    until, reasons = time.monotonic() + 60, dict[str, str]()
    while engine.has_work:
        assert time.monotonic() < until
        if store.is_running() and (orders / "asked").exists():
            store.kill()
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
            if output.finish is not None:
                reasons[output.request_id] = output.finish.reason
    assert list(tokens.values()) == expected and list(reasons.values()) == ["length"] * len(prompts)
    assert not store.is_running() and engine.stats().tiers.storage.read_pages_total == 0
    engine.check()
