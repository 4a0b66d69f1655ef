"""Options that only the command line has: input, sampling, output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from headrace.base.option import Section, option
from headrace.base.sampling import SamplingParams


@dataclass(frozen=True, kw_only=True)
class GeneralOptions(Section):
    """Every command has these."""

    config: str | None = option(
        None, "TOML or JSON file of options, flat or by section; flags win over it", metavar="FILE"
    )
    disable_models: str = option(
        "", "comma-separated model families that are never imported, for example a broken one", metavar="NAMES"
    )
    log_level: str = option(
        "info",
        "minimum level of log messages (default of commands other than serve and bench: warning); debug also shows "
        "tracebacks",
        choices=("debug", "info", "warning", "error"),
    )


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(Section):
    """How tokens are sampled; default: the model's generation config."""

    max_tokens: int = option(256, "maximum number of output tokens", low=1)
    temperature: float | None = option(None, "0 is greedy; higher is more varied", low=0.0, high=100.0)
    top_p: float | None = option(
        None, "sample from the most likely tokens that together have this probability", low=0.0, high=1.0
    )
    top_k: int | None = option(None, "sample from this many most likely tokens; 0: from all", low=-1)
    min_p: float | None = option(
        None, "exclude tokens below this fraction of the highest probability", low=0.0, high=1.0
    )
    repetition_penalty: float | None = option(
        None, "above 1: tokens of the prompt and the output become less likely", low=0.01, high=10.0
    )
    presence_penalty: float | None = option(
        None, "above 0: tokens of the output become less likely", low=-2.0, high=2.0
    )
    frequency_penalty: float | None = option(
        None, "above 0: tokens become less likely the more often they occur in the output", low=-2.0, high=2.0
    )
    stop: list[str] | None = option(  # noqa: RUF009
        None, "text that ends the output; may be repeated", metavar="TEXT"
    )
    ignore_eos: bool = option(False, "continue after the model's end-of-text token")

    def to_params(self, defaults: Mapping[str, Any], **changed: Any) -> SamplingParams:
        """Sampling parameters: the options given here or in ``changed``, else the model's ``defaults``."""
        # Every field of this section has the name of a sampling parameter.
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return SamplingParams(
            **{**defaults, **{name: value for name, value in given.items() if value is not None}, **changed}
        )


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(Section):
    """Input and output."""

    input: str | None = option(None, "file of prompts, - for stdin: lines of text, or JSON lines", metavar="FILE")
    input_format: str = option(
        "auto", "auto: JSON lines if the file is named .jsonl or its first line is an object, else text",
        choices=("auto", "text", "jsonl")
    )
    output: str | None = option(None, "write JSON lines here; default: stdout", metavar="FILE")
    chat: bool = option(False, "send each prompt as a user message, with the chat template")
    system: str | None = option(None, "system message, with --chat", metavar="TEXT")
    n: int = option(1, "outputs for each prompt", low=1, high=128)
    logprobs: int | None = option(
        None, "report logprobs of the sampled tokens and of this many most likely ones", low=0, high=50
    )


@dataclass(frozen=True, kw_only=True)
class BatchOptions(Section):
    """How requests of the input are read. With ``--executor ray`` replicas of a Ray cluster answer them: the output is
    then a folder, and the input may be one, of JSONL or Parquet files."""

    served_model_name: str | None = option(None, "model name in the requests; default: the model's own", metavar="NAME")
    num_replicas: int | None = option(
        None, "engines on the Ray cluster; default: as many as it holds, while it grows and shrinks", low=1, high=65536
    )
    shard_size: int = option(
        512, "lines that a replica on Ray answers as a whole; what is lost with a replica is done again", low=1,
        high=1_000_000
    )
    output_format: str = option(
        "auto", "format of the parts that a run on Ray writes; auto: that of the input",
        choices=("auto", "jsonl", "parquet")
    )
    ray_address: str | None = option(
        None, "address of the Ray cluster, HOST:PORT; default: RAY_ADDRESS, or the cluster of this machine",
        metavar="ADDRESS"
    )


@dataclass(frozen=True, kw_only=True)
class ChatOptions(Section):
    """The conversation, and the server to join."""

    url: str | None = option(
        None, "join the OpenAI-compatible server at this address instead of loading a model; --model names one of "
        "several", metavar="URL"
    )
    api_key: str | None = option(None, "key of that server", metavar="KEY")
    system: str | None = option(None, "system message to start with", metavar="TEXT")


@dataclass(frozen=True, kw_only=True)
class CheckOptions(Section):
    """The report."""

    verbose: bool = option(False, "every plug-in, with the reason where one cannot be used", letter="v")
    json: bool = option(False, "print JSON")
    strict: bool = option(False, "exit with 1 if anything that should work here does not load")
    gpus: bool = option(
        False, "instead of the report, measure copies and sums between each pair of GPUs, and say what follows for "
        "parallelism"
    )


@dataclass(frozen=True, kw_only=True)
class ModelsOptions(Section):
    """The list."""

    json: bool = option(False, "print JSON")


@dataclass(frozen=True, kw_only=True)
class PullOptions(Section):
    """What to fetch."""

    revision: str | None = option(None, "branch, tag or commit; default: main")


@dataclass(frozen=True, kw_only=True)
class ShowOptions(Section):
    """The output."""

    verbose: bool = option(False, "what every option does, also those with their default", letter="v")
    json: bool = option(False, "print JSON")
    changed: bool = option(False, "only options that differ from the defaults")
