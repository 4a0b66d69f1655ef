"""Pools and page tables: shapes, laziness, finiteness, copies, bounds."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from headrace.base import env
from headrace.base.cache import CacheGroup, CacheLayout, CacheSpec
from headrace.base.errors import PluginError
from headrace.base.step import PageAppend
from headrace.memory.page_tables import PageTables
from headrace.memory.plan import free_bytes
from headrace.memory.pools import build_pool

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["full", "sliding_window"])
def test_layers_are_contiguous_aligned_zero_and_apart(kind: str, dtype: str):
    pool = build_pool(CacheGroup(CacheSpec(kind, 3, 8, 5, dtype), [2, 4], 7), 4, CPU)
    tensors = [t for layer in (2, 4) for t in pool.layer(layer)]
    assert [tuple(t.shape) for t in tensors] == [(7, 4, 3, 8), (7, 4, 3, 5)] * 2
    for t in tensors:
        assert t.is_contiguous() and t.data_ptr() % 64 == 0 and str(t.dtype) == f"torch.{dtype}"
        assert not t.any()
        t.fill_(1.0)
    assert pool.num_bytes == sum(t.nbytes for t in tensors)
    assert len({t.data_ptr() for t in tensors}) == 4


def test_untouched_pages_take_no_resident_memory():
    process = psutil.Process()
    before = process.memory_info().rss
    pool = build_pool(CacheGroup(CacheSpec("full", 4, 64, 64, "float32"), [0], 2**14), 16, CPU)
    assert pool.num_bytes == 2**29
    assert process.memory_info().rss - before < 2**25


def test_latent_pages_hold_keys_and_values_in_one():
    group = CacheGroup(CacheSpec("mla", 1, 6, 4, "bfloat16"), [1], 5)
    pool = build_pool(group, 4, CPU)
    k, v = pool.layer(1)
    assert k.shape == (5, 4, 1, 6) and k.is_contiguous() and not k.any()
    assert pool.num_bytes == k.nbytes == pool.page_bytes(group.spec, 4) * 5
    k.copy_(torch.arange(120.0).view(5, 4, 1, 6))
    assert torch.equal(v, k[..., :4]) and v.data_ptr() == k.data_ptr()


def test_unknown_kind_is_told():
    with pytest.raises(PluginError, match="known"):
        build_pool(CacheGroup(CacheSpec("holographic", 1, 2, 2, "float32"), [0], 6), 2, CPU)


@pytest.fixture
def tables() -> PageTables:
    spec = CacheSpec("full", 1, 2, 2, "float32")
    return PageTables(CacheLayout(4, 3, 17, [CacheGroup(spec, [0], 50), CacheGroup(spec, [1], 20)]), CPU)


def test_appends_land_in_their_row_and_group(tables: PageTables):
    assert tables.tensor.shape == (2, 4, 6) and not tables.tensor.any()
    index, pages = tables.flatten([PageAppend(0, 1, 2, [7, 49]), PageAppend(1, 2, 0, [19])])
    tables.write(torch.from_numpy(index), torch.from_numpy(pages))
    expected = torch.zeros(2, 4, 6, dtype=torch.int32)
    expected[0, 1, 2], expected[0, 1, 3], expected[1, 2, 0] = 7, 49, 19
    assert torch.equal(tables.tensor, expected)
    tables.clear(torch.tensor([1]))
    expected[:, 1] = 0
    assert torch.equal(tables.tensor, expected)


def test_pages_that_follow_each_other(tables: PageTables):
    def find(*appends: PageAppend) -> list[int | None]:
        tables.flatten(list(appends))
        return [tables.find_run(0, 1, count) for count in range(1, 6)]

    assert find() == [None] * 5
    assert find(
        PageAppend(0, 1, 0, [4, 5]), PageAppend(0, 1, 2, [6]), PageAppend(1, 1, 0, [9]), PageAppend(0, 2, 3, [7])
    ) == [4, 4, 4, None, None]
    assert find(PageAppend(0, 1, 3, [8]), PageAppend(0, 1, 4, [8])) == [4, 4, 4, None, None], "one is missing between"
    assert find(PageAppend(0, 1, 1, [30, 31])) == [4, None, None, None, None], "replaced"
    assert find(PageAppend(0, 1, 0, [30])) == [30, None, None, None, None]
    assert find(PageAppend(0, 1, 1, [31, 32, 12])) == [30, 30, 30, None, None]
    assert find(PageAppend(0, 1, 3, [33])) == [30, 30, 30, 30, None]


@pytest.mark.parametrize(
    "append",
    [
        PageAppend(0, 3, 0, [1]), PageAppend(0, 0, 5, [1, 2]), PageAppend(1, 0, 0, [20]), PageAppend(0, 0, -1, [1]),
        PageAppend(0, 0, 0, [-1])
    ]
)
def test_appends_outside_are_refused(tables: PageTables, append: PageAppend):
    with pytest.raises(AssertionError):
        tables.flatten([append])


def write_group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(f"{text}\n")


def test_free_memory_respects_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The own one and those around it, in both versions."""
    monkeypatch.setattr(env, "GROUPS", tmp_path)
    monkeypatch.setattr(env, "OWN_GROUP", tmp_path / "own")
    total = free_bytes(CPU)
    assert 0 < total <= psutil.virtual_memory().total
    (tmp_path / "own").write_text("0::/service/job\n")
    write_group(tmp_path / "service/job", current="700", stat="anon 500\ninactive_file 150", max="1000")
    assert free_bytes(CPU) == 450
    write_group(tmp_path / "service", current="900", stat="inactive_file 160", max="1000")
    assert free_bytes(CPU) == 260
    write_group(tmp_path / "service", max="max")
    write_group(tmp_path / "service/job", max="max")
    assert free_bytes(CPU) > 1000
    (tmp_path / "own").write_text("4:memory:/docker/1\n0::/\n")
    write_group(
        tmp_path / "memory", usage_in_bytes="700", stat="total_inactive_file 100\ninactive_file 7",
        limit_in_bytes="1000"
    )
    assert free_bytes(CPU) == 400
