"""What ``headrace check --gpus`` makes of measurements. The measurements themselves need two GPUs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from headrace.base.errors import HeadraceError
from headrace.service import gpu_links
from headrace.service.gpu_links import Link, Links, advise, all_pairs, fast_groups, matrix, measure_links, problems
from headrace.serving.cli.main import main


def links(count: int, fast: set[tuple[int, int]] = frozenset(), *, p2p: bool = True, push: bool = True) -> Links:
    """Of GPUs of which the pairs ``fast`` have NVLink."""
    return Links([f"H{gpu}" for gpu in range(count)], [
        Link(a, b, p2p or (a, b) in fast, 380.0 if (a, b) in fast else 24.0, 2.5, 170.0, 19.3,
             3.25 if push else None, "" if push else "no such kernel")
        for a, b in all_pairs(count)
    ])


@pytest.mark.parametrize(("found", "says"), [
    (links(0), "torch finds no GPU here: links are measured between two or more"),
    (links(1), "there is one GPU, H0"),
    (links(2, {(0, 1)}), "NVLink between all GPUs (380 GB/s and more): --tp 2"),
    (links(8, set(all_pairs(8))), "--tp 8"),
    (links(4, {(0, 1), (2, 3)}), "NVLink within 0+1, 2+3 and slower links between: use --tp 2 at most"),
    (links(4, {(0, 2), (1, 3)}, p2p=False), "NVLink within 0+2, 1+3"),
    (links(3), "PCIe between the GPUs (24 GB/s at most): prefer --data-parallel-size"),
    (links(2, p2p=False), "P2P is missing between 0-1"),
])
def test_advice(found: Links, says: str):
    assert says in advise(found) and "\n" not in advise(found)


def test_a_gpu_is_in_one_group_whose_members_all_reach_each_other():
    """A chain of links is no group of three."""
    assert fast_groups(links(4, {(0, 1), (1, 2)})) == [[0, 1], [2], [3]]


def test_matrices():
    found = links(3, {(0, 1)}, p2p=False, push=False)
    lines = matrix(found, "copy")
    assert len(lines) == 4 and len({len(line) for line in lines}) == 1
    assert lines[0].split() == ["GPU", "0", "GPU", "1", "GPU", "2"]
    assert "380 GB/s 2.5 us  24 GB/s 2.5 us (no P2P)" in " ".join(lines[1].split("   ")).replace("   ", "  ")
    assert "170 GB/s 19.3 us" in matrix(found, "all-reduce")[3]
    assert matrix(found, "own all-reduce")[1].split()[2:] == ["-", "none", "none"]
    assert "3.2 us" in matrix(links(2), "own all-reduce")[1]
    assert problems(found.links) == ["no own collectives between 0-1, 0-2, 1-2: no such kernel"]


def fake_module(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> str:
    (folder / "fake_measuring.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    return "fake_measuring"


@pytest.mark.parametrize(("text", "says"), [
    ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", r"died with signal 11 \(SIGSEGV\): no message"),
    ("import os; os.kill(os.getpid(), 40)", "died with signal 40: no message"),
    ("import sys; sys.exit('CUDA driver is broken')", "code 1: CUDA driver is broken"),
    ("import time; time.sleep(60)", "not measured within 2 s"),
])
def test_a_broken_driver_ends_the_child_alone(tmp_path: Path, monkeypatch, text: str, says: str):
    with pytest.raises(HeadraceError, match=says):
        measure_links(fake_module(tmp_path, monkeypatch, text), timeout_s=2.0)


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(gpu_links, "measure_links", lambda: links(2, {(0, 1)}, push=False))
    assert main(["check", "--gpus"]) == 0
    text = capsys.readouterr().out
    assert "GPU 1: H1" in text and "380 GB/s" in text and "NVLink between all GPUs" in text and "no such kernel" in text
    assert main(["check", "--gpus", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["links"][0]["copy_gbs"] == 380.0 and "--tp 2" in report["advice"]


def test_without_gpus_it_says_so(capsys: pytest.CaptureFixture[str]):
    """By the real child, on a machine without two of them."""
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() > 1:
        pytest.skip("there are GPUs")
    assert main(["check", "--gpus"]) == 0
    assert "measured between two or more" in capsys.readouterr().out


@pytest.mark.cuda
def test_real_links():
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    found = measure_links()
    assert len(found.names) == torch.cuda.device_count() and len(found.links) == len(all_pairs(len(found.names)))
    for link in found.links:
        assert 1 < link.copy_gbs < 2000 and 0.5 < link.reduce_us < 5000 and link.reduce_gbs > 0.5
    print(advise(found), file=sys.stderr)
