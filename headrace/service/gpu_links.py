"""The links between the GPUs of this machine, for ``headrace check --gpus``: measured by processes of their own, so
that a broken driver ends those; as a matrix, and what follows for parallelism. Torch-free.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from itertools import combinations

import msgspec

from headrace.base.errors import HeadraceError
from headrace.base.spawn import describe_exit, module_environment

MEASURER = "headrace.service.gpu_measuring"
TIMEOUT_S = 300.0
NVLINK_GBS = 60.0
"""Copies are faster than this over NVLink alone: 16 lanes of PCIe 5 carry 63 GB/s."""
LAST_LINES = 3


class Link(msgspec.Struct, frozen=True):
    """Between GPUs ``a`` and ``b``. ``has_p2p``: each reads the other's memory without the host. GB/s of a large copy
    and of a large all-reduce by NCCL (bytes of the tensor by seconds), and microseconds of small ones; ``push_us``: of
    a small all-reduce by Headrace's own kernels, None where they do not run; ``push_problem`` then says why."""

    a: int
    b: int
    has_p2p: bool
    copy_gbs: float
    copy_us: float
    reduce_gbs: float
    reduce_us: float
    push_us: float | None = None
    push_problem: str = ""

    @property
    def is_nvlink(self) -> bool:
        """Whether it is as fast as NVLink alone is."""
        return self.has_p2p and self.copy_gbs > NVLINK_GBS


class Links(msgspec.Struct, frozen=True):
    """``names`` of the GPUs by number, and a link for each pair."""

    names: list[str]
    links: list[Link]


def measure_links(module: str = MEASURER, timeout_s: float = TIMEOUT_S) -> Links:
    """Measure all pairs, one after the other; raises `HeadraceError` with the last words of what failed."""
    command = [sys.executable, "-P", "-m", module]
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout_s, env=module_environment(), check=False)
    except subprocess.TimeoutExpired as error:
        raise HeadraceError(
            f"the GPUs were not measured within {timeout_s:.0f} s: a copy or a collective hangs, and so would an "
            "engine; look at: nvidia-smi, dmesg"
        ) from error
    if done.returncode:
        words = " | ".join(done.stderr.decode(errors="replace").strip().splitlines()[-LAST_LINES:])
        raise HeadraceError(f"the process that measures {describe_exit(done.returncode)}: {words or 'no message'}")
    return msgspec.json.decode(done.stdout, type=Links)


def fast_groups(found: Links) -> list[list[int]]:
    """GPUs that all reach each other over NVLink, largest groups first; each GPU is in one."""
    fast = {frozenset((link.a, link.b)) for link in found.links if link.is_nvlink}
    groups: list[list[int]] = []
    for gpu in range(len(found.names)):
        home = next((group for group in groups if all(frozenset((gpu, other)) in fast for other in group)), None)
        if home is None:
            groups.append([gpu])
        else:
            home.append(gpu)
    return sorted(groups, key=lambda group: (-len(group), group))


def advise(found: Links) -> str:
    """Which kind of parallelism the links suggest, in one line."""
    count = len(found.names)
    if count < 2:
        what = "torch finds no GPU here" if not count else f"there is one GPU, {found.names[0]}"
        return f"{what}: links are measured between two or more"
    missing = [f"{link.a}-{link.b}" for link in found.links if not link.has_p2p]
    groups = fast_groups(found)
    largest = len(groups[0])
    if largest == count:
        slowest = min(link.copy_gbs for link in found.links)
        return f"NVLink between all GPUs ({slowest:.0f} GB/s and more): --tp {count} is a good choice for a large model"
    if largest > 1:
        shown = ", ".join("+".join(map(str, group)) for group in groups if len(group) > 1)
        return (
            f"NVLink within {shown} and slower links between: use --tp {largest} at most, and --pipeline-parallel-size "
            "or --data-parallel-size across"
        )
    if missing:
        return (
            f"P2P is missing between {', '.join(missing)}: all sums of these pass through the host, so prefer "
            "--data-parallel-size to --tp; a virtual machine, IOMMU or ACS of the PCIe switches may be what prevents it"
        )
    fastest = max(link.copy_gbs for link in found.links)
    return (
        f"PCIe between the GPUs ({fastest:.0f} GB/s at most): prefer --data-parallel-size, or --pipeline-parallel-size "
        "for a model that needs more than one; --tp spends much of a step in sums"
    )


def matrix(found: Links, title: str) -> list[str]:
    """One quantity of all pairs as the lines of a table: ``copy``, ``all-reduce`` or ``own all-reduce``."""
    cells = {frozenset((link.a, link.b)): _cell(link, title) for link in found.links}
    rows = [["", *(f"GPU {gpu}" for gpu in range(len(found.names)))]]
    for gpu in range(len(found.names)):
        others = [cells.get(frozenset((gpu, other)), "-") for other in range(len(found.names))]
        rows.append([f"GPU {gpu}", *others])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _cell(link: Link, title: str) -> str:
    if title == "copy":
        return f"{link.copy_gbs:.0f} GB/s {link.copy_us:.1f} us" + ("" if link.has_p2p else " (no P2P)")
    if title == "all-reduce":
        return f"{link.reduce_gbs:.0f} GB/s {link.reduce_us:.1f} us"
    return "none" if link.push_us is None else f"{link.push_us:.1f} us"


def problems(links: Sequence[Link]) -> list[str]:
    """Why own collectives do not run, each reason with its pairs."""
    pairs: dict[str, list[str]] = {}
    for link in links:
        if link.push_us is None and link.push_problem:
            pairs.setdefault(link.push_problem, []).append(f"{link.a}-{link.b}")
    return [f"no own collectives between {', '.join(which)}: {problem}" for problem, which in pairs.items()]


def all_pairs(count: int) -> list[tuple[int, int]]:
    """Pairs of ``count`` GPUs, in the order in which they are measured."""
    return list(combinations(range(count), 2))
