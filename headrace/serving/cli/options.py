"""Options that only the command line has: what to generate from, how to sample, how to report."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from headrace.base.option import check_section, option
from headrace.base.sampling import SamplingParams


@dataclass(frozen=True, kw_only=True)
class _Section:
    def __post_init__(self) -> None:
        check_section(self)


@dataclass(frozen=True, kw_only=True)
class GeneralOptions(_Section):
    """Every command has these."""

    config: str | None = option(
        None, "TOML or JSON file of options, flat or by section; flags win over it", metavar="FILE"
    )
    disable_models: str = option(
        "", "comma-separated model families never to be loaded, say because one is broken", metavar="NAMES"
    )
    log_level: str = option(
        "info",
        "how much is logged, from warning on in generate and chat unless given; debug also shows where an error came "
        "from",
        choices=("debug", "info", "warning", "error"),
    )


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(_Section):
    """How tokens are drawn; what is not given is the model's own default."""

    max_tokens: int = option(256, "tokens of output at most", low=1)
    temperature: float | None = option(None, "0 is greedy; higher is more varied", low=0.0, high=100.0)
    top_p: float | None = option(None, "draw from the likeliest tokens that make up this share", low=0.0, high=1.0)
    top_k: int | None = option(None, "draw from this many likeliest tokens; 0 from all", low=-1)
    min_p: float | None = option(
        None, "leave out tokens less likely than this share of the likeliest one", low=0.0, high=1.0
    )
    repetition_penalty: float | None = option(
        None, "above 1: tokens of prompt and output become less likely", low=0.01, high=10.0
    )
    presence_penalty: float | None = option(
        None, "above 0: tokens of the output become less likely", low=-2.0, high=2.0
    )
    frequency_penalty: float | None = option(None, "the same, by how often they occur", low=-2.0, high=2.0)
    stop: list[str] | None = option(  # noqa: RUF009
        None, "text that ends the output; give it several times for several", metavar="TEXT"
    )
    ignore_eos: bool = option(False, "go on past the model's end of text")

    def to_params(self, defaults: dict[str, float], **changed: Any) -> SamplingParams:
        """Sampling parameters: what was given here or in ``changed``, else the model's ``defaults``."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return SamplingParams(
            **{**defaults, **{name: value for name, value in given.items() if value is not None}, **changed}
        )


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(_Section):
    """Where prompts come from and outputs go."""

    input: str | None = option(None, "file of prompts, - for stdin: lines of text, or JSON lines", metavar="FILE")
    input_format: str = option(
        "auto", "auto reads JSON lines when the file's name or its first line says so",
        choices=("auto", "text", "jsonl")
    )
    output: str | None = option(None, "write JSON lines here; default: stdout", metavar="FILE")
    chat: bool = option(False, "make each prompt a user's message, with the model's chat template")
    system: str | None = option(None, "system message, with --chat", metavar="TEXT")
    n: int = option(1, "outputs for each prompt", low=1, high=128)
    logprobs: int | None = option(
        None, "report the drawn tokens' logprobs and those of this many likeliest", low=0, high=50
    )


@dataclass(frozen=True, kw_only=True)
class BatchOptions(_Section):
    """How requests of the input are taken."""

    served_model_name: str | None = option(
        None, "name that the requests call the model by; default: the model's own", metavar="NAME"
    )


@dataclass(frozen=True, kw_only=True)
class ChatOptions(_Section):
    """The conversation."""

    system: str | None = option(None, "system message to start with", metavar="TEXT")


@dataclass(frozen=True, kw_only=True)
class CheckOptions(_Section):
    """What is reported."""

    json: bool = option(False, "print JSON")
    strict: bool = option(False, "exit with 1 when anything that should work here does not load")


@dataclass(frozen=True, kw_only=True)
class ShowOptions(_Section):
    """What is printed."""

    json: bool = option(False, "print JSON")
    changed: bool = option(False, "only what differs from the defaults")
