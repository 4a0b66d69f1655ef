"""The commands as a table: options, positional arguments, and what runs each. Imports nothing that a command does not
need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.base.config import SECTIONS
from headrace.base.registry import load_target

ENGINE = ("model", "cache", "scheduler", "device", "parallel", "nodes", "speculation", "adapters", "media")
ROLE = ("disaggregation",)
SERVING = ("server", "operations")
# Sections that `base.config` does not have, as "module:class": imported only for the command that needs them.
_HOMES = {
    "general": "headrace.serving.cli.options:GeneralOptions",
    "sampling": "headrace.serving.cli.options:SamplingOptions",
    "generate": "headrace.serving.cli.options:GenerateOptions",
    "batch": "headrace.serving.cli.options:BatchOptions",
    "chat": "headrace.serving.cli.options:ChatOptions",
    "check": "headrace.serving.cli.options:CheckOptions",
    "models": "headrace.serving.cli.options:ModelsOptions",
    "pull": "headrace.serving.cli.options:PullOptions",
    "show": "headrace.serving.cli.options:ShowOptions",
    "router": "headrace.serving.router.options:RouterOptions",
    "workers": "headrace.serving.router.options:WorkerOptions",
    "replay": "headrace.serving.replay:ReplayOptions",
    "target": "headrace.serving.bench.options:TargetOptions",
    "load": "headrace.serving.bench.options:LoadOptions",
    "traffic": "headrace.serving.bench.options:TrafficOptions",
    "workloads": "headrace.serving.bench.options:OfflineBenchOptions",
    "quality": "headrace.serving.bench.options:QualityOptions",
}


@dataclass(frozen=True)
class Command:
    """``run`` is ``"module:function"`` taking an `Invocation` and returning the exit code. ``sections`` are in the
    order of the help text, ``about`` stands below its summary. ``words`` are the positional arguments: ``model`` (a
    model's name), ``prompts``, ``folders`` and ``urls`` (any number), ``files`` (an input and an output), ``folder``,
    ``name``, ``checked`` (a model's name or nothing), or none. A ``quiet`` command logs from level warning by default:
    its standard output is the result."""

    name: str
    summary: str
    sections: tuple[str, ...]
    run: str
    examples: tuple[tuple[str, str], ...] = ()
    words: str = ""
    about: str = ""
    quiet: bool = False

    def section_types(self) -> dict[str, type]:
        """The option sections by name, in the order of the help text."""
        return {
            name: SECTIONS[name] if name in SECTIONS else load_target(_HOMES[name])
            for name in (*self.sections, "general")
        }

    def load(self) -> Callable[[Any], int]:
        """Import what runs the command."""
        run: Callable[[Any], int] = load_target(self.run)
        return run


_ALL = (
    Command(
        "serve", "serve a model over HTTP, with OpenAI's API", (*ENGINE, *ROLE, *SERVING),
        "headrace.serving.cli.serve:run", (
            ("the default model on port 8000", "headrace serve"),
            ("a GGUF file, open to the network", "headrace serve model.gguf --host 0.0.0.0 --port 9000"),
            ("a folder, with room for more requests", "headrace serve ./Qwen3-0.6B --max-running-requests 128"),
            ("options from a file, one changed", "headrace serve --config prod.toml --log-requests line"),
        ), "model",
    ),
    Command(
        "router", "give several servers one address", ("router", "workers"), "headrace.serving.cli.serve:run_router", (
            ("two servers, by the prompts in their caches", "headrace router http://gpu1:8000 http://gpu2:8000"),
            ("workers from a file that may change", "headrace router --workers-file workers.txt --port 9000"),
            (
                "the pods of a headless Kubernetes service, open to the network",
                "headrace router --workers-dns engines.default.svc:8000 --host 0.0.0.0"
            ),
            (
                "prompts computed by one server, outputs by another",
                "headrace router --prefill http://gpu1:8000 --decode http://gpu2:8000"
            ),
        ), "urls",
        "Passes requests on to servers of OpenAI's API, Headrace's or others, chosen by --policy. A request whose "
        "worker is lost is given to another while nothing was sent to the client. GET /workers lists the workers, "
        'POST /workers {"url": ...} adds one, DELETE drains one.',
    ),
    Command(
        "generate", "complete prompts; writes JSON lines", ("generate", "sampling", *ENGINE),
        "headrace.serving.cli.generate:run",
        (
            ("one prompt", 'headrace generate "The capital of France is" --max-tokens 16 --temperature 0'),
            ("a question, with the chat template", 'headrace generate --chat "Why is the sky blue?"'),
            ("a file of prompts, one per line", "headrace generate --input prompts.txt --output out.jsonl"),
            (
                'JSON lines: {"prompt": "...", "max_tokens": 8}',
                "cat prompts.jsonl | headrace generate --input - --input-format jsonl"
            ),
        ), "prompts", quiet=True,
    ),
    Command(
        "chat", "chat with a model in the terminal", ("chat", "sampling", *ENGINE), "headrace.serving.cli.chat:run", (
            ("talk to the default model, sampled as its makers advise", "headrace chat"),
            ("the model of a running server", "headrace chat --url http://127.0.0.1:8000"),
            ("with a system message", 'headrace chat --system "You are a pirate." --temperature 0.8'),
        ), "model",
        "In the chat, /help lists the commands (/reset, /system TEXT, /exit); Ctrl-C stops an answer, Ctrl-D exits. "
        "The model is loaded in a process of its own with the options of the groups model, cache, scheduler and "
        "device; with --url a running server answers, and these groups do not apply.",
        quiet=True,
    ),
    Command(
        "batch", "run a file of requests in OpenAI's batch format", ("batch", *ENGINE),
        "headrace.serving.cli.batch:run",
        (
            (
                "run it again after an interruption: completed lines are skipped",
                "headrace batch requests.jsonl results.jsonl"
            ),
            (
                "requests with another model name",
                "headrace batch requests.jsonl results.jsonl --served-model-name gpt-4o-mini"
            ),
            (
                "a folder of Parquet files on every GPU of a Ray cluster",
                "headrace batch requests/ results/ --executor ray --ray-address head:6379"
            ),
        ), "files", quiet=True,
    ),
    Command(
        "replay", "send recorded requests again and compare the responses", ("replay",),
        "headrace.serving.cli.replay:run",
        (
            (
                "requests recorded with --dump-requests, at the recorded times",
                "headrace replay dumped --base-url http://127.0.0.1:8000"
            ),
            ("as fast as the server accepts them", "headrace replay dumped --speed 0 --concurrency 64"),
        ), "folder", quiet=True,
    ),
    Command(
        "bench serve", "load test any OpenAI-compatible server", ("target", "load", "traffic"),
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
        "bench quality", "measure the perplexity of 8-bit and 4-bit weights", ("quality", *ENGINE),
        "headrace.serving.cli.bench:run_quality",
        (
            ("the default model as stored, and with 8-bit weights", "headrace bench quality --compare stored,int8"),
            (
                "on another text",
                "headrace bench quality --model ./Qwen3-0.6B --text notes.txt --output-file quality.json"
            ),
        ), quiet=True,
    ),
    Command(
        "models", "list the models that can be served from here", ("models",), "headrace.serving.cli.models:run",
        (
            ("packages, the Hugging Face cache, and below the current folder", "headrace models"),
            ("another folder", "headrace models /models"),
        ), "folders", quiet=True,
    ),
    Command(
        "pull", "fetch a model from the Hugging Face hub", ("pull",), "headrace.serving.cli.models:run_pull",
        (
            ("safetensors, or the Q4_K_M of several GGUF files", "headrace pull HuggingFaceTB/SmolLM2-135M-Instruct"),
            ("a GGUF file by its quantization, or by its name", "headrace pull unsloth/Qwen3-0.6B-GGUF:Q8_0"),
        ), "name",
        "The files go to the Hugging Face cache (HF_HOME), where serve finds them by the same name. An interrupted "
        "download goes on where it stopped when the command is run again. Pickles (*.bin, *.pt) are not fetched.",
        quiet=True,
    ),
    Command(
        "check", "say what works on this machine and what is missing", ("check",), "headrace.serving.cli.check:run",
        (
            ("every model family, kernel, backend and library", "headrace check -v"),
            ("how a model's weights are stored, and what multiplies with them here", "headrace check ./model"),
            ("in a container build", "headrace check --strict"),
            ("how fast GPUs reach each other", "headrace check --gpus"),
        ), "checked", quiet=True,
    ),
    Command(
        "show-config", "show the options of serve with their values and sources", ("show", *ENGINE, *ROLE, *SERVING),
        "headrace.serving.cli.serve:run_show_config",
        (
            ("the options that a file changes", "headrace show-config --config prod.toml --changed"),
        ), "model", quiet=True,
    ),
)
COMMANDS: dict[str, Command] = {command.name: command for command in _ALL}
