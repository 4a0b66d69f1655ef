"""The table: results of parts that are in a folder, beside goals, other libraries and fewer GPUs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.many_gpus.plan import V4_LAYERS

VLLM_SECONDS = {
    "llama-3.1-8b": {"latency1": 0.901, "offline256": 8.99, "prefill16x8k": 2.01, "sharedprefix": 1.166},
    "llama-3.3-70b": {"latency1": 5.499, "offline256": 52.2},
    "qwen3-30b-a3b": {"latency1": 1.07, "offline256": 15.9, "prefill16x8k": 1.55},
}
"""vLLM 0.24.0 on two H200, linked by NVLink, bfloat16, random weights, mean of two runs after warm-up."""
GOALS = {
    ("llama-3.1-8b-tp2", "latency1"): 0.62, ("llama-3.1-8b-tp2", "prefill16x8k"): 1.75,
    ("llama-3.1-8b-tp2", "sharedprefix"): 0.80, ("llama-3.1-8b-tp2", "offline256"): 7.0,
    ("llama-3.1-8b-tp2", "start-up"): 12.0,
    ("qwen3-30b-a3b-tp2", "latency1"): 0.55, ("qwen3-30b-a3b-tp2", "prefill16x8k"): 1.2,
    ("qwen3-30b-a3b-tp2", "offline256"): 12.0,
    ("llama-3.3-70b-tp2", "latency1"): 4.6, ("llama-3.3-70b-tp2", "offline256"): 44.0,
    ("llama-3.3-70b-tp4", "latency1"): 2.7, ("llama-3.3-70b-tp4", "offline256"): 24.0,
    ("collectives-4", "all-reduce of 32 KB"): 6.0, ("collectives-8", "all-reduce of 32 KB"): 8.0,
    ("deepseek-v4-flash-dp8-ep8-redundant-experts", "decode64"): 10.0,
}
"""By part and cell, in the cell's unit."""
COMMUNICATION = re.compile(r"^sum_|^sent_|^gather|nccl", re.IGNORECASE)
SIZES = (8, 32, 64, 512, 4096)
"""KB of collectives that are listed."""


@dataclass(frozen=True)
class Row:
    """One figure: less is better. ``gpu_time``: what its GPUs take for the same work, to compare; 0: not compared."""

    part: str
    model: str
    way: str
    gpus: int
    cell: str
    value: float
    unit: str
    gpu_time: float = 0.0
    peer: str = "-"

    @property
    def goal(self) -> float | None:
        """In the same unit."""
        return GOALS.get((self.part, self.cell))


def read_results(folder: Path) -> list[dict[str, Any]]:
    """All results in a folder, by name."""
    found = (json.loads(path.read_text()) for path in sorted(folder.glob("*.json")))
    return [result for result in found if isinstance(result, dict) and "made" in result]


def read_rows(result: dict[str, Any]) -> list[Row]:
    """The figures of one part."""
    part, read = result["part"], READERS[result["part"]["kind"]]
    about = {"part": part["name"], **{key: part[key] for key in ("model", "way", "gpus")}}
    return [Row(**about, **row) for row in read(part, result["made"])]


