"""How a token is sampled and when output stops: the user's `SamplingParams` and the engine's records made from it.

Refuses: torch, tokenizers. Strings (stop strings, bad words) are resolved by ``service/tokenization``.
"""

from __future__ import annotations

import math

import msgspec

from headrace.base.errors import RequestError
from headrace.base.grammar import Grammar

MAX_TOP_LOGPROBS = 50
MAX_LOGPROBS = 2**20
"""Logprobs in a request that asks for those of all tokens."""
MAX_LOGPROB_IDS = 128
MAX_STOPS = 32
MAX_STOP_TEXT = 1024
MAX_STOP_REGEX = 256
MAX_BIASED_TOKENS = 4096
MAX_BAD_WORDS = 128
MAX_N = 128
MAX_BREAKERS, MAX_BREAKER_TEXT = 32, 64
MAX_DRY_LENGTH = 256
DRY_BREAKERS = ("\n", ":", '"', "*")
"""Where sequences end by default, as in llama.cpp."""
GREEDY_TEMPERATURE = 1e-5  # below, the argmax is taken, as in vLLM


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Limits reasoning to ``max_tokens`` tokens; then ``end`` is forced. ``start``: the mark that begins reasoning in
    the output; None when the prompt has begun it. Both marks must be single tokens of the model."""

    max_tokens: int
    end: str
    start: str | None = None


class RepetitionParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """DRY and XTC, with llama.cpp's names and defaults. DRY: a token that would continue a sequence of at least
    ``dry_allowed_length`` tokens that the prompt or the output holds already loses ``dry_multiplier * dry_base **
    (length - dry_allowed_length)``. Sequences end at ``dry_sequence_breakers``; ``dry_penalty_last_n`` is how many of
    the latest tokens are looked at (-1: all). XTC: with the probability ``xtc_probability`` all tokens that have at
    least ``xtc_threshold`` of the probability are excluded, except for the least likely of them; greedy requests ignore
    it.
    """

    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: list[str] | None = None
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1

    def breakers(self) -> tuple[str, ...]:
        """``dry_sequence_breakers``, or the default."""
        return tuple(DRY_BREAKERS if self.dry_sequence_breakers is None else self.dry_sequence_breakers)


class EndParams(RepetitionParams, kw_only=True, omit_defaults=True):
    """When output ends, and how it becomes text. ``stop_regex``: patterns that end it like the strings in ``stop``
    (`headrace.service.tokenization.stop_patterns`). ``keep_special_tokens`` are texts: special tokens that occur in
    them are not skipped. With ``fits_context`` the output is as long as the context has room for where that is less
    than ``max_tokens``; without it such a request is refused."""

    max_tokens: int | None = 16
    fits_context: bool = False
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_regex: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    keep_special_tokens: list[str] | None = None
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    thinking_budget: ThinkingBudget | None = None

    def stop_strings(self) -> list[str]:
        """``stop`` as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def stop_patterns(self) -> list[str]:
        """``stop_regex`` as a list."""
        return [self.stop_regex] if isinstance(self.stop_regex, str) else list(self.stop_regex or ())


class ReportParams(EndParams, kw_only=True, omit_defaults=True):
    """What is told about tokens. ``logprobs=k`` returns the sampled token's logprob and the k best, -1 all of them (at
    most `MAX_LOGPROBS` numbers in a request); ``prompt_logprobs`` likewise for the prompt. ``logprob_token_ids``:
    tokens whose logprobs are returned at every position where logprobs are."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None

    @property
    def logprobs_or_named(self) -> int | None:
        """``logprobs``, or 0 where only named tokens are wanted."""
        return 0 if self.logprobs is None and self.logprob_token_ids else self.logprobs

    @property
    def wants_all_logprobs(self) -> bool:
        """Whether the logprobs of all tokens are wanted anywhere."""
        return -1 in (self.logprobs, self.prompt_logprobs)


class TransferSpec(msgspec.Struct, frozen=True, array_like=True):
    """Where a request's KV pages are exchanged between two engines: ``room`` names the exchange on both sides; a decode
    engine fetches from the prefill engine whose transfer agent listens on ``host`` and ``port``."""

    room: str
    host: str = ""
    port: int = 0


class TimestampRules(msgspec.Struct, frozen=True, array_like=True):
    """Output with time stamps, which are the tokens from ``first_id`` on: it begins with one, at most ``most_at_first``
    behind the first; they come in pairs but for the last before ``end_id``, the end of text, and never fall. The token
    before ``first_id`` asks for output without any."""

    first_id: int
    end_id: int
    most_at_first: int


class SpeechRules(msgspec.Struct, frozen=True):
    """How sound is written down: tokens that are never written, and those that output does not begin with."""

    banned_ids: list[int] = []
    banned_first_ids: list[int] = []
    timestamps: TimestampRules | None = None


class SamplingParams(ReportParams, kw_only=True, omit_defaults=True):
    """A user's sampling parameters; names and meaning as in vLLM's class of the same name.

    temperature 0 is greedy. ``top_k`` 0 or -1 keeps all tokens, ``top_p`` 0 the most likely alone. ``seed`` makes
    sampling reproducible whatever else runs. ``grammar`` confines the output; it ends where the grammar leaves nothing
    to write, whatever ``min_tokens`` and ``ignore_eos`` say. ``transfer``: with which engine KV pages are exchanged.
    ``speech``: how a model that writes sound down does so.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    bad_words: list[str] | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    grammar: Grammar | None = None
    transfer: TransferSpec | None = None
    speech: SpeechRules | None = None

    def validate(self) -> SamplingParams:
        """Check every type and bound; raises `RequestError` naming the field. Returns self."""
        _check_types(self)
        _check_ranges(self)
        _check_amounts(self)
        _check_repetition(self)
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            _fail("grammar", "a Grammar, such as Grammar.json_schema({...})", self.grammar)
        return self


