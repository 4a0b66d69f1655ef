"""``headrace check``: what works on this machine, including optional libraries, and why the rest does not."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from headrace.base import VERSION
from headrace.base.config import engine_config
from headrace.service.inventory import BROKEN, OK, UNAVAILABLE, Finding, Machine
from headrace.service.weight_report import describe_weights
from headrace.serving.cli.flags import Invocation
from headrace.serving.cli.layout import Block, lay_out, print_blocks, terminal_width, wrap

KIND = "library"
LINK_TITLES = {
    "copy": "Copies (256 MiB, 4 KiB)", "all-reduce": "Sums of two by NCCL (256 MiB, 4 KiB)",
    "own all-reduce": "Sums of two by own kernels (4 KiB)",
}


@dataclass(frozen=True)
class Library:
    """A package of an extra, required from version ``lowest`` on. ``device``: the device type without which it is of no
    use."""

    package: str
    extra: str
    lowest: str
    gives: str
    device: str | None = None


LIBRARIES = (
    Library("ray", "ray", "2.50", "batches and servers on a Ray cluster (--executor ray, headrace.ray:app)"),
    Library("pyarrow", "ray", "17", "batches from and to Parquet files"),
    Library(
        "nvidia-cudnn-frontend", "cuda", "1.14",
        "attention of long prompts by cuDNN: on Blackwell, and on Hopper for head dims other than 64 and 128", "cuda"
    ),
    Library(
        "flashinfer-python", "flashinfer", "0.6.15",
        "prefill by flashinfer on NVIDIA GPUs (--attention-backend flashinfer)", "cuda"
    ),
    Library("pillow", "vision", "11", "images in requests"),
    Library("transformers", "vision", "5.8", "processors of images and audio"),
    Library("soundfile", "audio", "0.13", "audio in requests"),
    Library("av", "audio", "14", "audio in more formats"),
    Library("transformers", "audio", "5.8", "processors of images and audio"),
    Library("av", "video", "14", "video in requests"),
    Library("torchvision", "video", "0.26", "processors of video"),
    Library("nixl-cu13", "nixl", "1.5", "KV pages between servers by NIXL (--disaggregation-transfer-backend nixl)"),
    Library("pyzmq", "kv-events", "26", "events of stored and removed KV pages for other routers (--kv-events-config)"),
    Library("mooncake-transfer-engine-non-cuda", "mooncake", "0.3.13", "KV pages between servers by Mooncake"),
    Library("opentelemetry-sdk", "otel", "1.28", "traces of requests (--otlp-endpoint)"),
    Library("opentelemetry-exporter-otlp-proto-http", "otel", "1.28", "exports traces to a collector"),
)


def find_libraries() -> Iterator[Finding]:
    """One finding per library, without importing it; a version that is too old is broken."""
    packages: dict[str, Library] = {}
    for library in LIBRARIES:
        packages.setdefault(library.package, library)  # some are of several extras
    for library in packages.values():
        install = f"pip install 'headrace[{library.extra}]'"
        try:
            # From the package's metadata: an import may take seconds.
            found = version(library.package)
        except PackageNotFoundError:
            yield Finding(KIND, library.package, UNAVAILABLE, (), f"not installed: {install} for {library.gives}")
            continue
        if _numbers(found) < _numbers(library.lowest):
            yield Finding(KIND, library.package, BROKEN, (), f"{found} is older than {library.lowest}: {install}")
        else:
            yield Finding(KIND, library.package, OK, (), f"{found}: {library.gives}")


def _numbers(text: str) -> tuple[int, ...]:
    """The release part of a version, for comparison."""
    release = re.match(r"[0-9]+(?:\.[0-9]+)*", text)
    return tuple(map(int, release[0].split("."))) if release else ()


def run(invocation: Invocation) -> int:
    """Print the report; 1 with ``--strict`` if anything is broken."""
    options = invocation.section("check")
    if options.gpus:
        return run_gpus(as_json=options.json)
    from headrace.service.inventory import find_machine, take_inventory

    if invocation.words:
        return _check_model(invocation.words[0], options.json)
    machine = find_machine()
    findings = [*take_inventory(machine), *find_libraries()]
    if options.json:
        print(
            json.dumps({"machine": machine.description, "plugins": [dataclasses.asdict(f) for f in findings]}, indent=2)
        )
    else:
        width = terminal_width()
        blocks = list(summarize(machine, findings, width))
        print_blocks([*blocks, *(details(findings, width) if options.verbose else ())])
        counts = {status: sum(f.status == status for f in findings) for status in (OK, UNAVAILABLE, BROKEN)}
        print(f"\n{counts[OK]} parts work, {counts[UNAVAILABLE]} are not for this machine, {counts[BROKEN]} are broken"
              + ("" if options.verbose else "; -v lists them"))
    return 1 if options.strict and any(finding.status == BROKEN for finding in findings) else 0


def _check_model(name: str, as_json: bool) -> int:
    """Print the kinds of weights of a model."""
    kinds = list(describe_weights(engine_config(model=name)))
    if as_json:
        print(json.dumps({"model": name, "weights": [dataclasses.asdict(kind) for kind in kinds]}, indent=2))
        return 0
    width = terminal_width()
    print_blocks([Block(f"Weights of {name}", list(lay_out((
        (kind.name, f"{kind.count} of {' x '.join(map(str, kind.shape))}: {kind.form}; {kind.kernel} ({kind.reason})")
        for kind in kinds
    ), width)))])
    return 0


def run_gpus(*, as_json: bool) -> int:
    """Print the links between GPUs; raises `HeadraceError` when they cannot be measured."""
    from headrace.service.gpu_links import advise, matrix, measure_links, problems

    found = measure_links()
    if as_json:
        links = [msgspec.to_builtins(link) for link in found.links]
        print(json.dumps({"gpus": found.names, "links": links, "advice": advise(found)}, indent=2))
        return 0
    width = terminal_width()
    blocks = [Block("GPUs", [f"  GPU {gpu}: {name}" for gpu, name in enumerate(found.names)])]
    if found.links:
        blocks += [Block(LINK_TITLES[what], matrix(found, what)) for what in LINK_TITLES]
        blocks.append(Block("Problems", [line for text in problems(found.links) for line in wrap(text, width)]))
    print_blocks([*blocks, Block("Advice", wrap(advise(found), width, first="  ", indent=2))])
    return 0


def summarize(machine: Machine, findings: Sequence[Finding], width: int) -> Iterator[Block]:
    """What the machine has, what Headrace can do with it, what a command would add, and what is broken."""
    about = machine.description
    yield Block("This machine", list(lay_out([
        ("processor", about["cpu"]), ("memory", about["memory"]), ("GPU", about["cuda"]),
        ("software", f"Headrace {VERSION}, Python {about['python']}, torch {about['torch']}"),
    ], width)))
    families = _names(findings, "model family")
    yield Block("Headrace here", list(lay_out([
        ("families", ", ".join(families)),
        ("weights", f"safetensors and GGUF files; {', '.join(_names(findings, 'quantization scheme'))}"),
        ("attention", ", ".join(_names(findings, "attention backend"))),
        *((f.name.upper() + " kernels", _native_state(f)) for f in findings if f.kind == "native kernels"),
        ("libraries", ", ".join(
            f"{f.name} {f.detail.partition(':')[0]}" for f in findings if f.kind == KIND and f.status == OK
        ) or "none of the optional ones"),
    ], width)))
    yield Block("Not here", list(_missing(machine, findings, width)))
    yield Block("Broken", list(lay_out(
        ((f"{f.kind} {f.name}", f.detail) for f in findings if f.status == BROKEN), width
    )))


def _names(findings: Sequence[Finding], kind: str) -> list[str]:
    return [finding.name for finding in findings if finding.kind == kind and finding.status == OK]


def _native_state(finding: Finding) -> str:
    status, _, detail = finding.detail.partition(": ")
    states = {
        "ready": f"compiled ({detail})",
        "idle": "not compiled yet: the first start on a CPU does it, and waits or is slower meanwhile"
    }
    return states.get(status, f"none, plain torch is used: {detail}")


def _missing(machine: Machine, findings: Sequence[Finding], width: int) -> Iterator[str]:
    """What would be of use on this machine, each with what it gives, and the commands that add it."""
    entries, commands = [], []
    if any(finding.kind == "native kernels" and finding.detail.startswith("idle") for finding in findings):
        entries.append(("CPU kernels", "compiled ahead, so that the first start is as fast as the others"))
        commands.append(f"{python()} -m headrace.kernels.native")
    devices = {device for device, _, _ in machine.devices}
    absent = {finding.name for finding in findings if finding.kind == KIND and finding.status != OK}
    wanted = [
        library for library in LIBRARIES if library.package in absent and library.device in (None, *devices)
    ]
    if wanted:
        entries += [(library.package, library.gives) for library in wanted]
        extras = ",".join(dict.fromkeys(library.extra for library in wanted))
        commands.append(f"{python()} -m pip install 'headrace[{extras}]'")
    yield from lay_out(entries, width)
    yield from ("", *(f"  {command}" for command in commands)) if commands else ()


def python() -> str:
    """The command of this Python, as the user would type it here."""
    if shutil.which("python") == sys.executable:
        return "python"
    path = Path(sys.executable)
    with contextlib.suppress(ValueError):  # not below the current folder
        path = path.relative_to(Path.cwd())
    return str(path)


def details(findings: Sequence[Finding], width: int) -> Iterator[Block]:
    """Every finding, by kind."""
    for kind in dict.fromkeys(finding.kind for finding in findings):
        entries = [
            (finding.name, f"{finding.status}{_on(finding)}: {finding.detail}" if finding.detail else
             f"{finding.status}{_on(finding)}")
            for finding in findings if finding.kind == kind
        ]
        yield Block(kind, list(lay_out(entries, width)))


def _on(finding: Finding) -> str:
    return f" on {', '.join(finding.devices)}" if finding.devices else ""
