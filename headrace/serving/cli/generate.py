"""``headrace generate``: prompts from arguments, a file or stdin; one JSON line per output. An invalid prompt fails
alone."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, TextIO

import msgspec

from headrace.base.errors import ConfigError, HeadraceError, RequestError
from headrace.base.messages import ErrorInfo
from headrace.base.sampling import SamplingParams
from headrace.service.client.outputs import CompletionOutput, GenerationOutput
from headrace.service.client.prompts import encode_prompt, require_tokenizer
from headrace.service.client.requests import build_requests
from headrace.serving.cli.commands import ENGINE
from headrace.serving.cli.flags import Invocation
from headrace.serving.cli.options import GenerateOptions, SamplingOptions
from headrace.serving.offline.llm import LLM

MAX_LINE_CHARS = 64 << 20
SAMPLING_FIELDS = frozenset(SamplingParams.__struct_fields__)


@dataclass
class Item:
    """One prompt: ``content`` is text, token ids, or chat messages. ``error``: why it cannot run. ``token_ids`` and
    ``params`` are set by `_prepare`."""

    content: Any
    overrides: dict[str, Any] = field(default_factory=dict)
    user_id: Any = None
    is_chat: bool = False
    error: HeadraceError | None = None
    token_ids: list[int] = field(default_factory=list)
    params: SamplingParams | None = None


def run(invocation: Invocation) -> int:
    """Generate; 1 when any prompt failed."""
    options, sampling = invocation.section("generate"), invocation.section("sampling")
    engine = invocation.given_in(ENGINE)
    model = engine.pop("model", None) or invocation.section("model").model
    with contextlib.ExitStack() as stack:
        items = read_items(invocation.words, options, stack)
        output = stack.enter_context(_open(options.output, "w")) if options.output else sys.stdout
        llm = stack.enter_context(LLM(model, **engine))
        for item in items:
            _prepare(item, llm, options, sampling)
        ready = [item for item in items if item.error is None]
        results = llm.generate(
            prompt_token_ids=[item.token_ids for item in ready],
            sampling_params=[item.params for item in ready if item.params is not None],
            progress=sys.stderr.isatty() and len(ready) > 1, errors="return",
        ) if ready else []
        return 1 if write_results(items, iter(results), output) else 0


def read_items(words: list[str], options: GenerateOptions, stack: contextlib.ExitStack) -> list[Item]:
    """The prompts from arguments, file or stdin; raises `ConfigError` for none, or for two sources."""
    if options.system is not None and not options.chat:
        raise ConfigError("system needs --chat: a plain prompt has no system message", param="system")
    if words and options.input is not None:
        raise ConfigError("give prompts as arguments or with --input, not both", param="input")
    if words:
        return [Item(text, is_chat=options.chat) for text in words]
    if options.input is None and sys.stdin.isatty():
        raise ConfigError(
            'no prompt: give one as an argument, with --input FILE, or on stdin; e.g. headrace generate "Hello"',
            param="input"
        )
    is_stdin = options.input in (None, "-")
    lines = sys.stdin if is_stdin else stack.enter_context(_open(options.input or "", "r"))
    name = "stdin" if is_stdin else options.input or ""
    try:
        items = list(_read_lines(lines, options, name))
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name} must be UTF-8 text: {error.reason} at byte {error.start} of what was read", param="input"
        ) from error
    if not items:
        raise ConfigError("no prompt: the input is empty", param="input")
    return items


def _open(path: str, mode: Literal["r", "w"]) -> TextIO:
    try:
        return open(path, mode, encoding="utf-8")
    except OSError as error:
        param = "input" if mode == "r" else "output"
        raise ConfigError(f"cannot open {path}: {error.strerror}", param=param) from error


def _read_lines(lines: Iterable[str], options: GenerateOptions, name: str) -> Iterator[Item]:
    # Line numbers of errors count empty lines, too.
    numbered = ((number, line.rstrip("\r\n")) for number, line in enumerate(lines, 1))
    filled = ((number, line) for number, line in numbered if line.strip())
    first = next(filled, None)
    if first is None:
        return
    is_json = (
        # The first line decides for all: a text file may have a later line that starts with a brace.
        options.input_format == "jsonl"
        or (options.input_format == "auto" and (name.endswith(".jsonl") or first[1].lstrip().startswith("{")))
    )
    for number, line in chain([first], filled):
        yield _read_json_item(line, f"{name} line {number}", options) if is_json else Item(line, is_chat=options.chat)


def _read_json_item(line: str, where: str, options: GenerateOptions) -> Item:
    """A line is a JSON string, or an object with ``prompt`` (text or ids) or ``messages``, optional ``id`` and sampling
    parameters."""
    try:
        if len(line) > MAX_LINE_CHARS:
            raise RequestError(f"longer than {MAX_LINE_CHARS} characters")
        content = json.loads(line)
        fields = {"prompt": content} if isinstance(content, str) else content
        if not isinstance(fields, dict) or ("prompt" in fields) == ("messages" in fields):
            raise RequestError("must be an object with either prompt or messages")
        if not isinstance(fields.get("prompt", ""), str | list) or not isinstance(fields.get("messages", []), list):
            raise RequestError("prompt must be text or a list of token ids, messages a list")
        unknown = set(fields) - SAMPLING_FIELDS - {"prompt", "messages", "id"}
        if unknown:
            raise RequestError(
                f"unknown field {min(unknown)!r}; it may have prompt or messages, id, and sampling parameters"
            )
    except (ValueError, RecursionError) as error:
        return Item(None, error=RequestError(f"{where}: {error}", param="input"))
    overrides = {key: value for key, value in fields.items() if key in SAMPLING_FIELDS}
    is_chat = "messages" in fields or (options.chat and isinstance(fields["prompt"], str))
    return Item(fields.get("messages", fields.get("prompt")), overrides, fields.get("id"), is_chat)


def _prepare(item: Item, llm: LLM, options: GenerateOptions, sampling: SamplingOptions) -> None:
    """Set the item's ids and parameters, and validate them, so that an invalid item does not stop the others."""
    if item.error is not None:
        return
    try:
        defaults = {**llm.facts.default_sampling, "n": options.n, "logprobs": options.logprobs}
        item.params = msgspec.convert(
            {**msgspec.to_builtins(sampling.to_params(defaults), str_keys=True), **item.overrides}, SamplingParams,
            strict=False
        )
        if isinstance(item.content, list) and not item.is_chat:
            item.token_ids = list(item.content)
        elif item.is_chat:
            item.token_ids = encode_prompt(
                _render(item.content, llm, options.system), llm.tokenizer, add_special_tokens=False
            )
        else:
            item.token_ids = encode_prompt(item.content, llm.tokenizer)
        # Only validates: `LLM.generate` would stop at the first invalid prompt.
        build_requests("check", item.token_ids, item.params, facts=llm.facts, tokenizer=llm.tokenizer)
    except msgspec.ValidationError as error:
        # msgspec: "Expected `int`, got `str` - at `$.max_tokens`"
        what, _, where = str(error).partition(" - at `$.")
        param = where.rstrip("`") or None
        item.error = RequestError(f"{param or 'sampling parameters'}: {what}", param=param)
    except HeadraceError as error:
        item.error = error


