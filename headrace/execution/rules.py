"""State of the rows whose logits are edited before sampling: `RuleState` (bias, allowed tokens, bad words, minimum
length, thinking limits, time stamps) and `PenaltyState` (token counts, and what works against repetition). V
vocabulary.

Each knows its rows up to the latest token that counts. A position behind drafts sees them too (`Drafted`), as if they
were output already; only those that count are then added to the state.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from headrace.base.sampling import LogitRules, Penalties, SamplingSpec, ThinkingLimit
from headrace.execution.repetition import DryState, exclude_top_choices
from headrace.execution.rows import RowTokens
from headrace.execution.timestamps import TimestampState
from headrace.execution.upload import Upload
from headrace.memory.copies import to_device

NO_TOKEN = -1
"""Stands for any token in a bad word's prefix and for no token in a row's history: no id is negative."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """The drafts before each of n sampled positions: ``entries`` [2, n] rows and offsets (`headrace.kernels.verify`),
    of which ``most`` is the largest offset, and ``drafts`` [rows, N] of all rows. Position i sees the first
    ``entries[1, i]`` drafts of its row."""

    entries: torch.Tensor
    most: int
    drafts: torch.Tensor

    def select(self, chosen: torch.Tensor) -> Drafted:
        """The drafts before the positions with the indices ``chosen``."""
        return Drafted(self.entries.index_select(1, chosen), self.most, self.drafts)

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [n, most], and [n, most] bool where these come before the position."""
        rows, offsets = self.entries
        tokens = self.drafts.index_select(0, rows)[:, : self.most]
        return tokens, torch.arange(self.most, device=rows.device) < offsets.unsqueeze(1)

    def read_counted(self, tokens: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For the rows of some of the positions their new tokens [n, most + 1], and [n, most + 1] bool which of these
        count; ``tokens`` [3, S] as of `headrace.kernels.verify.ACCEPT` for all positions."""
        step = torch.arange(self.most + 1, device=chosen.device)
        firsts = chosen - self.entries[1].index_select(0, chosen)
        index = (firsts.unsqueeze(1) + step).clamp(max=tokens.shape[1] - 1)
        return tokens[0][index], step < tokens[2].index_select(0, chosen).unsqueeze(1)


@dataclass(frozen=True, slots=True)
class _FlatRules:
    """Rules of n positions; ``*_index``, ``kept``, ``banned`` and ``word_last`` are flat indices into their logits
    [n, V]. ``confined`` are the indices in [0, n) of positions with allowed tokens, ``kept`` those tokens.
    ``word_*``: bad words of several tokens: the last token, the prefix [words, W] right-aligned, and the position.
    ``held_*``: tokens held back below a minimum length: the token, the length and the position."""

    bias_index: torch.Tensor
    bias: torch.Tensor
    confined: torch.Tensor
    kept: torch.Tensor
    banned: torch.Tensor
    word_last: torch.Tensor
    word_prefix: torch.Tensor
    word_at: torch.Tensor
    held_index: torch.Tensor
    held_len: torch.Tensor
    held_at: torch.Tensor


class ThinkingState:
    """Forces the end of reasoning where a row's limit is reached. ``is_thinking`` [max_rows + 1] bool, on the device:
    whether the row's output so far ends inside reasoning. The host cannot know: the latest token may not have reached
    it."""

    def __init__(self, max_rows: int, device: torch.device):
        self._is_thinking = torch.zeros(max_rows + 1, dtype=torch.bool, device=device)
        self._limits: dict[int, ThinkingLimit] = {}

    def start(self, row: int, known: RowTokens) -> None:
        """Take a row's limit, and whether its known output ends inside reasoning."""
        rules = known.sampling.rules
        if rules is None or rules.thinking is None:
            return
        limit = self._limits[row] = rules.thinking
        output = known.token_ids[known.prompt_len :]
        marks = output[(output == limit.end_id) | (output == limit.start_id)]
        # Without a mark: where no id starts it (-1), reasoning begins with the output.
        is_open = marks[-1] == limit.start_id if len(marks) else limit.start_id < 0
        self._is_thinking[row : row + 1].fill_(bool(is_open))

    def release(self, row: int) -> None:
        """Forget a row's limit, if it has one."""
        self._limits.pop(row, None)

    def pack(self, rows: np.ndarray, upload: Upload) -> None:
        """Add what `apply` and `push` need for those of these positions whose ``rows`` have a limit."""
        indices = [index for index, row in enumerate(rows) if int(row) in self._limits]
        if not indices:
            return
        limits = [self._limits[int(rows[index])] for index in indices]
        upload.add("thinking_indices", indices)
        upload.add("thinking_limits", [limit.limit for limit in limits])
        upload.add("thinking_ends", [limit.end_id for limit in limits])
        upload.add("thinking_starts", [limit.start_id for limit in limits])

    def apply(
        self, logits: torch.Tensor, output_lens: torch.Tensor, drafted: Drafted, sent: dict[str, torch.Tensor]
    ) -> None:
        """Force the end of reasoning on positions beyond their limit; logits [n, V], in place. ``output_lens`` [n] are
        the indices of the sampled tokens in their outputs."""
        if "thinking_indices" not in sent:
            return
        indices = sent["thinking_indices"]
        before = drafted.select(indices)
        is_thinking = self._follow(self._is_thinking.index_select(0, before.entries[0]), *before.read(), sent)
        own = logits.index_select(0, indices)
        forced = torch.full_like(own, -torch.inf).scatter_(1, sent["thinking_ends"].unsqueeze(1), 0.0)
        is_over = is_thinking & (output_lens.index_select(0, indices) >= sent["thinking_limits"])
        logits.index_copy_(0, indices, torch.where(is_over.unsqueeze(1), forced, own))

    def push(self, ids: torch.Tensor, counts: torch.Tensor, rows: torch.Tensor, sent: dict[str, torch.Tensor]) -> None:
        """Note where new tokens ``ids`` [n, k] of the packed positions' ``rows`` begin or end reasoning; ``counts``
        [n, k] bool: which of them count."""
        if "thinking_indices" not in sent:
            return
        rows, ids, counts = (part.index_select(0, sent["thinking_indices"]) for part in (rows, ids, counts))
        # Positions of one row write the same value.
        self._is_thinking.index_copy_(0, rows, self._follow(self._is_thinking.index_select(0, rows), ids, counts, sent))

    @staticmethod
    def _follow(
        is_thinking: torch.Tensor, ids: torch.Tensor, is_output: torch.Tensor, sent: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Whether outputs end inside reasoning [n], after those of the tokens ``ids`` [n, k] that are output."""
        for own, is_own in zip(ids.unbind(1), is_output.unbind(1), strict=True):
            after = (is_thinking | (own == sent["thinking_starts"])) & (own != sent["thinking_ends"])
            is_thinking = torch.where(is_own, after, is_thinking)
        return is_thinking


class RuleState:
    """``recent`` [max_rows + 1, W] int64 on the device: the latest tokens of every row with bad words, newest last; W
    is the longest prefix of a bad word so far. The rules of a set of positions are flattened into index tensors once,
    and kept while the rows of the positions stay the same."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device):
        self._device, self._vocab_size = device, vocab_size
        self._recent = torch.full((max_rows + 1, 0), NO_TOKEN, dtype=torch.int64, device=device)
        self._rules: dict[int, LogitRules] = {}
        self._thinking = ThinkingState(max_rows, device)
        self._timestamps = TimestampState(max_rows, device)
        self._flat: tuple[bytes, _FlatRules] | None = None

    def start(self, row: int, known: RowTokens) -> None:
        """Take a row's rules and the tail of its tokens."""
        rules = known.sampling.rules
        assert rules is not None
        if known.sampling.grammar is not None:  # its bitmasks enforce the minimum length
            rules = msgspec.structs.replace(rules, min_tokens=0)
        self._rules[row] = rules
        self._flat = None
        self._thinking.start(row, known)
        self._timestamps.start(row, known)
        width = max((len(word) - 1 for word in rules.bad_words), default=0)
        if not width:
            return
        if width > self._recent.shape[1]:
            older = torch.full(
                (len(self._recent), width - self._recent.shape[1]), NO_TOKEN, dtype=torch.int64, device=self._device
            )
            self._recent = torch.cat((older, self._recent), dim=1)  # W only grows; histories stay right-aligned
        tail = known.token_ids[-self._recent.shape[1] :]
        self._recent[row] = NO_TOKEN
        self._recent[row, self._recent.shape[1] - len(tail) :] = to_device(tail, self._device)

    def release(self, row: int) -> None:
        """Forget a row's rules, if it has any."""
        if self._rules.pop(row, None) is not None:
            self._flat = None
            self._thinking.release(row)
            self._timestamps.release(row)

    def pack(self, rows: np.ndarray, upload: Upload) -> None:
        """Add what `apply` and `push` need for positions of these rows."""
        self._thinking.pack(rows, upload)
        self._timestamps.pack(rows, upload)
        key = rows.tobytes()
        if self._flat is None or self._flat[0] != key:
            self._flat = (key, self._flatten(rows))

    def apply(
        self, logits: torch.Tensor, output_lens: torch.Tensor, drafted: Drafted, sent: dict[str, torch.Tensor]
    ) -> None:
        """Edit logits [n, V], contiguous, of the packed positions in place: bias, allowed, bad words, minimum length,
        thinking, time stamps. ``output_lens`` [n] are the indices of the sampled tokens in their outputs."""
        assert self._flat is not None
        rules, flat = self._flat[1], logits.view(-1)  # [n * V]
        flat.index_add_(0, rules.bias_index, rules.bias)
        if rules.confined.numel():
            # Save the allowed logits, ban the positions as a whole, put the saved ones back.
            kept = flat.index_select(0, rules.kept)
            logits.index_fill_(0, rules.confined, -torch.inf)
            flat.index_copy_(0, rules.kept, kept)
        flat.index_fill_(0, rules.banned, -torch.inf)
        if rules.word_last.numel():
            recent = self._find_recent(drafted).index_select(0, rules.word_at)  # [words, W]
            is_due = ((recent == rules.word_prefix) | (rules.word_prefix == NO_TOKEN)).all(-1)
            _ban(flat, rules.word_last, is_due)
        if rules.held_index.numel():
            _ban(flat, rules.held_index, output_lens.index_select(0, rules.held_at) < rules.held_len)
        self._thinking.apply(logits, output_lens, drafted, sent)
        drafts = drafted.read() if drafted.most else None
        self._timestamps.apply(logits, output_lens, drafted.entries[0], drafts, sent)

    def push(self, tokens: torch.Tensor, drafted: Drafted, sent: dict[str, torch.Tensor]) -> None:
        """Remember the new tokens of the packed positions' rows; ``tokens`` [3, S] and ``drafted`` are those of all
        positions of the step."""
        chosen = sent["ruled"]
        rows = drafted.entries[0].index_select(0, chosen)
        ids, counts = drafted.read_counted(tokens, chosen)
        width = self._recent.shape[1]
        if width:
            # The latest W of what was known and the new tokens, newest last. Rows without bad words are shifted, too:
            # nothing reads theirs. Positions of one row write the same values.
            history = torch.cat((self._recent.index_select(0, rows), ids), dim=1)
            self._recent.index_copy_(0, rows, _take_windows(history, counts.sum(1), width))
        self._thinking.push(ids, counts, rows, sent)
        self._timestamps.push(ids, counts, rows, sent)

    def _find_recent(self, drafted: Drafted) -> torch.Tensor:
        """[n, W]: the latest tokens before each position, drafts included."""
        recent = self._recent.index_select(0, drafted.entries[0])
        if not drafted.most:
            return recent
        history = torch.cat((recent, drafted.read()[0]), dim=1)
        return _take_windows(history, drafted.entries[1], recent.shape[1])

    def _flatten(self, rows: np.ndarray) -> _FlatRules:
        bias: list[float] = []
        bias_index, confined, kept, banned = list[int](), list[int](), list[int](), list[int]()
        words: list[tuple[int, list[int], int]] = []
        held: list[tuple[int, int, int]] = []
        for local, row in enumerate(map(int, rows)):
            rules, base = self._rules[row], local * self._vocab_size
            bias_index.extend(base + token for token in rules.bias)
            bias.extend(rules.bias.values())
            if rules.allowed_ids:
                confined.append(local)
                kept.extend(base + token for token in sorted(set(rules.allowed_ids)))
            if rules.min_tokens:
                held.extend((base + token, rules.min_tokens, local) for token in rules.held_ids)
            banned.extend(base + word[0] for word in rules.bad_words if len(word) == 1)
            words.extend((base + word[-1], word[:-1], local) for word in rules.bad_words if len(word) > 1)
        prefix = np.full((len(words), self._recent.shape[1]), NO_TOKEN, dtype=np.int64)
        for i, (_, ids, _) in enumerate(words):
            prefix[i, prefix.shape[1] - len(ids) :] = ids
        return _FlatRules(
            self._send(bias_index), to_device(np.array(bias, dtype=np.float32), self._device), self._send(confined),
            self._send(kept),
            self._send(banned), self._send([w[0] for w in words]), to_device(prefix, self._device),
            self._send([w[2] for w in words]),
            *(self._send([item[column] for item in held]) for column in range(3)),
        )

    def _send(self, values: list[int]) -> torch.Tensor:
        return to_device(np.array(values, dtype=np.int64), self._device)


def _ban(flat: torch.Tensor, index: torch.Tensor, is_banned: torch.Tensor) -> None:
    """Set the logits at flat indices to -inf where they are banned; an index may occur twice, with either answer."""
    flat.scatter_reduce_(0, index, torch.where(is_banned, -torch.inf, torch.inf), "amin")


def _take_windows(history: torch.Tensor, ends: torch.Tensor, width: int) -> torch.Tensor:
    """[n, width]: of each row of ``history`` [n, width + k] what begins at its entry of ``ends`` [n], 0 to k."""
    return history.gather(1, ends.unsqueeze(1) + torch.arange(width, device=ends.device))


class PenaltyState:
    """Rows with penalties, DRY or XTC. Those whose penalties count tokens have a slot: ``in_prompt`` [slots, V] bool
    and ``counts`` [slots, V] int32 of their output. Slots are allocated when first needed, doubling."""

    def __init__(self, vocab_size: int, device: torch.device):
        self._device, self._vocab_size = device, vocab_size
        self._in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._slots: dict[int, int] = {}
        self._specs: dict[int, SamplingSpec] = {}
        self._free: list[int] = []
        self._dry = DryState(vocab_size, device)

    def start(self, row: int, known: RowTokens) -> None:
        """Take what a row's penalties need, and count the tokens it starts with."""
        penalties = known.sampling.penalties
        assert penalties is not None
        self.release(row)
        self._specs[row] = known.sampling
        self._dry.start(row, known)
        if not penalties.counts_tokens:
            return
        if not self._free:
            self._grow()
        slot = self._slots[row] = self._free.pop()
        tokens = to_device(known.token_ids, self._device)
        prompt, output = tokens[: known.prompt_len], tokens[known.prompt_len :]
        # The slot's last owner may still be read by a step in flight; the stream runs these writes behind it.
        self._in_prompt[slot] = False
        self._in_prompt[slot].index_fill_(0, prompt, True)
        self._counts[slot] = 0
        self._counts[slot].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def release(self, row: int) -> None:
        """Give back what a row has here, if anything."""
        self._specs.pop(row, None)
        self._dry.release(row)
        if row in self._slots:
            self._free.append(self._slots.pop(row))

    def pack(self, rows: np.ndarray, upload: Upload, *, most_new: int) -> None:
        """Add what `apply` and `count` need for positions of these rows, which get at most ``most_new`` tokens."""
        counted = [index for index, row in enumerate(rows) if int(row) in self._slots]
        if counted:
            chosen = [self._specs[int(rows[index])].penalties or Penalties() for index in counted]
            upload.add("counted", counted)
            upload.add("penalty_slots", [self._slots[int(rows[index])] for index in counted])
            columns = np.array([(p.repetition, p.frequency, p.presence) for p in chosen], dtype=np.float64)
            upload.add("penalties", columns.T.ravel())
        self._dry.pack(rows, upload, most_new=most_new)
        specs = [self._specs[int(row)] for row in rows]
        xtc = [(index, spec, spec.penalties.xtc) for index, spec in enumerate(specs) if spec.penalties]
        excluding = [(index, spec, xtc) for index, spec, xtc in xtc if xtc is not None]
        if excluding:
            upload.add("xtc_indices", [index for index, _, _ in excluding])
            upload.add("xtc_integers", np.array([(s.seed, max(s.top_k, 0)) for _, s, _ in excluding]).T.ravel())
            reals = [(x.probability, x.threshold, s.temperature, s.top_p, s.min_p) for _, s, x in excluding]
            upload.add("xtc_reals", np.array(reals, dtype=np.float64).T.ravel())

    def apply(self, logits: torch.Tensor, drafted: Drafted, sent: dict[str, torch.Tensor]) -> None:
        """Penalise logits [n, V] of positions of the packed rows in place: a positive logit of a token seen anywhere is
        divided by the repetition penalty, a negative one multiplied (CTRL, https://arxiv.org/abs/1909.05858, section
        4.1); then ``frequency * count`` and ``presence * (count > 0)`` are subtracted (OpenAI's definition); then
        DRY."""
        if "counted" in sent:
            chosen = sent["counted"]
            logits.index_copy_(0, chosen, self._penalise(logits.index_select(0, chosen), drafted.select(chosen), sent))
        if drafted.most:
            self._dry.apply(logits, sent, drafted.read()[0], drafted.entries[1])
        else:
            self._dry.apply(logits, sent)

    def _penalise(self, logits: torch.Tensor, drafted: Drafted, sent: dict[str, torch.Tensor]) -> torch.Tensor:
        slots = sent["penalty_slots"]
        # each [n, 1], against counts [n, V]
        repetition, frequency, presence = sent["penalties"].float().view(3, -1, 1)
        counts = self._counts.index_select(0, slots)
        if drafted.most:
            ids, is_before = drafted.read()
            counts.scatter_add_(1, ids.clamp(min=0), (is_before & (ids >= 0)).int())
        in_output = counts > 0
        is_seen = self._in_prompt.index_select(0, slots).logical_or_(in_output)
        penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(is_seen, penalised, logits)
        return logits.sub_(counts * frequency).sub_(in_output * presence)

    @staticmethod
    def exclude(logits: torch.Tensor, output_lens: torch.Tensor, sent: dict[str, torch.Tensor]) -> None:
        """XTC, on the packed rows that have it; logits [n, V], already masked, in place. ``output_lens`` [n]: the
        indices of the sampled tokens in their outputs."""
        indices = sent["xtc_indices"]
        seeds, top_k = sent["xtc_integers"].view(2, -1)
        own = logits.index_select(0, indices)
        exclude_top_choices(own, seeds, output_lens.index_select(0, indices), sent["xtc_reals"], top_k)
        logits.index_copy_(0, indices, own)

    def count(self, tokens: torch.Tensor, drafted: Drafted, sent: dict[str, torch.Tensor]) -> None:
        """Count the new tokens of the packed positions' rows; ``tokens`` [3, S] and ``drafted`` are those of all
        positions of the step."""
        chosen = sent["penalised"]
        if "dry_indices" in sent:
            ids, is_output = drafted.read_counted(tokens, chosen)
            self._dry.push(ids, sent, is_output)
        if "counted" not in sent:
            return
        chosen = chosen.index_select(0, sent["counted"])
        counts = drafted.entries[1].index_select(0, chosen) < tokens[2].index_select(0, chosen)
        index = sent["penalty_slots"] * self._vocab_size + tokens[0].index_select(0, chosen)
        self._counts.view(-1).index_add_(0, index, counts.int())

    def _grow(self) -> None:
        """Double the slots. 5 bytes per token of the vocabulary each, so none are allocated before they are needed."""
        old = len(self._counts)
        new = max(4, old)
        shape = (new, self._vocab_size)
        self._in_prompt = torch.cat((self._in_prompt, torch.zeros(shape, dtype=torch.bool, device=self._device)))
        self._counts = torch.cat((self._counts, torch.zeros(shape, dtype=torch.int32, device=self._device)))
        self._free.extend(range(old, old + new))
