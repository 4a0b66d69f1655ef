"""`SpeculativeOptions`: the JSON object of ``--speculative-config``, with the keys of vLLM.

Refuses: files and drafters. Whether a method can draft for the served model is known when both are loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from headrace.base.errors import ConfigError
from headrace.base.option import Section, option, read_object, suggest
from headrace.base.registry import installed_points
from headrace.base.step import MAX_DRAFTS, MAX_ENTRIES

OPTION = "speculative_config"

BENCH = "bench"
TEXT_METHODS = ("ngram", "suffix")
DEVICE_METHODS = ("draft_model", "eagle3", "mtp", BENCH)
METHODS = ("auto", "off", *TEXT_METHODS, *DEVICE_METHODS)
"""Methods of this package; ``bench`` is for benchmarks alone."""
WITHOUT_STAGES = (
    f"{OPTION}: a drafter on the device reads a model of one pipeline stage; use method ngram or suffix, or leave "
    "pipeline_parallel_size at 1"
)
"""Why a drafter on the device is refused beside pipeline stages."""
ENTRY_POINT_GROUPS = ("headrace.drafters", "headrace.draft_models")
"""Out-of-tree text drafters, and drafters that compute on the device, under the names of their methods."""

MOST_DRAFTS = 32
"""Drafts of a request that one step can verify."""
DEFAULT_LOOKUP = 5
"""Tokens that must match for ``ngram``, if neither bound is given."""

_REFUSED = {
    "draft_tensor_parallel_size": "a drafter runs on the ranks of the served model; leave it out",
    "disable_by_batch_size": "how many drafts pay is measured for every batch; leave it out",
    "speculative_disable_by_batch_size": "how many drafts pay is measured for every batch; leave it out",
    "num_speculative_tokens_per_batch_size": "how many drafts pay is measured for every batch; leave it out",
    "speculative_token_tree": "drafts are a chain, not a tree; give num_speculative_tokens",
    "rejection_sample_method": "the target samples every position itself, which is exact; leave it out",
    "draft_sample_method": "drafts are the drafter's most likely tokens; leave it out",
    "use_heterogeneous_vocab": "a draft model needs the tokenizer of the served model",
    "max_model_len": "a drafter has the context of the served model; leave it out",
    "enforce_eager": "graphs are captured for the drafter as for the model; see --graphs",
    "target_model_config": "it is given by the served model; leave it out",
}
_OTHER_METHODS = {
    "eagle": "only heads of EAGLE-3 are served: method eagle3", "medusa": "its heads are not served",
    "mlp_speculator": "its heads are not served",
    "none": "the method that drafts nothing is called off",
}


@dataclass(frozen=True, kw_only=True)
class SpeculativeOptions(Section):
    """How to guess tokens that the model then verifies, several in one step."""

    method: str = option(
        "auto",
        "auto: with a model, that drafter; else the checkpoint's own prediction module (mtp); else suffix. off: no "
        "drafts. ngram: what followed the same tokens before. suffix: what most often followed them, in earlier "
        "outputs too. mtp, eagle3, draft_model: a drafter on the device",
        metavar="METHOD"
    )
    model: str | None = option(None, "checkpoint of the drafter: folder, GGUF file, package, or Hugging Face name")
    revision: str | None = option(None, "branch, tag or commit of that checkpoint on the Hugging Face hub")
    load_format: str = option(
        "auto", "format of its weights; dummy: random", choices=("auto", "safetensors", "gguf", "dummy")
    )
    quantization: str | None = option(None, "quantization of its weights, as --quantization")
    num_speculative_tokens: int | None = option(
        None,
        "drafts per step. With a method that is named: that many, always, as far as there are any. With auto: the "
        "maximum. Default: as many as pay, by measured step times and acceptance",
        low=1, high=MOST_DRAFTS
    )
    prompt_lookup_min: int | None = option(
        None, "ngram: least number of tokens that match; default: prompt_lookup_max, or 5", low=1, high=32
    )
    prompt_lookup_max: int | None = option(
        None, "ngram: greatest number of tokens that match; the longest match wins; default: prompt_lookup_min, or 5",
        low=1, high=32
    )
    suffix_decoding_max_tree_depth: int = option(24, "suffix: tokens of context that are compared", low=1, high=256)
    suffix_decoding_max_cached_requests: int = option(
        10000, "suffix: earlier outputs that are remembered; 0: none", low=0
    )
    suffix_decoding_max_spec_factor: float = option(
        1.0, "suffix: drafts per matching token of context, at most", low=0.0, high=64.0
    )
    suffix_decoding_min_token_prob: float = option(
        0.1, "suffix: least estimated probability that a draft and all before it are right", low=0.0, high=1.0
    )
    acceptance_rate: float | None = option(
        None, "bench: share of drafts that are made right", low=0.0, high=1.0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_method()
        bench = self.method == "bench"
        if bench and (self.acceptance_rate is None or self.num_speculative_tokens is None):
            raise _error("method bench needs acceptance_rate and num_speculative_tokens", "acceptance_rate")
        if not bench and self.acceptance_rate is not None:
            raise _error("acceptance_rate belongs to method bench", "acceptance_rate")
        if self.method in ("draft_model", "eagle3") and self.model is None:
            raise _error(f"method {self.method} needs model, the drafter's checkpoint", "model")
        if self.model is not None and self.method in ("off", "ngram", "suffix", "mtp", "bench"):
            raise _error(f"method {self.method} takes no model; leave it out, or name eagle3 or draft_model", "model")
        low, high = self.lookup
        if low > high:
            raise _error(f"prompt_lookup_min ({low}) must not exceed prompt_lookup_max ({high})", "prompt_lookup_min")

    def _check_method(self) -> None:
        name = self.method
        if name in METHODS:
            return
        installed = [point.name for group in ENTRY_POINT_GROUPS for point in installed_points(group)]
        if name in installed:
            return
        known = [*(method for method in METHODS if method != "bench"), *installed]
        reason = "method mtp takes the modules of every family" if name.endswith("_mtp") else _OTHER_METHODS.get(name)
        hint = f"; {reason}" if reason else suggest(name, known)
        raise _error(f"unknown method {name[:80]!r}{hint}; known: {', '.join(known)}", "method")

    @property
    def lookup(self) -> tuple[int, int]:
        """The least and greatest length of a match of ``ngram``. Either bound alone stands for both."""
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        return low or high or DEFAULT_LOOKUP, high or low or DEFAULT_LOOKUP

    @property
    def num_fixed(self) -> int | None:
        """The number of drafts that is verified whether it pays or not; None: as many as pay."""
        return None if self.method == "auto" else self.num_speculative_tokens


Times = tuple[tuple[int, float], ...]
"""``(size, seconds)``, ascending."""


@dataclass(frozen=True)
class StepTimes:
    """What steps of decodes take on the device, as measured at the start; empty where nothing was. ``steps``: by number
    of entries. With a drafter on the device ``follows`` come on top, by entries: it computes what the step computed;
    and, for each draft that it makes, ``drafts``, by rows."""

    steps: Times = ()
    follows: Times = ()
    drafts: Times = ()


@dataclass(frozen=True)
class Speculation:
    """How a loaded model is drafted for. ``method``: a text drafter's name, that of a drafter on the device, or "off";
    ``device_drafts``: the most drafts per row that the latter makes, 0 without one. ``max_entries``: decodes and drafts
    that a step may have together, of which ``most_drafts`` are one row's. ``times``: measured ones."""

    method: str = "off"
    device_drafts: int = 0
    max_entries: int = MAX_ENTRIES
    most_drafts: int = MAX_DRAFTS
    times: StepTimes = StepTimes()


def _error(message: str, key: str) -> ConfigError:
    return ConfigError(f"{OPTION}: {message}", param=f"{OPTION}.{key}")


def parse_speculative_config(text: str | None) -> SpeculativeOptions:
    """The options of ``--speculative-config``, without it no drafts; raises `ConfigError` naming what is wrong and what
    is known."""
    if not text:
        return SpeculativeOptions(method="off")
    stated = read_object(text, OPTION, example='{"method": "suffix"}')
    known = [item.name for item in fields(SpeculativeOptions)]
    for name in stated:
        if name in _REFUSED:
            raise _error(f"{name} is not supported: {_REFUSED[name]}", name)
        if name not in known:
            shown = ", ".join(key for key in known if key != "acceptance_rate")
            raise _error(f"no key {name[:80]!r}{suggest(name, known, otherwise=f'; known: {shown}')}", name[:80])
    try:
        return SpeculativeOptions(**stated)
    except ConfigError as error:
        if str(error.param).startswith(OPTION):
            raise
        raise _error(str(error), str(error.param)) from error
