"""`RuleState`: bias, allowed tokens, bad words, minimum length and thinking limits of the rows that have such rules. V
vocabulary.

What a set of rows needs is joined into flat index tensors once and kept while the set stays the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from headrace.base.sampling import LogitRules
from headrace.execution.rows import RowTokens
from headrace.execution.thinking import ThinkingState
from headrace.execution.upload import Upload, to_device

NO_TOKEN = -1
"""Stands for any token in a bad word's prefix and for no token in a row's history: no id is negative."""


@dataclass(frozen=True, slots=True)
class _JoinedRules:
    """Rules of n rows; indices are flat into their logits [n, V]. ``kept`` are allowed tokens of the rows ``confined``.
    ``word_*``: bad words of several tokens: last ids, prefixes [words, W] right-aligned, and whose they are."""

    bias_index: torch.Tensor
    bias: torch.Tensor
    confined: torch.Tensor
    kept: torch.Tensor
    banned: torch.Tensor
    word_last: torch.Tensor
    word_prefix: torch.Tensor
    word_row: torch.Tensor


class RuleState:
    """``recent`` [max_rows + 1, W] int64: the latest tokens of every row with bad words, newest last; W is the longest
    prefix of a bad word so far."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device):
        self._device, self._vocab_size = device, vocab_size
        self._recent = torch.full((max_rows + 1, 0), NO_TOKEN, dtype=torch.int64, device=device)
        self._rules: dict[int, LogitRules] = {}
        self._thinking = ThinkingState(max_rows, device)
        self._joined: tuple[tuple[tuple[int, bool], ...], _JoinedRules] | None = None

    def start(self, row: int, known: RowTokens) -> None:
        """Take a row's rules and the tail of its tokens."""
        rules = known.sampling.rules
        assert rules is not None
        if known.sampling.grammar is not None:  # its masks see to the minimum length
            rules = msgspec.structs.replace(rules, min_tokens=0)
        self._rules[row] = rules
        self._joined = None
        self._thinking.start(row, known)
        width = max((len(word) - 1 for word in rules.bad_words), default=0)
        if not width:
            return
        if width > self._recent.shape[1]:
            older = torch.full(
                (len(self._recent), width - self._recent.shape[1]), NO_TOKEN, dtype=torch.int64, device=self._device
            )
            self._recent = torch.cat((older, self._recent), dim=1)
        tail = known.token_ids[-self._recent.shape[1] :]
        self._recent[row] = NO_TOKEN
        self._recent[row, self._recent.shape[1] - len(tail) :] = to_device(tail, self._device)

    def release(self, row: int) -> None:
        """Forget a row's rules, if it has any."""
        if self._rules.pop(row, None) is not None:
            self._joined = None
            self._thinking.release(row)

    def pack(self, rows: np.ndarray, output_lens: np.ndarray, upload: Upload) -> None:
        """Join the rules of these rows, whose next tokens have these indices in their outputs."""
        upload.add("rule_rows", rows)
        self._thinking.pack(rows, output_lens, upload)
        key = tuple(
            (int(row), int(length) < self._rules[int(row)].min_tokens) for row,
            length in zip(rows, output_lens, strict=True)
        )
        if self._joined is None or self._joined[0] != key:
            self._joined = (key, self._join(key))

    def apply(self, logits: torch.Tensor, sent: dict[str, torch.Tensor]) -> None:
        """Edit logits [n, V], contiguous, of the packed rows in place: bias, allowed, bad words, minimum length,
        thinking."""
        assert self._joined is not None
        joined, flat = self._joined[1], logits.view(-1)
        flat.index_add_(0, joined.bias_index, joined.bias)
        if joined.confined.numel():
            kept = flat.index_select(0, joined.kept)
            logits.index_fill_(0, joined.confined, -torch.inf)
            flat.index_copy_(0, joined.kept, kept)
        flat.index_fill_(0, joined.banned, -torch.inf)
        if joined.word_last.numel():
            recent = self._recent.index_select(0, joined.word_row)
            is_due = ((recent == joined.word_prefix) | (joined.word_prefix == NO_TOKEN)).all(-1)
            limit = torch.where(is_due, -torch.inf, torch.inf)
            flat.scatter_reduce_(0, joined.word_last, limit, "amin")
        self._thinking.apply(logits, sent)

    def push(self, ids: torch.Tensor, sent: dict[str, torch.Tensor]) -> None:
        """Remember the tokens [n] drawn for the packed rows."""
        if self._recent.shape[1]:
            rows = sent["rule_rows"]
            self._recent[rows] = torch.cat((self._recent[rows, 1:], ids.unsqueeze(1)), dim=1)
        self._thinking.push(ids, sent)

    def _join(self, key: tuple[tuple[int, bool], ...]) -> _JoinedRules:
        bias_index, bias, confined, kept, banned = [], [], [], [], []
        words: list[tuple[int, list[int], int]] = []
        for local, (row, is_short) in enumerate(key):
            rules, base = self._rules[row], local * self._vocab_size
            bias_index.extend(base + token for token in rules.bias)
            bias.extend(rules.bias.values())
            if rules.allowed_ids:
                confined.append(local)
                kept.extend(base + token for token in sorted(set(rules.allowed_ids)))
            if is_short:
                banned.extend(base + token for token in rules.held_ids)
            banned.extend(base + word[0] for word in rules.bad_words if len(word) == 1)
            words.extend((base + word[-1], word[:-1], row) for word in rules.bad_words if len(word) > 1)
        prefix = np.full((len(words), self._recent.shape[1]), NO_TOKEN, dtype=np.int64)
        for i, (_, ids, _) in enumerate(words):
            prefix[i, prefix.shape[1] - len(ids) :] = ids
        return _JoinedRules(
            self._send(bias_index), to_device(np.array(bias, dtype=np.float32), self._device), self._send(confined),
            self._send(kept),
            self._send(banned), self._send([w[0] for w in words]), to_device(prefix, self._device),
            self._send([w[2] for w in words]),
        )

    def _send(self, values: list[int]) -> torch.Tensor:
        return to_device(np.array(values, dtype=np.int64), self._device)
