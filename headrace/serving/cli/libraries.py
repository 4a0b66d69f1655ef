"""Optional libraries: what each is for, which version is here, and how to get it. Nothing is imported to find out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from headrace.service.inventory import BROKEN, OK, UNAVAILABLE, Finding

KIND = "library"


@dataclass(frozen=True)
class Library:
    """A package of an extra of ours, from its ``lowest`` version on."""

    package: str
    extra: str
    lowest: str
    gives: str


LIBRARIES = (
    Library(
        "xgrammar", "structured", "0.2.8",
        "structured outputs and forced tool calls: JSON and plain schemas, the fast way"
    ),
    Library(
        "llguidance", "structured", "1.9",
        "structured outputs and forced tool calls: every other schema, regular expressions, grammars"
    ),
    Library("nvidia-cudnn-frontend", "cuda", "1.14", "paged attention by cuDNN on NVIDIA GPUs"),
    Library(
        "flashinfer-python", "flashinfer", "0.6.15",
        "prefill by flashinfer on NVIDIA GPUs (--attention-backend flashinfer)"
    ),
    Library("opentelemetry-sdk", "otel", "1.28", "traces of requests (--otlp-endpoint)"),
    Library("opentelemetry-exporter-otlp-proto-http", "otel", "1.28", "sends the traces to a collector"),
)


def find_libraries() -> Iterator[Finding]:
    """One finding a library; too old a version is broken."""
    for library in LIBRARIES:
        install = f"pip install 'headrace[{library.extra}]'"
        try:
            found = version(library.package)
        except PackageNotFoundError:
            yield Finding(KIND, library.package, UNAVAILABLE, (), f"not installed: {install} for {library.gives}")
            continue
        if _numbers(found) < _numbers(library.lowest):
            yield Finding(KIND, library.package, BROKEN, (), f"{found} is older than {library.lowest}: {install}")
        else:
            yield Finding(KIND, library.package, OK, (), f"{found}: {library.gives}")


def _numbers(text: str) -> tuple[int, ...]:
    """The release part of a version, for comparing."""
    release = re.match(r"[0-9]+(?:\.[0-9]+)*", text)
    return tuple(map(int, release[0].split("."))) if release else ()