def _read_cuda(part: dict[str, Any], made: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in made:
        seconds, peer = row["seconds"], row.get("better_peer")
        if part["gpus"] == 2 and part["work"] == 1:
            peer = VLLM_SECONDS.get(part["model"], {}).get(row["cell"])
        elif part["gpus"] > 1:
            peer = None
        compared = 0.0 if row["cell"] == "start-up" else seconds * part["gpus"] / part["work"]
        yield {
            "cell": row["cell"], "value": seconds, "unit": "s", "gpu_time": compared,
            "peer": f"{peer:.3f} s" if peer else "-",
        }


def _read_deepseek_v4(part: dict[str, Any], made: dict[str, Any]) -> Iterator[dict[str, Any]]:
    layers = made["layers"]
    for name, cell in made["cells"].items():
        milliseconds = cell.get("decode_ms", cell["prefill_ms"])
        told = name if layers == V4_LAYERS else f"{name}, {layers} layers"
        yield {
            "cell": told, "value": milliseconds, "unit": "ms", "gpu_time": milliseconds * part["gpus"] / part["work"]
        }


def _read_collectives(part: dict[str, Any], made: dict[str, Any]) -> Iterator[dict[str, Any]]:
    names = {
        "all-reduce": (("one step", "two steps"), "NCCL"), "all-gather": (("gather",), "NCCL gather"),
        "all-to-all": (("all-to-all",), "NCCL all-to-all"),
    }
    for call, (own, library) in names.items():
        for size in SIZES:
            line = made["microseconds"].get(str(size << 10), {})
            times = [line[name] for name in own if name in line]
            if times:
                peer = f"{line[library]:.1f} us (NCCL)" if library in line else "-"
                yield {"cell": f"{call} of {size} KB", "value": min(times), "unit": "us", "peer": peer}


def _read_dispatch(part: dict[str, Any], made: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for tokens, line in made["microseconds"].items():
        local = f"{line['local']:.0f} us (local)" if "local" in line else "-"
        for name in ("all-gather", "all-to-all"):
            if name in line:
                yield {"cell": f"{name}, {tokens} tokens", "value": line[name], "unit": "us", "peer": local}


def _read_pair(part: dict[str, Any], made: dict[str, Any]) -> Iterator[dict[str, Any]]:
    alone = made.get("one", {})
    for key, milliseconds in made["pair"].items():
        if milliseconds is not None:
            peer = alone.get(key)
            yield {
                "cell": key.removesuffix("_ms").replace("_", " "), "value": milliseconds, "unit": "ms",
                "peer": "-" if peer is None else f"{peer:.2f} ms (one)",
            }


def _read_trace(part: dict[str, Any], made: dict[str, Any]) -> Iterator[dict[str, Any]]:
    busy = sum(own for *_, own in made["kernels"])
    share = sum(own for name, *_, own in made["kernels"] if COMMUNICATION.search(name))
    yield {"cell": f"{made['workload']}: communication", "value": 100 * share / busy, "unit": "%"}


READERS = {
    "cuda": _read_cuda, "deepseek_v4": _read_deepseek_v4, "collectives": _read_collectives, "dispatch": _read_dispatch,
    "pair": _read_pair, "trace": _read_trace,
}


def find_efficiency(row: Row, rows: list[Row], gpus: int) -> float | None:
    """What a GPU does of this, as a share of what it does in the best part with so many GPUs; None without one."""
    fewer = [
        other.gpu_time for other in rows
        if other.gpu_time and other.gpus == gpus < row.gpus and (other.model, other.cell) == (row.model, row.cell)
    ]
    return min(fewer) / row.gpu_time if fewer and row.gpu_time else None


def format_table(rows: list[Row], faults: dict[str, str]) -> str:
    """A line a figure, then the parts without one and why."""
    lines = [
        f"{'model':22} {'way':28} {'cell':30} {'here':>12} {'goal':>9} {'/ goal':>6} {'beside':>16} {'of 1':>6} "
        f"{'of 2':>6}"
    ]
    for row in sorted(rows, key=lambda row: (row.model, row.cell, row.gpus)):
        shares = (find_efficiency(row, rows, gpus) for gpus in (1, 2))
        told = [f"{100 * share:.0f} %" if share is not None else "-" for share in shares]
        goal = "-" if row.goal is None else f"{row.goal:g} {row.unit}"
        ratio = "-" if row.goal is None else f"{row.value / row.goal:.2f}"
        lines.append(
            f"{row.model:22} {row.way:28} {row.cell:30} {f'{row.value:.3f} {row.unit}':>12} {goal:>9} {ratio:>6} "
            f"{row.peer:>16} {told[0]:>6} {told[1]:>6}"
        )
    lines += [f"{name}: {fault}" for name, fault in faults.items()]
    lines.append(
        "of 1, of 2: what a GPU does, as a share of what one does where the same model has one GPU or two; goals and "
        "figures: less is better"
    )
    return "\n".join(lines)
