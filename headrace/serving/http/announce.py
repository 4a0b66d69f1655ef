"""What the user sees when the server is ready: where it is, how to try it, where the memory went."""

from __future__ import annotations

import json
import logging
import os
import shlex
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headrace.base.messages import MemoryLine, ModelFacts

if TYPE_CHECKING:
    from headrace.service.tokenization import Tokenizer


logger = logging.getLogger(__name__)


def format_bytes(num_bytes: int) -> str:
    """``1.50 GiB``."""
    size, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(size) >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.2f} {units[0]}"


def memory_table(lines: list[MemoryLine], device: str) -> Table:
    """The memory plan as a table."""
    table = Table(title=f"Memory on {device}", title_justify="left", title_style="bold")
    table.add_column("what")
    table.add_column("size", justify="right")
    table.add_column("note")
    for line in lines:
        table.add_row(line.name, format_bytes(line.num_bytes), line.note)
    return table


FIRST_QUESTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": (
        "chat/completions",
        {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 32}
    ),
    "complete": ("completions", {"prompt": "The capital of France is", "max_tokens": 32}),
    "complete ids": ("completions", {"prompt": [1, 2, 3], "max_tokens": 32}),
    "embed": ("embeddings", {"input": ["What is the capital of France?"]}),
    "classify": ("classify", {"input": ["The mill wheel turns."]}),
}


def curl_line(address: str, model: str, *, has_key: bool, task: str = "generate") -> str:
    """A command to copy that asks the model something."""
    route, question = FIRST_QUESTIONS[task]
    body = json.dumps({"model": model, **question})
    key = " -H 'Authorization: Bearer KEY'" if has_key else ""
    return f"curl {address}/v1/{route} -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"


def _first_task(facts: ModelFacts, tokenizer: Tokenizer | None) -> str:
    """Which of the first questions the model can take."""
    if facts.pooling is not None:
        return facts.pooling.kind
    return "complete ids" if tokenizer is None else "generate" if tokenizer.has_chat_template else "complete"


def announce_ready(
    console: Console, *, address: str, name: str, facts: ModelFacts, memory: list[MemoryLine], has_key: bool,
    tokenizer: Tokenizer | None,
) -> None:
    """Print the memory plan, the address and a first command. Where nobody can read them the server goes on without."""
    about = f"{facts.num_parameters / 1e6:,.0f}M parameters, {facts.dtype}, context {facts.max_model_len:,}"
    if facts.num_kv_tokens:
        about += f", room for {facts.num_kv_tokens:,} tokens"
    task = _first_task(facts, tokenizer)
    try:
        with console.capture() as captured:
            console.print(memory_table(memory, facts.device))
            console.print(f"[bold]{escape(name)}[/] is ready: {about}", highlight=False, soft_wrap=True)
            console.print(
                f"[bold]{address}[/]  chat page, OpenAI API under {address}/v1, all routes in {address}/openapi.json",
                highlight=False, soft_wrap=True
            )
            console.print(
                curl_line(address, name, has_key=has_key, task=task), highlight=False, markup=False, soft_wrap=True
            )
        console.file.write(captured.get().encode(console.encoding, "replace").decode(console.encoding))
        console.file.flush()
    except OSError as error:  # a pipe without a reader, a full disk
        logger.warning("ready on %s; the standard output cannot be written to: %s", address, error)
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), console.file.fileno())  # what is buffered must not fail again at exit
