"""Models and collectives on 2, 4 or 8 GPUs of one host, and what each GPU does of it, compared with fewer.

    python -m benchmarks.many_gpus [--gpus 4] [--parts NAME ...] [--list] [--out FOLDER] [--seconds S]

Each part is a process of its own, with random weights and a limit below eight minutes; parts come in order of
importance. A part whose result is in the folder is not run again, and one that fails does not stop the others, so that
calls with the same folder go on where the last one ended. The table comes last, with all results of the folder: take
the same one for 2, 4 and 8.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from fnmatch import fnmatch
from pathlib import Path

from benchmarks.many_gpus.plan import Part, list_parts
from benchmarks.many_gpus.running import result_of, run_parts
from benchmarks.many_gpus.table import format_table, read_results, read_rows


def choose(parts: list[Part], names: list[str]) -> list[Part]:
    """Those with one of these names, which may have ``*``; all without names. Raises `SystemExit` for unknown ones."""
    for name in names:
        if not any(fnmatch(part.name, name) for part in parts):
            raise SystemExit(f"no part {name!r}; there are {', '.join(part.name for part in parts)}")
    return [part for part in parts if not names or any(fnmatch(part.name, name) for name in names)]


def tell(part: Part, folder: Path) -> str:
    """A line of ``--list``."""
    done = "done" if result_of(part, folder).exists() else f"<= {part.limit_s:.0f} s"
    return f"{part.name:44} {part.gpus} GPUs  {done:>8}  python -m {shlex.join(part.command)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=4, choices=(2, 4, 8))
    parser.add_argument("--parts", nargs="+", default=[], metavar="NAME", help="only these; * stands for anything")
    parser.add_argument("--list", action="store_true", help="tell the parts, and run nothing")
    parser.add_argument("--out", type=Path, default=Path("many_gpus"), help="folder of results")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all parts together")
    parser.add_argument("--layers", type=int, default=0, help="of DeepSeek-V3's shape; 0: as many as fit")
    args = parser.parse_args()
    parts = choose(list_parts(args.gpus, args.layers), args.parts)
    if args.list:
        print("\n".join(tell(part, args.out) for part in parts))
        return
    import torch

    if (found := torch.cuda.device_count()) < max(part.gpus for part in parts):
        sys.exit(f"these parts need {max(part.gpus for part in parts)} GPUs; torch finds {found}")
    faults = run_parts(parts, args.out, args.seconds)
    rows = [row for result in read_results(args.out) for row in read_rows(result)]
    table = format_table(rows, faults)
    (args.out / "table.txt").write_text(table + "\n")
    print(table)


if __name__ == "__main__":
    main()
