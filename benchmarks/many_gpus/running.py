"""Runs parts, one process after the other, each with a time limit; what has a result is not run again.

A folder has of each part NAME.json (its result, written last), NAME.log (all it printed) or NAME.failed (why there is
no result; it is tried again by the next call).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import psutil

from benchmarks.cpu_servers import end
from benchmarks.many_gpus.plan import Part

LEAST_SECONDS = 40
"""A part is not begun with less time left."""
NO_TIME = "no time left"


def result_of(part: Part, folder: Path) -> Path:
    """Where its result is, once there is one."""
    return folder / f"{part.name}.json"


def run_part(part: Part, folder: Path, limit_s: float) -> str | None:
    """Run one part and write its result; returns what went wrong."""
    with tempfile.TemporaryDirectory() as scratch:
        made, began = Path(scratch) / "made.json", time.monotonic()
        with (folder / f"{part.name}.log").open("w") as log:
            command = [sys.executable, "-m", *part.command, "--json", str(made)]
            process = psutil.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            try:
                status = process.wait(limit_s)
            except psutil.TimeoutExpired:
                return f"took more than {limit_s:.0f} s"
            finally:
                end(process)  # with its ranks, which would keep their GPUs from the next part
        if status or not made.exists():
            return f"exit status {status}, {part.name}.log has more"
        about = {"part": asdict(part), "wall_s": round(time.monotonic() - began, 1)}
        partial = folder / f"{part.name}.partial"
        partial.write_text(json.dumps({**about, "made": json.loads(made.read_text())}, indent=1))
        partial.replace(result_of(part, folder))  # a result is whole, or not there
    return None


def run_parts(parts: list[Part], folder: Path, seconds: float = float("inf")) -> dict[str, str]:
    """Run those without a result, for so many seconds together; returns by name why there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    finish, faults = time.monotonic() + seconds, {}
    for part in parts:
        if result_of(part, folder).exists():
            print(f"{part.name}: done before", flush=True)
            continue
        left = finish - time.monotonic()
        if left < min(LEAST_SECONDS, part.limit_s):
            faults[part.name] = NO_TIME
            continue
        failed = folder / f"{part.name}.failed"
        failed.unlink(missing_ok=True)
        began = time.monotonic()
        try:
            fault = run_part(part, folder, min(part.limit_s, left))
        except (OSError, ValueError) as error:
            fault = f"{type(error).__name__}: {error}"
        if fault:
            faults[part.name] = fault
            failed.write_text(fault + "\n")
        print(f"{part.name}: {fault or 'done'} after {time.monotonic() - began:.0f} s", flush=True)
    return faults
