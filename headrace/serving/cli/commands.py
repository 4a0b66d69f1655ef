"""The commands: what each takes and what runs it. A table; nothing here is imported that a command does not need."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.base.config import SECTIONS
from headrace.base.registry import load_target

ENGINE = ("model", "cache", "scheduler", "device")
SERVING = ("server", "operations")
_HOMES = {
    "general": "headrace.serving.cli.options:GeneralOptions",
    "sampling": "headrace.serving.cli.options:SamplingOptions",
    "generate": "headrace.serving.cli.options:GenerateOptions",
    "batch": "headrace.serving.cli.options:BatchOptions",
    "chat": "headrace.serving.cli.options:ChatOptions",
    "check": "headrace.serving.cli.options:CheckOptions",
    "show": "headrace.serving.cli.options:ShowOptions",
    "replay": "headrace.serving.replay:ReplayOptions",
    "target": "headrace.serving.bench.options:TargetOptions",
    "load": "headrace.serving.bench.options:LoadOptions",
    "traffic": "headrace.serving.bench.options:TrafficOptions",
    "workloads": "headrace.serving.bench.options:OfflineBenchOptions",
    "quality": "headrace.serving.bench.options:QualityOptions",
}


@dataclass(frozen=True)
class Command:
    """``run`` is ``"module:function"`` taking an `Invocation` and returning the exit code. ``words`` describes what may
    follow without a flag: ``model`` for a model's name, ``prompts`` for any number of prompts, ``files`` for an input
    and an output, ``folder`` for one, empty for nothing. A command that is ``quiet`` logs from warning on unless told
    otherwise: its output is the user's."""

    name: str
    summary: str
    sections: tuple[str, ...]
    run: str
    examples: tuple[tuple[str, str], ...] = ()
    words: str = ""
    quiet: bool = False

    def section_types(self) -> dict[str, type]:
        """The option sections by name, in the order of the help text."""
        return {
            name: SECTIONS[name] if name in SECTIONS else load_target(_HOMES[name])
            for name in (*self.sections, "general")
        }

    def load(self) -> Callable[[Any], int]:
        """Import what runs the command."""
        module, _, function = self.run.partition(":")
        return getattr(importlib.import_module(module), function)


_ALL = (
    Command(
        "serve", "serve a model over HTTP, with OpenAI's API", (*ENGINE, *SERVING), "headrace.serving.cli.serve:run", (
            ("the default model on port 8000", "headrace serve"),
            ("a GGUF file, for the whole network", "headrace serve model.gguf --host 0.0.0.0 --port 9000"),
            ("a folder, with room for more requests", "headrace serve ./Qwen3-0.6B --max-running-requests 128"),
            ("options from a file, one changed", "headrace serve --config prod.toml --log-requests line"),
        ), "model",
    ),
    Command(
        "generate", "complete prompts; outputs are JSON lines", (*ENGINE, "generate", "sampling"),
        "headrace.serving.cli.generate:run",
        (
            ("one prompt", 'headrace generate "The capital of France is" --max-tokens 16 --temperature 0'),
            ("a question, through the chat template", 'headrace generate --chat "Why is the sky blue?"'),
            ("a file of prompts, a line each", "headrace generate --input prompts.txt --output out.jsonl"),
            (
                'JSON lines: {"prompt": "...", "max_tokens": 8}',
                "cat prompts.jsonl | headrace generate --input - --input-format jsonl"
            ),
        ), "prompts", quiet=True,
    ),
    Command(
        "chat", "talk to a model in the terminal", (*ENGINE, "chat", "sampling"), "headrace.serving.cli.chat:run", (
            ("the default model", "headrace chat"),
            ("with a role", 'headrace chat --system "You are a pirate." --temperature 0.8'),
        ), "model", quiet=True,
    ),
    Command(
        "batch", "answer a file of requests in OpenAI's batch format", (*ENGINE, "batch"),
        "headrace.serving.cli.batch:run",
        (
            (
                "run it again after an interruption: what is answered is skipped",
                "headrace batch requests.jsonl answers.jsonl"
            ),
            (
                "requests that call the model by another name",
                "headrace batch requests.jsonl answers.jsonl --served-model-name gpt-4o-mini"
            ),
        ), "files", quiet=True,
    ),
    Command(
        "replay", "send recorded requests again and compare the answers", ("replay",),
        "headrace.serving.cli.replay:run",
        (
            (
                "what a server wrote with --dump-requests, at its own pace",
                "headrace replay dumped --base-url http://127.0.0.1:8000"
            ),
            ("as fast as the server takes them", "headrace replay dumped --speed 0 --concurrency 64"),
        ), "folder", quiet=True,
    ),
    Command(
        "bench serve", "load any OpenAI-compatible server and measure it", ("target", "load", "traffic"),
        "headrace.serving.cli.bench:run_serve",
        (
            ("200 requests, 16 at a time", "headrace bench serve --base-url http://127.0.0.1:8000"),
            (
                "four requests a second, shared prefixes",
                "headrace bench serve --rate 4 --workload shared-prefix --num-prefixes 8"
            ),
            (
                "a recorded trace, report as JSON",
                "headrace bench serve --workload trace --trace trace.jsonl --output-file report.json"
            ),
        ),
    ),
    Command(
        "bench offline", "run fixed workloads in this process", ("workloads", *ENGINE),
        "headrace.serving.cli.bench:run_offline",
        (
            (
                "one workload on random weights",
                "headrace bench offline --model ./config-only --load-format dummy --workloads latency1"
            ),
        ),
    ),
    Command(
        "bench quality", "measure what 8-bit and 4-bit weights cost in perplexity", ("quality", *ENGINE),
        "headrace.serving.cli.bench:run_quality",
        (
            ("the default model as its file has it, and in 8 bits", "headrace bench quality --compare stored,int8"),
            (
                "on a text of your own",
                "headrace bench quality --model ./Qwen3-0.6B --text notes.txt --output-file quality.json"
            ),
        ), quiet=True,
    ),
    Command(
        "check", "which families, kernels, backends and optional libraries work here, and why not the others",
        ("check",), "headrace.serving.cli.check:run",
        (
            ("in a container's build", "headrace check --strict"),
        ),
    ),
    Command(
        "show-config", "every effective option and where its value came from", ("show", *ENGINE, *SERVING),
        "headrace.serving.cli.serve:run_show_config",
        (
            ("what a file of options amounts to", "headrace show-config --config prod.toml --changed"),
        ), "model",
    ),
)
COMMANDS: dict[str, Command] = {command.name: command for command in _ALL}
