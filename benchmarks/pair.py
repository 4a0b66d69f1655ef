"""Two checkouts, one benchmark, in turns on one machine, so that both meet the same disturbances.

    python -m benchmarks.pair OLD_FOLDER NEW_FOLDER --rounds 3 -- benchmarks.cuda --models qwen3-0.6b

Runs ``python -m BENCHMARK ARGUMENTS --json FILE`` in each folder, old and new in turns and in changing order, and
prints for every number in the JSON the median of both and new / old, with the ratio of each round. A benchmark without
``--json`` cannot be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("model", "name", "server", "workload", "cell", "case", "kind")
"""Fields of a record that say which it is; numbers of equal records are compared."""


def numbers(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """``(path, number)`` of every number in a JSON document; records in lists are distinguished by `NAMES`."""
    if isinstance(value, dict):
        label = tuple(str(value[name]) for name in NAMES if isinstance(value.get(name), str))
        for key, inner in value.items():
            yield from numbers(inner, (*path, *label, key))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from numbers(inner, path if isinstance(inner, dict) else (*path, str(place)))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, float(value)


def run(folder: Path, command: list[str], timeout: float) -> dict[tuple[str, ...], float]:
    """The numbers of one run in a checkout."""
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "rows.json"
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(
            [sys.executable, "-m", *command, "--json", str(target)], cwd=folder, env=environment, timeout=timeout,
            capture_output=True, text=True
        )
        if done.returncode or not target.exists():
            raise SystemExit(f"{command[0]} in {folder} exited with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return dict(numbers(json.loads(target.read_text())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fields", nargs="*", default=[], help="only numbers whose path ends with one of these")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one run")
    parser.add_argument("--json", type=Path, help="write all measured values here")
    given = sys.argv[1:]
    ours = given[: given.index("--")] if "--" in given else given
    args, command = parser.parse_args(ours), given[len(ours) + 1:]
    if not command:
        parser.error("name a benchmark and its arguments after --")
    found: dict[tuple[str, ...], dict[str, list[float]]] = defaultdict(lambda: {"old": [], "new": []})
    for place in range(args.rounds):
        sides = [("old", args.old), ("new", args.new)]
        for side, folder in sides if place % 2 == 0 else reversed(sides):
            for path, value in run(folder.resolve(), command, args.timeout).items():
                if not args.fields or path[-1] in args.fields:
                    found[path][side].append(value)
        print(f"round {place + 1} of {args.rounds} is done", flush=True)
    print(f"{'':60s} {'old':>10s} {'new':>10s} {'new / old':>10s}   each round's ratio")
    for path, sides in found.items():
        old, new = sides["old"], sides["new"]
        if not old or not new or not any(old):
            continue
        ratios = [b / a for a, b in zip(old, new, strict=False) if a]
        print(
            f"{' '.join(path)[-60:]:60s} {statistics.median(old):10.4g} {statistics.median(new):10.4g} "
            f"{statistics.median(ratios):10.3f}   {' '.join(f'{ratio:.3f}' for ratio in ratios)}", flush=True
        )
    if args.json:
        args.json.write_text(json.dumps([{"path": path, **sides} for path, sides in found.items()], indent=1))


if __name__ == "__main__":
    main()