def _render(content: Any, llm: LLM, system: str | None) -> str:
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    if system is not None and not any(isinstance(m, dict) and m.get("role") == "system" for m in messages):
        messages = [{"role": "system", "content": system}, *messages]
    return require_tokenizer(llm.tokenizer).render_chat(messages)


def write_results(items: list[Item], results: Iterator[GenerationOutput], output: TextIO) -> int:
    """Write a JSON line per output, in the order of the prompts; returns the number of failures."""
    num_failed = 0
    for index, item in enumerate(items):
        about = {"index": index, **({"id": item.user_id} if item.user_id is not None else {}), "prompt": item.content}
        if item.error is not None:
            num_failed += 1
            _write(output, {**about, "error": _describe(ErrorInfo.of(item.error))})
            continue
        # `results` has outputs of valid items only, in the same order.
        result = next(results)
        for choice in result.outputs:
            num_failed += choice.error is not None
            _write(output, {**about, **_choice(choice, result)})
    output.flush()
    return num_failed


def _choice(choice: CompletionOutput, result: GenerationOutput) -> dict[str, Any]:
    usage = {
        "prompt_tokens": len(result.prompt_token_ids), "completion_tokens": len(choice.token_ids),
        "cached_tokens": result.num_cached_tokens
    }
    line: dict[str, Any] = {
        "choice": choice.index, "text": choice.text, "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason, "usage": usage
    }
    if choice.logprobs is not None:
        line["logprobs"] = [
            {
                "token_id": t.token_id, "logprob": t.logprob,
                "top": dict(zip(map(str, t.top_ids), t.top_logprobs, strict=True))
            }
            for t in choice.logprobs
        ]
    if choice.error is not None:
        line["error"] = _describe(choice.error)
    return line


def _describe(error: ErrorInfo) -> dict[str, Any]:
    return {"type": error.kind, "message": error.message, "param": error.param}


def _write(output: TextIO, line: dict[str, Any]) -> None:
    output.write(json.dumps(line, ensure_ascii=False) + "\n")
