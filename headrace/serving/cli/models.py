"""``headrace models`` lists what can be served from here; ``headrace pull`` fetches more from the Hugging Face hub."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from headrace.base.errors import ConfigError
from headrace.service.model_files import (
    Download,
    ListedModel,
    Memory,
    describe,
    find_memory,
    list_models,
    pull,
    read_name,
)
from headrace.serving.cli.flags import Invocation
from headrace.serving.cli.layout import Block, print_blocks, terminal_width, wrap

PLACES = {"folder": "Folders", "package": "Installed packages", "hub": "Hugging Face cache"}


def run(invocation: Invocation) -> int:
    """Print the list."""
    folders = [Path(word).expanduser() for word in invocation.words] or [Path.cwd()]
    for folder in folders:
        if not folder.exists():
            raise ConfigError(f"there is no folder {folder}")
    models, memory = list(list_models(folders)), find_memory()
    if invocation.section("models").json:
        rows = [
            {
                **dataclasses.asdict(model), "path": str(model.path), "needed_bytes": memory.needed_bytes(model),
                "fits": memory.fits(model)
            }
            for model in models
        ]
        print(json.dumps({"memory": dataclasses.asdict(memory), "models": rows}, indent=2))
        return 0
    width = terminal_width()
    print_blocks(
        Block(title, [line for model in models if model.place == place for line in explain(model, memory, width)])
        for place, title in PLACES.items()
    )
    hint = (
        f"{size(memory.free_bytes)} of memory are free ({memory.device}). Serve a model with: headrace serve NAME"
        if models else "There are no models here. Fetch one with: headrace pull OWNER/NAME"
    )
    print("\n".join(["", *wrap(hint, width)] if models else wrap(hint, width)))
    return 0


def explain(model: ListedModel, memory: Memory, width: int) -> list[str]:
    """Lines about a model: its name, then what it is or why it cannot be served."""
    facts = [model.architecture, model.quantization, size(model.num_bytes) if model.num_bytes else ""]
    facts += [f"context {model.max_len}"] if model.max_len else []
    facts += ["fits in memory"] if memory.fits(model) and not model.problem else []
    lines = [f"  {model.name}", *wrap(", ".join(filter(None, facts)), width, first=" " * 6, indent=6)]
    if model.problem:
        lines += wrap(f"cannot be served: {model.problem}", width, first=" " * 6, indent=6)
    elif not memory.fits(model):
        needed = f"too large: needs about {size(memory.needed_bytes(model))}"
        lines += wrap(f"{needed}, {size(memory.free_bytes)} are free", width, first=" " * 6, indent=6)
    return [line for line in lines if line.strip()]


def size(num_bytes: int) -> str:
    """Bytes as kB, MB or GB."""
    unit, scale = ("kB", 1e3) if num_bytes < 1e6 else ("MB", 1e6) if num_bytes < 1e9 else ("GB", 1e9)
    return f"{num_bytes / scale:.{1 if unit == 'GB' else 0}f} {unit}"


def run_pull(invocation: Invocation) -> int:
    """Fetch a model; 1 if it is here then and cannot be served."""
    if len(invocation.words) != 1:
        raise ConfigError("name one model: headrace pull OWNER/NAME")
    name = read_name(invocation.words[0])
    path = pull(name, invocation.section("pull").revision, before=_announce)
    memory, width = find_memory(), terminal_width()
    model = describe(name, "hub", path)
    print("\n".join(explain(model, memory, width)))
    if model.problem:
        return 1
    revision = invocation.section("pull").revision
    print(f"serve it: headrace serve {name}" + (f" --revision {revision}" if revision else ""))
    return 0


def _announce(download: Download) -> None:
    missing = download.missing
    what = f"{len(missing)} files, {size(sum(f.num_bytes for f in missing))}" if missing else "everything is here"
    lines = [f"{download.repository} at {download.commit[:12]}: {what}"]
    lines += [f"  {file.name}, {size(file.num_bytes)}" for file in missing]
    print("\n".join(lines), flush=True)

