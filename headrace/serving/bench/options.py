"""Options of ``headrace bench serve``, ``bench offline`` and ``bench quality``, from which their flags are made."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from headrace.base.errors import ConfigError
from headrace.base.option import Section, option, options_of


@dataclass(frozen=True, kw_only=True)
class TargetOptions(Section):
    """The server and the API."""

    base_url: str = option(
        "http://127.0.0.1:8000", "address of an OpenAI-compatible server, with or without /v1", metavar="URL"
    )
    model: str | None = option(None, "model name sent; default: the first model that the server lists", metavar="NAME")
    lora_modules: str = option(
        "", "names of LoRA adapters; each request is sent to one of them at random, instead of to the model",
        metavar="NAME ..."
    )
    endpoint: str = option(
        "completions", "route: /v1/completions or /v1/chat/completions", choices=("completions", "chat")
    )
    api_key: str | None = option(None, "sent as Authorization: Bearer KEY", metavar="KEY")
    timeout_s: float = option(600.0, "seconds after which a request counts as failed", low=0.1)
    flush_cache: bool = option(False, "flush the server's prefix cache (POST /flush_cache) after the warm-up")


@dataclass(frozen=True, kw_only=True)
class LoadOptions(Section):
    """The number and timing of requests."""

    num_requests: int = option(200, "number of measured requests", low=1, high=10_000_000)
    concurrency: int | None = option(
        None, "maximum number of concurrent requests; default 16, or unlimited with --rate and timed traces", low=1,
        high=65536
    )
    rate: float | None = option(
        None, "requests started per second, at random times (Poisson); default: as concurrency allows", low=1e-6
    )
    warmup: int = option(4, "requests sent before the measurement", low=0)
    seed: int = option(0, "seed of prompts, lengths and arrival times", low=0)
    output_file: str | None = option(None, "write the report as JSON here", metavar="FILE")
    details: bool = option(False, "also write the measurements of every request to the file")


@dataclass(frozen=True, kw_only=True)
class TrafficOptions(Section):
    """The content of the requests."""

    workload: str = option(
        "random", "random prompts, random prompts after shared prefixes, or a trace file",
        choices=("random", "shared-prefix", "trace")
    )
    trace: str | None = option(
        None, 'file of JSON lines: {"prompt": text or ids, "max_tokens": n, "timestamp": seconds (optional)}',
        metavar="FILE"
    )
    input_len: str = option("512", "prompt tokens (without the shared prefix): a number or LOW-HIGH", metavar="LEN")
    output_len: str = option("128", "output tokens requested: a number or LOW-HIGH", metavar="LEN")
    prefix_len: int = option(1024, "tokens of a shared prefix", low=1)
    num_prefixes: int = option(1, "number of shared prefixes", low=1)
    random_words: bool = option(
        False, "send text of about as many tokens, for servers that refuse token ids (always for chat)"
    )
    max_token_id: int = option(30000, "random ids are from 1000 to this, which must be in the vocabulary", low=1001)
    ignore_eos: bool = option(
        False, "send ignore_eos, so that every output has full length (not supported by all servers)"
    )
    temperature: float = option(0.0, "sampling temperature sent", low=0.0, high=2.0)


@dataclass(frozen=True, kw_only=True)
class ServeBenchOptions:
    """All options of ``headrace bench serve``."""

    target: TargetOptions = field(default_factory=TargetOptions)
    load: LoadOptions = field(default_factory=LoadOptions)
    traffic: TrafficOptions = field(default_factory=TrafficOptions)

    def __post_init__(self) -> None:
        if self.traffic.workload == "trace" and not self.traffic.trace:
            raise ConfigError("workload trace needs a file: --trace FILE", param="trace")
        for name in ("input_len", "output_len"):
            parse_range(name, getattr(self.traffic, name))


@dataclass(frozen=True, kw_only=True)
class OfflineBenchOptions(Section):
    """Options of ``headrace bench offline`` besides the engine's."""

    workloads: str = option(
        "latency1,offline256,prefill16x8k,sharedprefix", "comma-separated workloads to run", metavar="NAMES"
    )
    repeats: int = option(1, "runs of each workload; the fastest counts", low=1)
    max_prompts: int | None = option(
        None, "run only the first prompts of each workload; results are then not comparable", low=1
    )
    output_file: str | None = option(None, "write the rows as JSON here", metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class QualityOptions(Section):
    """Options of ``headrace bench quality`` besides the engine's."""

    compare: str = option(
        "int8,int4",
        "comma-separated weight formats to compare with plain weights in float32; stored: as in a GGUF file; "
        "w8a8/int8: the dtype of cached keys and values after a slash; stored/auto/bfloat16: that of activations after "
        "another",
        metavar="NAMES"
    )
    text: str | None = option(
        None, "file with the text; default: a few pages of public-domain English in the package",
        metavar="FILE"
    )
    window: int = option(512, "tokens per window; windows are independent", low=64, high=8192)
    max_tokens: int = option(4096, "maximum number of tokens of the text", low=64)
    output_file: str | None = option(None, "write the rows as JSON here", metavar="FILE")


SERVE_BENCH_SECTIONS: dict[str, type] = {"target": TargetOptions, "load": LoadOptions, "traffic": TrafficOptions}


def serve_bench_options(**flat: Any) -> ServeBenchOptions:
    """`ServeBenchOptions` from flat options (names are unique across sections); raises `ConfigError`."""
    owner = {info.name: section for section, kind in SERVE_BENCH_SECTIONS.items() for info in options_of(kind, section)}
    values: dict[str, dict[str, Any]] = {section: {} for section in SERVE_BENCH_SECTIONS}
    for name, value in flat.items():
        if name not in owner:
            raise ConfigError(f"unknown option {name!r}; known: {', '.join(sorted(owner))}", param=name)
        values[owner[name]][name] = value
    return ServeBenchOptions(**{section: kind(**values[section]) for section, kind in SERVE_BENCH_SECTIONS.items()})


def parse_range(name: str, text: str) -> tuple[int, int]:
    """``"512"`` to (512, 512), ``"100-1024"`` to (100, 1024), both inclusive; raises `ConfigError`."""
    # at most 8 digits: far above any context, and safe to convert
    match = re.fullmatch(r"([0-9]{1,8})(?:-([0-9]{1,8}))?", text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise ConfigError(f"{name} must be a number of tokens or LOW-HIGH, got {text!r}", param=name)
    return low, high
