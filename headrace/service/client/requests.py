"""Builds engine requests from prompt ids and `SamplingParams` or a `PoolingSpec`: checks all fields and resolves
strings (stop tokens, bad words, thinking marks) to token ids.

Refuses: queueing and page limits, which the engine knows.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Annotated, Any, NoReturn

import msgspec

from headrace.base.errors import ContextLengthExceeded, RequestError, UnsupportedFeature
from headrace.base.messages import EngineRequest, ModelFacts
from headrace.base.pooling import PoolingSpec
from headrace.base.sampling import (
    ALL_LOGPROBS,
    GREEDY_TEMPERATURE,
    MAX_LOGPROBS,
    MAX_TOP_LOGPROBS,
    DryPenalty,
    Exclusion,
    LogitRules,
    Penalties,
    SamplingParams,
    SamplingSpec,
    SpeechRules,
    StopSpec,
    ThinkingBudget,
    ThinkingLimit,
    TransferSpec,
)
from headrace.base.token_ids import pack_ids
from headrace.service.tokenization.stop_patterns import compile_stops
from headrace.service.tokenization.tokenizer import Tokenizer

SEED_BITS = 63

USES = {
    "embed": "embeddings: use /v1/embeddings", "classify": "scores of texts: use /v1/classify, /v1/score or /v1/rerank"
}
"""Results of pooling models, and the routes that return them."""
MAX_PRIORITY = 2**31


def build_requests(
    request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, *, facts: ModelFacts,
    tokenizer: Tokenizer | None,
    namespace: str = "", priority: int = 0, deadline_s: float | None = None,
) -> list[EngineRequest]:
    """One request per choice, with ids ``request_id/0`` … or ``request_id`` itself when ``n`` is 1.

    Choice i samples with the seed plus i. Raises `RequestError` naming the field that is wrong, and
    `ContextLengthExceeded` when prompt plus ``max_tokens`` do not fit ``facts.max_model_len``.
    """
    refuse_generation(facts)
    params.validate()
    _check_prompt(prompt_token_ids, facts)
    _check_strings(params, tokenizer)
    check_schedule(priority, deadline_s)
    prompt = pack_ids(prompt_token_ids)
    stop = _stop_spec(params, len(prompt), facts, tokenizer)
    _check_logprobs(params, len(prompt), stop.max_tokens, facts)
    rules, penalties = _logit_rules(params, stop, facts, tokenizer), _penalties(params, facts, tokenizer)
    seed = random.getrandbits(SEED_BITS) if params.seed is None else params.seed
    return [
        EngineRequest(
            request_id=request_id if params.n == 1 else f"{request_id}/{i}", prompt_token_ids=prompt,
            sampling=_sampling_spec(params, rules, penalties, seed, i), stop=stop, namespace=namespace,
            priority=priority, deadline_s=deadline_s, transfer=_transfer_of(params, i),
        )
        for i in range(params.n)
    ]


def refuse_generation(facts: ModelFacts) -> None:
    """Raise `RequestError` for a pooling model, which generates no text."""
    if facts.pooling is not None:
        raise RequestError(f"{facts.model} does not generate text; it makes {USES[facts.pooling.kind]}", param="model")


def special_stops(params: SamplingParams, tokenizer: Tokenizer | None) -> dict[int, str]:
    """Stop strings that are the text of a special token, by token id. With ``skip_special_tokens`` the text never
    contains them, so the engine must stop at the token."""
    if tokenizer is None or not params.skip_special_tokens:
        return {}
    found = {tokenizer.special_id(text): text for text in params.stop_strings()}
    return {token_id: text for token_id, text in found.items() if token_id is not None}


def check_schedule(priority: int, deadline_s: float | None) -> None:
    """Raise `RequestError` for a priority or deadline out of bounds."""
    if type(priority) is not int or abs(priority) > MAX_PRIORITY:
        raise RequestError(
            f"priority must be a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}, got {priority!r}",
            param="priority"
        )
    if deadline_s is not None and not (isinstance(deadline_s, (int, float)) and deadline_s > 0):
        raise RequestError(f"deadline_s must be a positive number, got {deadline_s!r}", param="deadline_s")


def _check_prompt(ids: Sequence[int], facts: ModelFacts) -> None:
    if not ids:
        raise RequestError("the prompt must hold at least one token", param="prompt")
    if len(ids) >= facts.max_model_len:
        reason = f"the prompt has {len(ids)}, and at least one of output must fit"
        raise ContextLengthExceeded.of(facts.max_model_len, reason, param="prompt")
    check_ids(ids, "prompt", facts.vocab_size)


@lru_cache(maxsize=8)
def _ids_below(vocab_size: int) -> Any:
    """The type of a list of token ids, for msgspec to check in one pass."""
    return list[Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]]


def check_ids(ids: Iterable[int], param: str, vocab_size: int) -> None:
    """Check types and range; raises `RequestError`. Done by msgspec in C: prompts may have 10^5 ids, and a batch
    hundreds of prompts. Only the error path loops in Python."""
    if not ids:
        return
    try:
        msgspec.convert(list(ids), _ids_below(vocab_size))
    except msgspec.ValidationError:
        _explain_ids(ids, param, vocab_size)


def _explain_ids(ids: Iterable[int], param: str, vocab_size: int) -> NoReturn:
    wrong = next((kind for kind in set(map(type, ids)) if kind is not int), None)
    if wrong is not None:
        raise RequestError(f"{param} must hold token ids (integers), got a {wrong.__name__}", param=param)
    low, high = min(ids), max(ids)
    raise RequestError(
        f"{param} holds token id {low if low < 0 else high}; ids are from 0 to {vocab_size - 1}", param=param
    )


def _check_strings(params: SamplingParams, tokenizer: Tokenizer | None) -> None:
    patterns = params.stop_patterns()
    if patterns:
        compile_stops(tuple(patterns))
    if tokenizer is not None and params.detokenize:
        return
    reason = "the model is served without a tokenizer" if tokenizer is None else "detokenize is false"
    if params.stop_strings():
        raise RequestError(f"stop strings cannot be found: {reason}; use stop_token_ids", param="stop")
    if patterns:
        raise RequestError(f"stop_regex cannot be searched: {reason}; use stop_token_ids", param="stop_regex")
    if params.bad_words and tokenizer is None:
        raise RequestError(f"bad_words cannot be made tokens: {reason}; use logit_bias", param="bad_words")


def _stop_spec(params: SamplingParams, prompt_len: int, facts: ModelFacts, tokenizer: Tokenizer | None) -> StopSpec:
    room = facts.max_model_len - prompt_len
    max_tokens = room if params.max_tokens is None else params.max_tokens
    if params.fits_context:
        max_tokens = min(max_tokens, room)
    if max_tokens > room:
        reason = f"the prompt has {prompt_len} and max_tokens is {max_tokens}"
        raise ContextLengthExceeded.of(facts.max_model_len, reason, param="max_tokens")
    if params.min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens must be at most {max_tokens}, the tokens there is room for; got {params.min_tokens}",
            param="min_tokens"
        )
    check_ids(params.stop_token_ids or (), "stop_token_ids", facts.vocab_size)
    stop_ids = dict.fromkeys([*(params.stop_token_ids or ()), *special_stops(params, tokenizer)])
    # With a grammar, end-of-text must always end the request: where the grammar is complete it allows nothing else.
    # ``min_tokens`` and ``ignore_eos`` are then kept by `LogitRules`, which mask it while the grammar allows more.
    ends_anyway = params.grammar is not None
    return StopSpec(
        max_tokens=max_tokens, min_tokens=0 if ends_anyway else params.min_tokens,
        eos_ids=[] if params.ignore_eos and not ends_anyway else list(facts.eos_ids), stop_ids=list(stop_ids),
    )


def _logit_rules(
    params: SamplingParams, stop: StopSpec, facts: ModelFacts, tokenizer: Tokenizer | None
) -> LogitRules | None:
    check_ids(params.logit_bias or (), "logit_bias", facts.vocab_size)
    check_ids(params.allowed_token_ids or (), "allowed_token_ids", facts.vocab_size)
    min_tokens = stop.max_tokens if params.ignore_eos and params.grammar is not None else params.min_tokens
    held = [*stop.eos_ids, *(stop.stop_ids if params.min_tokens else ())] if min_tokens else []
    bad_words = (
        _bad_word_ids(params.bad_words, tokenizer, facts.vocab_size) if params.bad_words and tokenizer is not None
        else []
    )
    thinking = _thinking_limit(params.thinking_budget, tokenizer) if params.thinking_budget is not None else None
    speech = params.speech or SpeechRules()
    bad_words += [[token_id] for token_id in speech.banned_ids]
    if speech.banned_first_ids:
        min_tokens, held = max(1, min_tokens), [*held, *speech.banned_first_ids]
    if not (params.logit_bias or params.allowed_token_ids or bad_words or held or thinking or speech.timestamps):
        return None
    return LogitRules(
        bias={token: float(bias) for token, bias in (params.logit_bias or {}).items()},
        allowed_ids=list(params.allowed_token_ids or ()),
        bad_words=bad_words, min_tokens=min_tokens if held else 0, held_ids=list(dict.fromkeys(held)),
        thinking=thinking, timestamps=speech.timestamps,
    )


def _thinking_limit(budget: ThinkingBudget, tokenizer: Tokenizer | None) -> ThinkingLimit:
    def one_token(text: str) -> int:
        ids = tokenizer.encode(text, add_special_tokens=False) if tokenizer is not None else []
        if len(ids) != 1:
            raise UnsupportedFeature(
                f"a thinking budget cannot be kept: {text!r} is not one token of this model", param="thinking_budget"
            )
        return ids[0]

    start_id = -1 if budget.start is None else one_token(budget.start)
    # The start token, if the output has to write it, does not count as reasoning.
    return ThinkingLimit(budget.max_tokens + (start_id >= 0), one_token(budget.end), start_id)


def _bad_word_ids(words: list[str], tokenizer: Tokenizer, vocab_size: int) -> list[list[int]]:
    """Token sequences of each word, at the start of a text and after a space: the two encode differently."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        if not bare:
            raise RequestError(f"bad_words must not hold empty words, got {word!r}", param="bad_words")
        for spelled in (bare, " " + bare):
            ids = tokenizer.encode(spelled, add_special_tokens=False)
            if ids and max(ids) < vocab_size:  # a tokenizer may have ids for which the model has no logits
                sequences[tuple(ids)] = None
    return [list(ids) for ids in sequences]