def _fail(param: str, rule: str, value: object) -> None:
    raise RequestError(f"{param} must be {rule}, got {value!r}", param=param)


_DEFAULTS = tuple((field.name, field.default) for field in msgspec.structs.fields(SamplingParams))


def _check_types(p: SamplingParams) -> None:
    """Check the types of fields: msgspec checks a struct when it is decoded, not when it is constructed in Python. Only
    fields that differ from their default are converted, as this runs for every request."""
    fields = {
        name: float(value) if isinstance(value, float) else value  # numpy's floats are floats
        for name, default in _DEFAULTS if (value := getattr(p, name)) is not default and name != "grammar"
    }
    try:
        msgspec.convert(fields, SamplingParams)
    except msgspec.ValidationError as error:
        fault, _, where = str(error).partition(" - at ")
        path = where.rpartition("$.")[2].strip("`")
        raise RequestError(f"{path}: {fault.lower()}", param=path.partition("[")[0]) from error


def _check_number(p: SamplingParams, param: str, low: float, high: float, *, above: bool = False) -> None:
    value = getattr(p, param)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        _fail(param, "a finite number", value)
    if value < low or value > high or (above and value == low):
        _fail(param, f"{'above' if above else 'at least'} {low} and at most {high}", value)


def _check_ranges(p: SamplingParams) -> None:
    _check_number(p, "temperature", 0.0, 100.0)
    _check_number(p, "top_p", 0.0, 1.0)
    _check_number(p, "min_p", 0.0, 1.0)
    _check_number(p, "repetition_penalty", 0.0, 10.0, above=True)
    _check_number(p, "presence_penalty", -2.0, 2.0)
    _check_number(p, "frequency_penalty", -2.0, 2.0)
    _check_number(p, "n", 1, MAX_N)
    _check_number(p, "top_k", -1, 2**31 - 1)
    _check_number(p, "min_tokens", 0, 2**31 - 1)
    if p.max_tokens is not None:
        _check_number(p, "max_tokens", 1, 2**31 - 1)
        if p.min_tokens > p.max_tokens:
            _fail("min_tokens", f"at most max_tokens ({p.max_tokens})", p.min_tokens)
    if p.thinking_budget is not None and p.thinking_budget.max_tokens < 0:
        _fail("thinking_budget", "at least 0", p.thinking_budget.max_tokens)
    if p.seed is not None and not -(2**63) <= p.seed < 2**63:
        _fail("seed", "a 64-bit integer", p.seed)


def _check_amounts(p: SamplingParams) -> None:
    for param in ("logprobs", "prompt_logprobs"):
        value = getattr(p, param)
        if value is not None and not -1 <= value <= MAX_TOP_LOGPROBS:
            _fail(param, f"at least 0 and at most {MAX_TOP_LOGPROBS}, or -1 for all tokens", value)
    if p.logprob_token_ids and len(p.logprob_token_ids) > MAX_LOGPROB_IDS:
        _fail("logprob_token_ids", f"at most {MAX_LOGPROB_IDS} ids", f"{len(p.logprob_token_ids)} ids")
    stops = p.stop_strings()
    if len(stops) > MAX_STOPS or any(not s or len(s) > MAX_STOP_TEXT for s in stops):
        _fail(
            "stop", f"at most {MAX_STOPS} non-empty strings of at most {MAX_STOP_TEXT} characters",
            f"{len(stops)} strings"
        )
    patterns = p.stop_patterns()
    if len(patterns) > MAX_STOPS or any(not s or len(s.encode()) > MAX_STOP_REGEX for s in patterns):
        _fail(
            "stop_regex", f"at most {MAX_STOPS} non-empty patterns of at most {MAX_STOP_REGEX} bytes",
            f"{len(patterns)} patterns"
        )
    if p.stop_token_ids and len(p.stop_token_ids) > MAX_STOPS * 4:
        _fail("stop_token_ids", f"at most {MAX_STOPS * 4} ids", f"{len(p.stop_token_ids)} ids")
    if p.bad_words and len(p.bad_words) > MAX_BAD_WORDS:
        _fail("bad_words", f"at most {MAX_BAD_WORDS} strings", f"{len(p.bad_words)} strings")
    if p.logit_bias and len(p.logit_bias) > MAX_BIASED_TOKENS:
        _fail("logit_bias", f"at most {MAX_BIASED_TOKENS} entries", f"{len(p.logit_bias)} entries")
    if p.logit_bias and any(not -100.0 <= b <= 100.0 for b in p.logit_bias.values()):
        _fail("logit_bias", "values from -100 to 100", "a value outside")
    if p.allowed_token_ids is not None and not 0 < len(p.allowed_token_ids) <= MAX_BIASED_TOKENS:
        _fail("allowed_token_ids", f"1 to {MAX_BIASED_TOKENS} ids", f"{len(p.allowed_token_ids)} ids")


