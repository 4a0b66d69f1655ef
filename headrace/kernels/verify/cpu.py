"""Which drafts are right, and where a guess stands, on a CPU: plain Python over the tensors' own memory, as a call of
torch takes longer than a step's few entries do here."""

from __future__ import annotations

import torch

from headrace.kernels.verify import RowTensors, reference


def accept(
    sampled: torch.Tensor, entries: torch.Tensor, positions: torch.Tensor, rows: RowTensors, most: int
) -> torch.Tensor:
    """See `headrace.kernels.verify.ACCEPT`."""
    if most == 0:
        return reference.accept(sampled, entries, positions, rows, most)
    (own, offsets), ids, at = entries.tolist(), sampled[0].tolist(), positions.tolist()
    last_token, computed_len, drafts = rows.last_token.numpy(), rows.computed_len.numpy(), rows.drafts.numpy()
    counts: list[int] = []
    while (first := len(counts)) < len(own):
        row, end = own[first], first + 1
        while end < len(own) and offsets[end]:
            end += 1
        count = 1
        for draft, token in zip(drafts[row, : end - first - 1].tolist(), ids[first:end], strict=False):
            if draft != token:
                break
            count += 1
        last_token[row], computed_len[row] = ids[first + count - 1], at[first] + count
        counts += [count] * (end - first)
    computed_len[-1] = 0  # of the null row
    return torch.cat((sampled, torch.tensor([counts])))


def place_drafts(guesses: torch.Tensor, rows: RowTensors) -> None:
    """See `headrace.kernels.verify.PLACE_DRAFTS`."""
    last_token, computed_len, drafts = rows.last_token.numpy(), rows.computed_len.numpy(), rows.drafts.numpy()
    for row, start, *guess in guesses.tolist():
        at = int(computed_len[row]) + 1 - start  # the index in the guess of the row's next token
        drafts[row] = -1
        if 0 <= at <= len(guess) and (at == 0 or guess[at - 1] == last_token[row]):
            left = guess[at : at + drafts.shape[1]]
            drafts[row, : len(left)] = left
