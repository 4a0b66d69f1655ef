"""Counting cores: siblings once, quotas of both kinds of control groups, and machines without either."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.base import env
from headrace.execution import device


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four logical processors on two cores, no control groups."""
    for cpu in range(4):
        folder = tmp_path / "cpu" / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        for name, value in (("physical_package_id", 0), ("die_id", 0), ("core_id", cpu % 2)):
            (folder / name).write_text(f"{value}\n")
    monkeypatch.setattr(device, "TOPOLOGY", tmp_path / "cpu")
    monkeypatch.setattr(env, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(env, "OWN_GROUP", tmp_path / "own")
    monkeypatch.setattr(device.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_siblings_count_once(machine, monkeypatch):
    assert device.count_cores() == 2
    monkeypatch.setattr(device.os, "sched_getaffinity", lambda _: {0, 2})
    assert device.count_cores() == 1


def test_where_nothing_is_told_each_processor_counts(machine, monkeypatch):
    monkeypatch.setattr(device, "TOPOLOGY", machine / "nowhere")
    assert device.count_cores() == 4


@pytest.mark.parametrize(
    ("limit", "count"), [("max 100000", 2), ("100000 100000", 1), ("50000 100000", 1), ("400000 100000", 2), ("", 2)]
)
def test_quotas(machine, limit, count):
    write(machine / "own", "0::/a/b\n")
    write(machine / "groups" / "a" / "cpu.max", limit)
    write(machine / "groups" / "a" / "b" / "cpu.max", "max 100000\n")
    assert device.count_cores() == count


def test_quotas_of_the_first_version(machine):
    write(machine / "own", "5:memory:/x\n4:cpu,cpuacct:/docker/1\n")
    for name, value in (("cpu.cfs_quota_us", "150000"), ("cpu.cfs_period_us", "100000")):
        write(machine / "groups" / "cpu" / name, value)
    assert device.read_quota() == 1.5
    write(machine / "groups" / "cpu" / "cpu.cfs_quota_us", "-1")
    assert device.read_quota() is None


@pytest.mark.parametrize(
    ("count", "shares"), [(1, [None]), (2, [{0, 2}, {1, 3}]), (3, [{0, 2}, {0, 2}, {1, 3}])]
)
def test_replicas_share_the_cores(machine, monkeypatch, count, shares):
    taken = []
    monkeypatch.setattr(device.os, "sched_setaffinity", lambda _, cpus: taken.append(cpus))
    for place in range(count):
        device.take_cores(place, count)
    assert (taken or [None]) == shares


def test_replicas_share_a_quota(machine):
    write(machine / "own", "0::/a\n")
    write(machine / "groups" / "a" / "cpu.max", "200000 100000")
    assert device.count_cores() == 2 and device.count_cores(2) == device.count_cores(4) == 1