def _sampling_spec(
    params: SamplingParams, rules: LogitRules | None, penalties: Penalties, seed: int, choice: int
) -> SamplingSpec:
    is_first_alone = params.top_p == 0  # the smallest nucleus: one token
    # Prompt logprobs are the same for all choices: only the first asks for them.
    return SamplingSpec(
        temperature=float(params.temperature), top_k=1 if is_first_alone else max(params.top_k, 0),
        top_p=1.0 if is_first_alone else float(params.top_p), min_p=float(params.min_p),
        seed=_wrap_64(seed + choice), num_logprobs=_num_logprobs(params.logprobs_or_named),
        num_prompt_logprobs=-1 if choice else _num_logprobs(params.prompt_logprobs),
        penalties=None if penalties == Penalties() else penalties, rules=rules, grammar=params.grammar,
        logprob_ids=list(dict.fromkeys(params.logprob_token_ids or ())),
    )


def _num_logprobs(wanted: int | None) -> int:
    return -1 if wanted is None else ALL_LOGPROBS if wanted == -1 else wanted


def _penalties(params: SamplingParams, facts: ModelFacts, tokenizer: Tokenizer | None) -> Penalties:
    dry, xtc = None, None
    # a window of no tokens, as in llama.cpp
    if params.dry_multiplier > 0 and params.dry_penalty_last_n != 0:
        dry = DryPenalty(
            float(params.dry_multiplier), float(params.dry_base), params.dry_allowed_length, params.dry_penalty_last_n,
            _breakers(params, facts, tokenizer),
        )
    # Above a half no two tokens have that probability, so nothing could be excluded.
    if params.xtc_probability > 0 and params.xtc_threshold <= 0.5 and params.temperature >= GREEDY_TEMPERATURE:
        xtc = Exclusion(float(params.xtc_probability), float(params.xtc_threshold))
    return Penalties(
        float(params.repetition_penalty), float(params.presence_penalty), float(params.frequency_penalty), dry, xtc
    )