def _check_repetition(p: SamplingParams) -> None:
    _check_number(p, "dry_multiplier", 0.0, 100.0)
    _check_number(p, "dry_base", 1.0, 100.0)
    _check_number(p, "dry_allowed_length", 1, MAX_DRY_LENGTH)
    _check_number(p, "dry_penalty_last_n", -1, 2**31 - 1)
    _check_number(p, "xtc_probability", 0.0, 1.0)
    _check_number(p, "xtc_threshold", 0.0, 1.0)
    breakers = p.dry_sequence_breakers or []
    if len(breakers) > MAX_BREAKERS or any(not b or len(b) > MAX_BREAKER_TEXT for b in breakers):
        _fail(
            "dry_sequence_breakers",
            f"at most {MAX_BREAKERS} non-empty strings of at most {MAX_BREAKER_TEXT} characters",
            f"{len(breakers)} strings"
        )


class DryPenalty(msgspec.Struct, frozen=True, array_like=True):
    """DRY of a row; see `RepetitionParams`. ``last_n`` -1: the whole history. ``breakers``: a bit per token of the
    vocabulary, the least significant first; a set bit ends sequences, and such a token is never penalised."""

    multiplier: float
    base: float
    allowed_len: int
    last_n: int
    breakers: bytes


class Exclusion(msgspec.Struct, frozen=True, array_like=True):
    """XTC of a row; see `RepetitionParams`."""

    probability: float
    threshold: float


class Penalties(msgspec.Struct, frozen=True, array_like=True):
    """Repetition looks at prompt and output; presence and frequency at output alone (OpenAI's definitions). ``dry`` and
    ``xtc`` come after them, in this order."""

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    dry: DryPenalty | None = None
    xtc: Exclusion | None = None

    @property
    def counts_tokens(self) -> bool:
        """Whether a penalty depends on how often tokens occur."""
        return (self.repetition, self.presence, self.frequency) != (1.0, 0.0, 0.0)


class ThinkingLimit(msgspec.Struct, frozen=True, array_like=True):
    """Forces ``end_id`` once ``limit`` tokens are output and the reasoning has not ended. Reasoning begins at the first
    output token, or with ``start_id`` if that is not -1 (which ``limit`` then counts)."""

    limit: int
    end_id: int
    start_id: int = -1


class LogitRules(msgspec.Struct, frozen=True, array_like=True):
    """Edits of the logits by token id, applied in this order: bias, allowed, bad words, minimum length, thinking, time
    stamps.

    ``min_tokens``: while fewer tokens have been output, every id in ``held_ids`` (end-of-text and stop ids) is masked;
    with a grammar only where it allows something else.
    ``bad_words``: sequences; the last id of one is masked when the ids before it are the latest context.
    """

    bias: dict[int, float] = {}
    allowed_ids: list[int] = []
    bad_words: list[list[int]] = []
    min_tokens: int = 0
    held_ids: list[int] = []
    thinking: ThinkingLimit | None = None
    timestamps: TimestampRules | None = None

    @property
    def is_length_only(self) -> bool:
        """Whether a minimum length is the only rule."""
        special = self.thinking is not None or self.timestamps is not None
        return not (self.bias or self.allowed_ids or self.bad_words or special)


ALL_LOGPROBS = 2**31 - 1
"""Stands for the size of the vocabulary in `SamplingSpec`."""


class SamplingSpec(msgspec.Struct, frozen=True, array_like=True):
    """What the device needs to sample a row's tokens. ``seed`` is always set: the client makes one if the user did not.

    ``num_logprobs`` and ``num_prompt_logprobs``: -1 none, 0 the token itself, k the k best besides, `ALL_LOGPROBS` all.
    ``logprob_ids``: tokens whose logprobs are told besides.
    ``penalties``, ``rules`` and ``grammar`` are None in the common case so that the sampler can skip them.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    num_logprobs: int = -1
    num_prompt_logprobs: int = -1
    penalties: Penalties | None = None
    rules: LogitRules | None = None
    grammar: Grammar | None = None
    logprob_ids: list[int] = []

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE


class StopSpec(msgspec.Struct, frozen=True, array_like=True):
    """When the scheduler ends a request. ``max_tokens`` counts output tokens. Stop ids are honoured only from
    ``min_tokens`` on; ``eos_ids`` is empty when end-of-text is ignored. Stop strings are found by the client."""

    max_tokens: int
    min_tokens: int = 0
    eos_ids: list[int] = []
    stop_ids: list[int] = []
