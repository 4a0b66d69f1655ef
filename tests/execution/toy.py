"""A model whose logits are a plain function of the tokens it can see through the real pools and page tables."""

from __future__ import annotations

import torch

from headrace.base.cache import CacheGroup, CacheLayout, CacheSpec
from headrace.execution.runner import Runner
from headrace.layers.attention.contract import AttentionBackend, AttentionInputs
from headrace.layers.model import ServedModel

VOCAB_SIZE = 97
FULL = CacheSpec("full", 1, 2, 2, "float32")
WINDOW = CacheSpec("sliding_window", 1, 2, 2, "float32", window=5)


def toy_logits(tokens: list[int], window: int) -> torch.Tensor:
    """[V]: what the toy model says after ``tokens``, from all of them and from the latest ``window``."""
    values = torch.tensor(tokens, dtype=torch.float64)
    places = torch.arange(len(tokens), dtype=torch.float64)
    terms = (values + 1) * torch.cos(places * 0.37 + values)
    state = terms.sum() + 3.0 * terms[-window:].sum()
    return 3.0 * torch.sin(state * torch.arange(1, VOCAB_SIZE + 1, dtype=torch.float64) * 0.01).float()


class KeepInputs(AttentionBackend):
    """Stands for an attention backend; the toy model reads the inputs itself."""

    def prepare(self, inputs: AttentionInputs) -> None:
        self.inputs = inputs

    def attend(self, q, pages, params):
        raise NotImplementedError


class ToyModel(ServedModel):
    """Layer 0 keeps all tokens, layer 1 a window. Keys hold the token, values its position."""

    def __init__(self, window: int = WINDOW.window):
        super().__init__()
        self.window = window
        self.poison: int | None = None

    def bind_cache(self, pages, group_of_layer):
        self.pages, self.group_of_layer = pages, group_of_layer

    def forward(self, batch):
        hidden = torch.zeros(len(batch.token_ids), dtype=torch.float64)
        for layer, weight in ((0, 1.0), (1, 3.0)):
            inputs, pages = batch.groups[self.group_of_layer[layer]].inputs, self.pages[layer]
            pages.k.view(-1, 2)[inputs.slots, 0] = batch.token_ids.float()
            pages.v.view(-1, 2)[inputs.slots, 0] = batch.positions.float()
            hidden += weight * self._attend(inputs, pages, layer)
        return hidden.unsqueeze(1)

    def _attend(self, inputs, pages, layer):
        out, page_size = [], pages.k.shape[1]
        for r in range(inputs.num_requests):
            begin, end, kv_len = int(inputs.query_start[r]), int(inputs.query_start[r + 1]), int(inputs.kv_lens[r])
            places = torch.arange(kv_len)
            slots = inputs.page_table[r, places // page_size].long() * page_size + places % page_size
            values = pages.k.view(-1, 2)[slots, 0].double()
            positions = pages.v.view(-1, 2)[slots, 0].double()
            terms = (values + 1) * torch.cos(positions * 0.37 + values)
            for i in range(end - begin):
                seen = kv_len - (end - begin) + i + 1
                first = max(0, seen - self.window) if layer == 1 else 0
                out.append(terms[first:seen].sum())
        return torch.stack(out)

    def compute_logits(self, hidden):
        logits = 3.0 * torch.sin(hidden * torch.arange(1, VOCAB_SIZE + 1, dtype=torch.float64) * 0.01).float()
        if self.poison is not None:
            logits[self.poison, 3] = torch.nan
        return logits


def toy_runner(
    *, max_rows: int = 4, page_size: int = 4, num_pages: int = 40, max_model_len: int = 64, max_tokens: int = 64
) -> Runner:
    """A runner over the toy model with one full and one window group."""
    layout = CacheLayout(
        page_size, max_rows, max_model_len, [CacheGroup(FULL, [0], num_pages), CacheGroup(WINDOW, [1], num_pages)]
    )
    return Runner(
        ToyModel(), layout, [KeepInputs(), KeepInputs()], num_layers=2, vocab_size=VOCAB_SIZE, max_tokens=max_tokens,
        device=torch.device("cpu"),
    )
