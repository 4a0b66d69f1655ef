"""Runs a served model without an engine: pools, shuffled page tables and `ForwardBatch` built directly."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from headrace.base.cache import CACHE_BACKENDS, CacheGroup, CacheSpec, group_layers
from headrace.execution.loading import share_caches
from headrace.kernels.lora import SlotRows
from headrace.layers.attention import ATTENTION_BACKENDS
from headrace.layers.attention.contract import AttentionGeometry, AttentionInputs, KvPages
from headrace.layers.batch import ForwardBatch, GroupStep, WantedTokens
from headrace.layers.build import Build
from headrace.layers.lora.parts import BankSizes
from headrace.layers.lora.rows import RowsLayout
from headrace.models.catalog import find_family
from headrace.parallel.group import Group

CPU = torch.device("cpu")


@dataclass
class Sequence:
    """A request under test: its page table in each cache group, and how many positions are in the cache."""

    page_tables: list[list[int]]
    length: int = 0
    slot: int = -1
    row: int = 0


@dataclass
class Harness:
    """A model with its pools. ``max_len`` bounds sequences; pages are handed out in shuffled order, never twice.
    ``num_dense``: see `SlotRows`."""

    model: Any
    groups: list[CacheGroup]
    geometries: list[AttentionGeometry]
    page_size: int
    max_len: int
    free: list[list[int]] = field(default_factory=list)
    device: torch.device = CPU
    num_dense: int = field(default=0, kw_only=True)
    num_started: int = field(default=0, init=False)

    def start(self, slot: int = -1) -> Sequence:
        """A new sequence with all its pages, of the adapter in a slot."""
        num_pages = -(-self.max_len // self.page_size)
        self.num_started += 1
        tables = [[free.pop() for _ in range(num_pages)] for free in self.free]
        return Sequence(slot=slot, row=self.num_started - 1, page_tables=tables)

    @torch.inference_mode()
    def step(self, *spans: tuple[Sequence, list[int]], wanted: list[int] | None = None) -> list[torch.Tensor]:
        """Append tokens to sequences in one batch; returns each span's logits [tokens, V]. One-token spans go first as
        decodes, as in a real step. ``wanted``: spans whose last token alone gets logits, [1, V]; the others get none.
        Logits come back to the CPU."""
        order = sorted(range(len(spans)), key=lambda i: len(spans[i][1]) > 1)
        spans_in_order = [spans[i] for i in order]
        batch = self._batch(spans_in_order)
        if wanted is not None:
            places = [place for place, i in enumerate(order) if i in wanted]
            batch.wanted = self._want(batch, places)
        if any(sequence.slot >= 0 for sequence, _ in spans):
            assert wanted is None
            batch.adapters = self._adapter_rows(spans_in_order)
            hidden = self.model.forward(batch)
            self.model.step.output_rows = batch.adapters
            logits = self.model.compute_logits(hidden).cpu()
            self.model.step.output_rows = None
        else:
            logits = self.model.compute_logits(self.model.forward(batch)).cpu()
        for sequence, tokens in spans_in_order:
            sequence.length += len(tokens)
        if wanted is not None:
            return [
                logits[places.index(order.index(i)), None] if i in wanted else logits[:0] for i in range(len(spans))
            ]
        pieces = logits.split([len(tokens) for _, tokens in spans_in_order])
        return [pieces[order.index(i)] for i in range(len(spans))]

    def _batch(self, spans: list[tuple[Sequence, list[int]]]) -> ForwardBatch:
        positions = [list(range(s.length, s.length + len(tokens))) for s, tokens in spans]
        steps = []
        for group, geometry in enumerate(self.geometries):
            inputs = self._inputs(group, spans, positions)
            spec = self.groups[group].spec
            if spec.kind in CACHE_BACKENDS:
                backend = CACHE_BACKENDS.load(spec.kind)(spec, self.page_size, self.device)
            else:
                is_plain = self.device == CPU
                choice = ATTENTION_BACKENDS.load("reference") if is_plain else ATTENTION_BACKENDS.choose(geometry)
                backend = choice(geometry, self.device)
            backend.prepare(inputs)
            steps.append(GroupStep(inputs, backend))
        token_ids = torch.tensor([t for _, tokens in spans for t in tokens], device=self.device)
        return ForwardBatch(token_ids, torch.tensor([p for ps in positions for p in ps], device=self.device), steps)

    def _adapter_rows(self, spans: list[tuple[Sequence, list[int]]]) -> SlotRows:
        slots = np.repeat([sequence.slot for sequence, _ in spans], [len(tokens) for _, tokens in spans])
        layout = RowsLayout(len(slots), int(slots.max()) + 1)
        packed, segments = layout.pack(slots)
        packed_there = torch.from_numpy(packed).to(self.device)
        return layout.view(packed_there, segments, num_dense=self.num_dense, num_runs=len(spans))

    def _want(self, batch: ForwardBatch, places: list[int]) -> WantedTokens:
        """The last tokens of the spans at these places in the batch."""
        inputs = []
        for step in batch.groups:
            whole, count = step.inputs, len(places)
            inputs.append(replace(
                whole, num_tokens=count, num_decodes=count, query_lens_cpu=[1] * count,
                kv_lens_cpu=[whole.kv_lens_cpu[p] for p in places],
                max_query_len=1, max_kv_len=max([whole.kv_lens_cpu[p] for p in places], default=1),
                query_start=torch.arange(count + 1, dtype=torch.int32), kv_lens=whole.kv_lens[places],
                page_table=whole.page_table[places],
            ))
        return WantedTokens(batch.groups[0].inputs.query_start[1:][places].long() - 1, inputs)

    def _inputs(
        self, group: int, spans: list[tuple[Sequence, list[int]]], positions: list[list[int]]
    ) -> AttentionInputs:
        query_lens = [len(tokens) for _, tokens in spans]
        kv_lens = [s.length + len(tokens) for s, tokens in spans]
        tables = [s.page_tables[group] for s, _ in spans]
        slots = [
            table[p // self.page_size] * self.page_size + p % self.page_size
            for table, ps in zip(tables, positions, strict=True) for p in ps
        ]
        width = -(-max(kv_lens) // self.page_size)
        return AttentionInputs(
            num_tokens=sum(query_lens), num_decodes=query_lens.count(1), query_lens_cpu=query_lens, kv_lens_cpu=kv_lens,
            max_query_len=max(query_lens), max_kv_len=max(kv_lens),
            query_start=torch.tensor([0, *query_lens]).cumsum(0).int().to(self.device),
            kv_lens=torch.tensor(kv_lens, dtype=torch.int32, device=self.device),
            page_table=torch.tensor([table[:width] for table in tables], dtype=torch.int32, device=self.device),
            slots=torch.tensor(slots, device=self.device),
            rows=torch.tensor([s.row for s, _ in spans], device=self.device),
        )


def dequantise_blocks(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """values [O, I] in e4m3 whose blocks of 128 rows and columns share a scale [ceil(O / 128), ceil(I / 128)]."""
    rows, columns = values.shape
    spread = scales.float().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return values.float() * spread


def make_pages(
    spec: CacheSpec, num_pages: int, page_size: int, *, values_in_keys: bool, device: torch.device = CPU
) -> KvPages:
    """Pages of one layer, all NaN; on other devices only finite, which is all that pools promise."""
    shape, dtype = (num_pages, page_size, spec.num_kv_heads), getattr(torch, spec.dtype)
    if dtype == torch.int8:
        k, v = (torch.full((*shape, dim), 100, dtype=dtype, device=device) for dim in (spec.head_dim, spec.value_dim))
        return KvPages(k, v, torch.full((num_pages, 2, spec.num_kv_heads, page_size), float("nan"), device=device))
    k, v = (
        torch.full((*shape, dim), float("nan") if device == CPU else 3.0, dtype=dtype, device=device)
        for dim in (spec.head_dim, spec.value_dim)
    )
    return KvPages(k, k[..., : spec.value_dim] if values_in_keys else v)


def build_harness(
    config: dict[str, Any], tensors: dict[str, torch.Tensor], *, page_size: int = 4, max_len: int = 64,
    num_sequences: int = 4,
    max_model_len: int = 0, dtype: torch.dtype = torch.float32, device: torch.device = CPU, moe_experts: str = "auto",
    kv_dtype: str = "", adapters: BankSizes | None = None, tensor: Group | None = None,
) -> Harness:
    """Build the family's model for a config.json dict and load ``tensors`` in shuffled order. Pages start out as NaN,
    so that reading what was never written shows. ``tensor``: the ranks that divide the model, of which this is one."""
    family = find_family(config["architectures"][0])
    spec = family.read_config(config)
    tensor = tensor or Group()
    build = Build(device, dtype, max_model_len, moe_experts, adapters=adapters, tensor=tensor)
    model = family.build_model(spec, build)
    pairs = list(tensors.items())
    random.Random(0).shuffle(pairs)
    model.load_weights(pairs)
    dtype_name = str(dtype).removeprefix("torch.")
    kv_dtype = kv_dtype or dtype_name
    specs = share_caches(family.cache_specs(spec, kv_dtype), tensor)
    groups = group_layers(specs)
    num_pages = 1 + num_sequences * -(-max_len // page_size)
    attention = model.layers[0].attention
    pages = [make_pages(s, num_pages, page_size, values_in_keys=attention.values_in_keys, device=device) for s in specs]
    group_of_layer = [next(g for g, group in enumerate(groups) if layer in group.layers) for layer in range(len(specs))]
    model.bind_cache(pages, group_of_layer)
    geometries = [
        AttentionGeometry(
            device=device.type, dtype=dtype_name, kv_dtype=kv_dtype, capability=Build(device, dtype).capability,
            num_heads=attention.num_heads,
            num_kv_heads=g.spec.num_kv_heads, head_dim=g.spec.head_dim, value_dim=g.spec.value_dim, page_size=page_size,
            window=g.spec.window, has_softcap=attention.params.softcap > 0,
            has_sinks=attention.params.sinks is not None,
            values_in_keys=attention.values_in_keys,
        )
        for g in groups
    ]
    free = [random.Random(seed).sample(range(1, num_pages), num_pages - 1) for seed in range(len(groups))]
    return Harness(model, groups, geometries, page_size, max_len, free, device)
