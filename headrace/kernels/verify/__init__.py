"""Decodes with drafts: the inputs of a step's decode entries, which drafts are right, and where a guess stands.

A row that decodes with k drafts has 1 + k *entries* in a step, consecutive ones: entry j computes position
``computed_len + j``, its input is the row's last token for j = 0 and draft j - 1 otherwise, and a token is sampled from
its logits. All of that is computed on the device: the host does not know how many drafts of the step before were right.

B entries, R rows (the null row included), G cache groups, N drafts that a row has room for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.base.step import MAX_DRAFTS
from headrace.kernels.operation import Operation, requires


@dataclass(frozen=True, slots=True)
class RowTensors:
    """The state of rows that the device owns, all int64: ``last_token`` [R], the latest token, not computed yet;
    ``computed_len`` [R], positions in the cache, which is also the last token's position; ``drafts`` [R, N], guesses of
    the tokens behind the last one, -1 for none."""

    last_token: torch.Tensor
    computed_len: torch.Tensor
    drafts: torch.Tensor

    @classmethod
    def allocate(cls, num_rows: int, device: torch.device) -> RowTensors:
        """For ``num_rows`` rows, of which none has tokens or drafts."""
        last_token, computed_len = torch.zeros((2, num_rows), dtype=torch.int64, device=device)
        return cls(last_token, computed_len, torch.full((num_rows, MAX_DRAFTS), -1, device=device))


@dataclass(slots=True)
class DecodeInputs:
    """Inputs of B entries: ``token_ids`` and ``positions`` [B] int64, ``kv_lens`` [B] int32, ``slots`` [G, B] int64,
    ``page_tables`` [G, B, pages] int32, and ``query_start`` [B + 1] int32, which never changes. Allocated once and
    overwritten by every step, since captured graphs hold the addresses; page-table columns beyond an entry's length
    keep their old values."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    kv_lens: torch.Tensor
    slots: torch.Tensor
    page_tables: torch.Tensor
    query_start: torch.Tensor

    @classmethod
    def allocate(cls, size: int, tables: torch.Tensor) -> DecodeInputs:
        """Inputs for ``size`` entries on the device of ``tables`` [G, R, pages] int32. All zeros, so that a column
        never written is the null page."""
        groups, _, pages = tables.shape
        token_ids, positions = torch.zeros((2, size), dtype=torch.int64, device=tables.device)
        kv_lens = torch.zeros(size, dtype=torch.int32, device=tables.device)
        slots = torch.zeros((groups, size), dtype=torch.int64, device=tables.device)
        page_tables = torch.zeros((groups, size, pages), dtype=torch.int32, device=tables.device)
        query_start = torch.arange(size + 1, dtype=torch.int32, device=tables.device)
        return cls(token_ids, positions, kv_lens, slots, page_tables, query_start)


DECODE_INPUTS = Operation("decode_inputs kernel")
"""``decode_inputs(entries [2, B] int64, rows: RowTensors, tables [G, R, pages] int32, page_size, out: DecodeInputs, *,
back=0, longest=0)``: fills ``out``. ``entries[0]`` are rows, ``entries[1]`` the offsets j. A draft of -1 is read as
token 0. On a GPU it is one launch, which may be captured.

For a drafter that computes a token one position before its own, ``back`` is 1. Its chain may pass the end of the
context: positions are then held at ``longest`` - 1, unless that is 0."""

ACCEPT = Operation("accept kernel")
"""``accept(sampled [2, B] int64, entries [2, B] int64, positions [B] int64, rows: RowTensors, most) -> [3, B]``: which
drafts are right.

``sampled`` holds ids and states (`headrace.kernels.sample`), ``positions`` those that the entries computed; ``most``
bounds the offsets, known to the host (0: no row has drafts). A draft is right if it is the token sampled at the entry
before it and all drafts before it are right. With a right drafts of a row, a + 1 of its tokens count. Returns ids,
states and, for every entry, the number of tokens that count of its row; sets each row's ``computed_len`` to its first
entry's position + a + 1, and ``last_token`` to the last token that counts. The last row is the null row, which stands
for padding: its length stays 0.

Rows' entries are complete, and in order: a row occurs in one run of entries only, except for the null row, which may
occur any number of times with offset 0."""

PLACE_DRAFTS = Operation("place_drafts kernel")
"""``place_drafts(guesses [n, 2 + M] int64, rows: RowTensors)``: writes the drafts of n rows. A guess is a row, a
position, and the tokens that the row may have from that position on, filled up with -1. The row's next token is at
``computed_len + 1``; what the guess has from there on becomes its drafts. All are -1 if the guess has another token
than ``last_token`` at ``computed_len``, or begins behind the next token."""

_on_gpu = requires(device="cuda")
for _operation, _name in ((DECODE_INPUTS, "decode_inputs"), (ACCEPT, "accept"), (PLACE_DRAFTS, "place_drafts")):
    _operation.add("reference", f"headrace.kernels.verify.reference:{_name}", doc="plain torch")
    if _operation is not DECODE_INPUTS:
        _operation.add(
            "cpu", f"headrace.kernels.verify.cpu:{_name}", supports=requires(device="cpu"), priority=10, doc="Python"
        )
    _operation.add(
        "triton", f"headrace.kernels.verify.triton:{_name}", supports=_on_gpu, priority=10, doc="one launch"
    )
