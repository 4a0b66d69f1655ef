"""`build_engine`: from configuration to a ready `Engine` in this process."""

from __future__ import annotations

from functools import partial

from headrace.base import env
from headrace.base.config import EngineConfig, ModelConfig
from headrace.base.errors import ConfigError
from headrace.base.grammar import Vocabulary
from headrace.base.hooks import HOOKS, load_hooks
from headrace.base.plugins import start_plugins
from headrace.base.stale_locks import sweep_stale_locks
from headrace.execution.executor import build_executor
from headrace.scheduling.scheduler import Scheduler
from headrace.service.engine import Engine
from headrace.service.executor import Progress

HOOKS.add(
    "step_log", "headrace.service.step_log:StepLog",
    supports=lambda config: None if env.log_level() == "debug" else "needs --log-level debug",
    doc="steps and requests in the log, at level debug",
)


def ignore_progress(stage: str, fraction: float) -> None:
    """A `Progress` that tells nobody."""


def read_vocabulary(config: ModelConfig) -> Vocabulary:
    """The model's tokenizer as grammars see it; raises `ConfigError` or `ModelError` when there is none."""
    # Here, since an engine starts sooner without it, and most never need it.
    from headrace.service.client.prompts import open_tokenizer

    tokenizer = open_tokenizer(config)
    if tokenizer is None:
        raise ConfigError("the model is served without one", param="skip_tokenizer")
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    return Vocabulary(tokens, tokenizer.bytes_table.special_ids, partial(tokenizer.encode, add_special_tokens=False))


def build_engine(config: EngineConfig, progress: Progress = ignore_progress) -> Engine:
    """Load the model onto its device and put a scheduler in front; raises the typed errors of base/errors."""
    sweep_stale_locks(env.torch_extensions_dir())
    start_plugins()
    executor = build_executor(config, progress)
    executor.serve_grammars(partial(read_vocabulary, config.model))
    hooks = load_hooks(executor.config)
    scheduler = Scheduler(executor.config.scheduler, executor.config.cache, executor.layout, hooks=hooks)
    return Engine(scheduler, executor, hooks)