def _breakers(params: SamplingParams, facts: ModelFacts, tokenizer: Tokenizer | None) -> bytes:
    """The tokens that end sequences, as `DryPenalty.breakers`."""
    if tokenizer is None:
        if params.dry_sequence_breakers:
            raise RequestError(
                "dry_sequence_breakers cannot be made tokens: the model is served without a tokenizer",
                param="dry_sequence_breakers"
            )
        return bytes(-(-facts.vocab_size // 8))
    return tokenizer.mark_tokens(params.breakers(), facts.vocab_size)


def _check_logprobs(params: SamplingParams, prompt_len: int, max_tokens: int, facts: ModelFacts) -> None:
    """Bound what a request for all logprobs makes: numbers, not positions, are what fills memory."""
    check_ids(params.logprob_token_ids or (), "logprob_token_ids", facts.vocab_size)
    for param, value, positions in (
        ("logprobs", params.logprobs, params.n * max_tokens), ("prompt_logprobs", params.prompt_logprobs, prompt_len),
    ):
        most = MAX_LOGPROBS // facts.vocab_size
        if value == -1 and positions > most:
            advice = "lower max_tokens" if param == "logprobs" else "shorten the prompt"
            raise RequestError(
                f"{param} -1 returns {facts.vocab_size} logprobs for each of {positions} tokens; at most {most} tokens "
                f"fit a response: {advice}, or ask for up to {MAX_TOP_LOGPROBS}", param=param
            )


def _transfer_of(params: SamplingParams, choice: int) -> TransferSpec | None:
    """Where a choice's pages are exchanged: each has a room of its own."""
    spec = params.transfer
    return spec if spec is None or params.n == 1 else msgspec.structs.replace(spec, room=f"{spec.room}/{choice}")


def _wrap_64(value: int) -> int:
    """Wrap into the signed 64-bit range: seed plus choice index may exceed it."""
    return (value + 2**63) % 2**64 - 2**63


def build_pooling_request(
    request_id: str, token_ids: Sequence[int], spec: PoolingSpec, *, facts: ModelFacts, namespace: str = "",
    priority: int = 0,
    deadline_s: float | None = None,
) -> EngineRequest:
    """A checked pooling request for one text. Raises `RequestError` naming the field that is wrong, and
    `ContextLengthExceeded` when the text is longer than ``facts.max_model_len``."""
    if not token_ids:
        raise RequestError("the text must hold at least one token", param="input")
    if len(token_ids) > facts.max_model_len:
        advice = "Shorten it, or send truncate_prompt_tokens: -1 to have its end cut off"
        raise ContextLengthExceeded.of(facts.max_model_len, f"the text has {len(token_ids)}. {advice}", param="input")
    check_ids(token_ids, "input", facts.vocab_size)
    check_schedule(priority, deadline_s)
    check_ids(spec.label_ids, "label_token_ids", facts.vocab_size)
    if facts.pooling is None and not spec.label_ids and spec.alignment is None:
        raise RequestError(
            f"{facts.model} generates text; it makes no embeddings and no scores of texts. Serve a model made for "
            "that, or start with --task embed",
            param="model",
        )
    if facts.pooling is not None:
        if spec.label_ids:
            raise RequestError(
                f"{facts.model} has no logits of tokens; it makes {USES[facts.pooling.kind]}", param="label_token_ids"
            )
        spec = msgspec.structs.replace(spec, needs_all_tokens=facts.pooling.needs_all_tokens)
    return EngineRequest(
        request_id, pack_ids(token_ids), SamplingSpec(), StopSpec(0), namespace=namespace, priority=priority,
        deadline_s=deadline_s, pooling=spec,
    )
