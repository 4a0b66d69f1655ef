"""A target and a drafter loaded from folders and run without an engine, as `headrace.layers.draft` says: the target's
step with features, the drafter's over the tokens after it, then a chain of drafts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from harness import make_pages
from safetensors.torch import save_file

from headrace.base.config import engine_config, resolve_for_device
from headrace.execution.draft_loading import DraftChoice, LoadedDraft, load_draft
from headrace.execution.loading import LoadedModel, load_model
from headrace.kernels.rowwise.reference import write_sum
from headrace.layers.attention import ATTENTION_BACKENDS
from headrace.layers.attention.contract import AttentionGeometry, AttentionInputs
from headrace.layers.batch import Features, ForwardBatch, GroupStep, WantedTokens
from headrace.layers.self_attention import AttentionLayer

CPU = torch.device("cpu")
PAGE_SIZE, MAX_LEN = 4, 64


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def load_both(target: Path, choice: DraftChoice, **options: Any) -> tuple[LoadedModel, LoadedDraft]:
    """Both models in float32 on a CPU."""
    known = dict(model=str(target), device="cpu", dtype="float32", skip_tokenizer=True, max_model_len=128)
    config = resolve_for_device(engine_config(**{**known, **options}), "cpu")
    loaded = load_model(config, CPU, lambda stage, fraction: None)
    return loaded, load_draft(choice, config, loaded, CPU, lambda stage, fraction: None)


@dataclass
class Row:
    """A request: one page table per cache group; ``tokens`` so far, of which the target has computed ``computed``."""

    tables: list[list[int]]
    tokens: list[int] = field(default_factory=list)
    computed: int = 0


class DraftRig:
    """Runs rows of one target and one drafter, whose pages start out as NaN."""

    def __init__(self, loaded: LoadedModel, draft: LoadedDraft, num_rows: int = 2):
        self.target, self.draft, self.drafter = loaded.model, draft, draft.model
        self.groups = [msgspec.structs.replace(group) for group in draft.groups]
        num_pages = 1 + num_rows * MAX_LEN // PAGE_SIZE
        pages: list[Any] = [None] * draft.num_layers
        groups: list[Any] = [None] * draft.num_layers
        attentions = [m for model in (self.target, self.drafter) for m in model.modules()
                      if isinstance(m, AttentionLayer)]
        for g, group in enumerate(self.groups):
            for layer in group.layers:
                groups[layer] = g
                pages[layer] = make_pages(
                    group.spec, num_pages, PAGE_SIZE, values_in_keys=attentions[layer].values_in_keys
                )
        first = draft.first_layer
        self.target.bind_cache(pages[:first], groups[:first])
        self.drafter.bind_cache(pages[first:], groups[first:])
        self.attentions = {"target": attentions[:first], "draft": attentions[first:]}
        self.group_of = {"target": groups[:first], "draft": groups[first:]}
        self._free = list(range(1, num_pages))[::-1]

    def start(self, tokens: list[int]) -> Row:
        """A row with pages of its own."""
        own = [self._free.pop() for _ in range(MAX_LEN // PAGE_SIZE)]
        return Row([own for _ in self.groups], list(tokens))

    def batch(self, side: str, spans: list[tuple[Row, int, list[int]]]) -> ForwardBatch:
        """A step of ``(row, position of the first token, tokens)``, for the target or the drafter."""
        steps = [GroupStep(self._inputs(g, spans), None) for g in range(len(self.groups))]  # type: ignore[arg-type]
        # every group has a backend, also one that only the other model's layers read
        sides = (side, "draft" if side == "target" else "target")
        layers = [pair for s in sides for pair in zip(self.attentions[s], self.group_of[s], strict=True)]
        for attention, g in layers:
            if steps[g].backend is None:
                spec = self.groups[g].spec
                geometry = AttentionGeometry(
                    device="cpu", dtype="float32", kv_dtype=spec.dtype, capability=(0, 0),
                    num_heads=attention.num_heads, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim,
                    value_dim=spec.value_dim, page_size=PAGE_SIZE, window=spec.window,
                    values_in_keys=attention.values_in_keys,
                )
                steps[g].backend = ATTENTION_BACKENDS.load("reference")(geometry, CPU)
                steps[g].backend.prepare(steps[g].inputs)
        return ForwardBatch(
            torch.tensor([token for _, _, tokens in spans for token in tokens]),
            torch.tensor([begin + i for _, begin, tokens in spans for i in range(len(tokens))]), steps,
        )

    def _inputs(self, group: int, spans: list[tuple[Row, int, list[int]]]) -> AttentionInputs:
        lens, ends = [len(tokens) for _, _, tokens in spans], [begin + len(tokens) for _, begin, tokens in spans]
        slots = [
            row.tables[group][p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE
            for row, begin, tokens in spans for p in range(begin, begin + len(tokens))
        ]
        return AttentionInputs(
            num_tokens=sum(lens), num_decodes=sum(length == 1 for length in lens) if set(lens) == {1} else 0,
            query_lens_cpu=lens, kv_lens_cpu=ends, max_query_len=max(lens), max_kv_len=max(ends),
            query_start=torch.tensor([0, *lens]).cumsum(0).int(), kv_lens=torch.tensor(ends, dtype=torch.int32),
            page_table=torch.tensor([row.tables[group] for row, _, _ in spans], dtype=torch.int32),
            slots=torch.tensor(slots),
        )

    @torch.inference_mode()
    def run_wanted(self, spans: list[tuple[Row, int, list[int]]], inputs: torch.Tensor) -> torch.Tensor:
        """The drafter's hidden states of the spans' last tokens alone, [spans, D]."""
        batch, count = self.batch("draft", spans), len(spans)
        ends = [
            replace(
                step.inputs, num_tokens=count, num_decodes=count, query_lens_cpu=[1] * count, max_query_len=1,
                query_start=torch.arange(count + 1, dtype=torch.int32),
            )
            for step in batch.groups
        ]
        batch.wanted = WantedTokens(batch.groups[0].inputs.query_start[1:].long() - 1, ends)
        return self.drafter.forward(batch, inputs)

    @torch.inference_mode()
    def step(self, row: Row, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the target's next ``count`` positions of a row, and the drafter's. Returns the features [count, F]
        and the drafter's hidden states [count, D]. The token after must be among the row's."""
        begin, end = row.computed, row.computed + count
        batch = self.batch("target", [(row, begin, row.tokens[begin:end])])
        batch.features = Features(self.drafter.features, write_sum)
        self.target.forward(batch)
        features, row.computed = batch.features.values, end
        shift = self.drafter.position_shift
        first = shift if begin or not shift else 0  # the row's first token has no position before it
        tokens = row.tokens[begin + 1 if begin or not shift else 0 : end + 1]
        inputs = self.drafter.combine(features.clone())
        hidden = self.drafter.forward(self.batch("draft", [(row, begin + first, tokens)]), inputs)
        return features, hidden

    @torch.inference_mode()
    def propose(self, row: Row, hidden: torch.Tensor, count: int) -> list[int]:
        """A chain of drafts after a step whose last hidden state is ``hidden`` [1, D]."""
        drafts: list[int] = []
        position = row.computed + self.drafter.position_shift
        while True:
            drafts.append(int(self.drafter.compute_ids(hidden)))
            if len(drafts) == count:
                return drafts
            batch = self.batch("draft", [(row, position, drafts[-1:])])
            hidden = self.drafter.forward(batch, self.drafter.recycle(hidden).clone())
            position += 1
