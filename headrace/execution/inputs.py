"""`InputBuilder`: from a `Step` to a `ForwardBatch`. T tokens, R requests, S sampled positions, G cache groups.

Everything the model reads is written into tensors allocated once, so that a captured graph can read the same addresses.
Refuses: sampling. The input tokens of decodes never come from the host, which may not know them yet.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from headrace.base.cache import NULL_PAGE, CacheLayout
from headrace.base.step import MAX_ENTRIES
from headrace.execution.adapters import AdapterInputs
from headrace.execution.media import MediaState
from headrace.execution.rows import Rows
from headrace.execution.step import Step, StepFeature, StepShape
from headrace.execution.upload import Upload
from headrace.kernels.attention import PrefixGroups
from headrace.kernels.verify import DecodeInputs
from headrace.kernels.verify.reference import entry_tokens
from headrace.layers.attention.contract import AttentionBackend, AttentionInputs
from headrace.layers.batch import AlignedTexts, ForwardBatch, GroupStep, WantedTokens
from headrace.memory.page_tables import PageTables
from headrace.parallel.links import Handover

NO_POSITION = 2**31
"""A position beyond every text: the start of the second text where a row has only one."""


class StaticInputs:
    """The tensors that every step's inputs are slices of; sized for the largest step, overwritten by each. The stream
    orders these writes behind the forward passes that read them, so one copy serves two steps in flight. A step with
    drafts has up to `MAX_ENTRIES` requests besides those that prefill."""

    def __init__(self, layout: CacheLayout, max_tokens: int, num_entries: int, device: torch.device):
        groups, rows = len(layout.groups), layout.max_rows + min(MAX_ENTRIES, max_tokens)
        self.token_ids = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.rope_positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.query_start = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self.kv_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        # [G, T] and [G, R, entries]: one slice per cache group. A slot is page * page_size + offset.
        self.slots = torch.zeros((groups, max_tokens), dtype=torch.int64, device=device)
        self.page_tables = torch.zeros((groups, rows, num_entries), dtype=torch.int32, device=device)


class InputBuilder:
    """Two halves: `pack` adds what the host knows to the step's upload; `build` (`fill` for a captured graph) derives
    the rest on the device, once the page tables are up to date.

    ``backends[g]`` serves cache group g. ``max_tokens`` is the largest T of any plan. ``max_requests`` is the largest
    R of a captured step with prefill.
    """

    def __init__(
        self, layout: CacheLayout, rows: Rows, tables: PageTables, backends: list[AttentionBackend], max_tokens: int,
        media: MediaState,
    ):
        self.layout, self.rows, self.tables, self.backends = layout, rows, tables, backends
        self.media = media
        self.max_tokens = max(max_tokens, layout.max_rows)
        self.static = StaticInputs(layout, self.max_tokens, tables.num_entries, rows.tensors.last_token.device)
        self.max_requests = layout.max_rows
        self.handover = Handover()
        self.adapters: AdapterInputs | None = None  # set where adapters are served

    def make_draft_room(self) -> None:
        """Let captured steps with prefill have drafts, each a request: more than there are rows."""
        self.max_requests = len(self.static.kv_lens)

    def pack(self, step: Step, upload: Upload, size: int = 0) -> None:
        """Add the inputs of a step to the upload; ``size``: tokens of the captured step that takes them."""
        shape = step.shape
        assert shape.num_tokens <= self.max_tokens, (
            f"a plan of {shape.num_tokens} tokens, at most {self.max_tokens} are allowed"
        )
        assert int(shape.ends.max()) <= self.layout.max_model_len, "a span beyond max_model_len"
        starts = shape.query_start[:-1]
        # Token t of request i is at position begins[i] + (t - starts[i]). Of decodes these are bounds, which the device
        # replaces by its own.
        upload.add("positions", np.arange(shape.num_tokens) + np.repeat(shape.begins - starts, shape.lengths))
        upload.add("token_rows", np.repeat(shape.rows, shape.lengths))
        upload.add("rows", shape.rows)
        upload.add("offsets", shape.entries[1, : shape.num_decodes])
        upload.add("query_start", shape.query_start)
        upload.add("kv_lens", shape.ends)
        if step.grouped is not None and not size:
            upload.add("prefixes", step.grouped.pack(shape.num_decodes))
        # Decodes come first in every plan; the other spans read tokens that the host knows.
        prefill = [
            self.rows[row].token_ids[begin:end]
            for row, begin, end in zip(
                *(a[shape.num_decodes :] for a in (shape.rows, shape.begins, shape.ends)), strict=True
            )
        ]
        tokens = np.concatenate(prefill) if prefill else np.empty(0, dtype=np.int64)
        assert len(tokens) == shape.num_tokens - shape.num_decodes, "a prefill span beyond the row's known tokens"
        upload.add("prefill_tokens", tokens)
        # [S]: a span's last token predicts the sampled one
        upload.add("sample_tokens", shape.query_start[1:][step.samples] - 1)
        if StepFeature.DRAFTING in step.features:
            upload.add("following", self._following(shape))
        if StepFeature.TEXT_PAIRS in step.features:
            upload.add("text_kinds", self._text_kinds(shape))
        if StepFeature.ADAPTERS in step.features:
            assert self.adapters is not None, "a row has an adapter, and none are served"
            self.adapters.pack(step, upload, size)
            self.adapters.pack_outputs(step, upload)
        if StepFeature.MEDIA in step.features:
            self.media.pack(step, upload)

    def _following(self, shape: StepShape) -> np.ndarray:
        """[T]: the token behind each token, 0 where the host does not know it: it is sampled in this step."""
        following = np.zeros(shape.num_tokens, dtype=np.int64)
        for i in range(shape.num_decodes, len(shape.rows)):
            begin, first = int(shape.begins[i]), int(shape.query_start[i])
            known = self.rows[int(shape.rows[i])].token_ids[begin + 1 : begin + 1 + int(shape.lengths[i])]
            following[first : first + len(known)] = known
        return following

    def _text_kinds(self, shape: StepShape) -> np.ndarray:
        """[T]: 1 for tokens of the second text of a pair."""
        specs = [self.rows[int(row)].pooling for row in shape.rows]
        seconds = np.array(
            [spec.second_start if spec is not None and spec.second_start else NO_POSITION for spec in specs]
        )
        starts = np.repeat(seconds - shape.begins + shape.query_start[:-1], shape.lengths)
        return (np.arange(shape.num_tokens) >= starts).astype(np.int64)

    def find_aligned(self, shape: StepShape) -> AlignedTexts | None:
        """Requests that ask which sound their tokens attend to; None where there is none."""
        specs = [self.rows[int(row)].pooling for row in shape.rows]
        found = [(i, spec.alignment) for i, spec in enumerate(specs) if spec is not None and spec.alignment is not None]
        if not found:
            return None
        return AlignedTexts([i for i, _ in found], [alignment for _, alignment in found], [[] for _ in found])

    def build(self, shape: StepShape, sent: dict[str, torch.Tensor], pruned: np.ndarray | None = None) -> ForwardBatch:
        """The batch, with every backend prepared. Waits for nothing.

        ``pruned`` [S]: indices of the requests that sample. The last layer then computes their last tokens alone; the
        upload must have the tokens' indices as ``sample_tokens`` and the requests' as ``sample_requests``.
        """
        self._write(shape, sent)
        static, num_tokens = self.static, shape.num_tokens
        prefixes = None if "prefixes" not in sent else PrefixGroups.of(sent["prefixes"], shape.num_decodes)
        groups = [self._prepare_group(g, shape, sent["rows"], prefixes) for g in range(len(self.backends))]
        batch = ForwardBatch(
            static.token_ids[:num_tokens], static.positions[:num_tokens], groups, list(map(int, shape.lengths)),
            sent.get("text_kinds"), carried=self.handover.view(num_tokens),
            rope_positions=self._rope_positions(num_tokens),
        )
        if pruned is not None:
            inputs = [self._prune(group.inputs, shape.ends[pruned], sent["sample_requests"]) for group in groups]
            batch.wanted = WantedTokens(sent["sample_tokens"], inputs)
        return batch

    def sampled_outputs(self, step: Step, sent: dict[str, torch.Tensor]) -> AbstractContextManager[None]:
        """A context in which the head is called, with the sampled positions of a packed step."""
        if self.adapters is None or StepFeature.ADAPTERS not in step.features:
            return nullcontext()
        return self.adapters.sampled_outputs(step, sent)

    @property
    def prunes_adapters(self) -> bool:
        """Whether the last layer of a step with adapters may compute the wanted tokens only."""
        return self.adapters is not None and self.adapters.prunes

    def outputs_of(self, rows: np.ndarray) -> AbstractContextManager[None]:
        """A context in which a head or classifier is called, with one input for each of these rows."""
        return nullcontext() if self.adapters is None else self.adapters.outputs_of(rows)

    def find_positions(self, sent: dict[str, torch.Tensor]) -> torch.Tensor:
        """Positions [S] of the sampled tokens of the step that was built or filled last."""
        return self.static.positions.index_select(0, sent["sample_tokens"])

    def fill(self, shape: StepShape, sent: dict[str, torch.Tensor], size: int) -> None:
        """Write the inputs of a graph captured over `padded_batch` of ``size`` tokens. What the step does not use
        becomes padding: requests without tokens, and tokens that write to the null page."""
        self._write(shape, sent)
        self._pad(shape.num_tokens, len(shape.rows), size)

    def fill_media(self, step: Step, sent: dict[str, torch.Tensor], size: int) -> None:
        """`fill` what a graph captured for ``size`` tokens with placeholders reads beside the rest."""
        self.media.fill_static(step, sent, self.static.rope_positions, size)

    def clear(self, size: int) -> None:
        """Write nothing but padding, for a graph captured over ``size`` tokens."""
        self.static.token_ids[:size].zero_()
        self.static.positions[:size].zero_()
        self.static.query_start[:1].zero_()
        self._pad(0, 0, size)

    def _pad(self, num_tokens: int, num_requests: int, size: int) -> None:
        # Token ids and positions of the padding keep what earlier steps left: their hidden states are dropped, their K
        # and V go to the null page. The capture reads as many requests as it has room for: those beyond R get length 0,
        # with query_start at the end of the tokens.
        static = self.static
        static.slots[:, num_tokens:size].fill_(NULL_PAGE * self.layout.page_size)
        static.query_start[num_requests + 1 :].fill_(num_tokens)
        static.kv_lens[num_requests:].fill_(0)

    def padded_batch(self, size: int) -> ForwardBatch:
        """A batch with room for ``size`` tokens of as many requests, at most ``max_requests``, over the static tensors.
        Lengths are known on the device alone; the host's are bounds."""
        static, longest, rows = self.static, self.layout.max_model_len, min(size, self.max_requests)
        groups = []
        for group, backend in enumerate(self.backends):
            inputs = AttentionInputs(
                num_tokens=size, num_decodes=0, query_lens_cpu=[], kv_lens_cpu=[], max_query_len=size,
                max_kv_len=longest, query_start=static.query_start[: rows + 1], kv_lens=static.kv_lens[:rows],
                page_table=static.page_tables[group, :rows], slots=static.slots[group, :size],
                has_dynamic_lengths=True,
            )
            backend.prepare(inputs)
            groups.append(GroupStep(inputs, backend))
        return ForwardBatch(
            static.token_ids[:size], static.positions[:size], groups, carried=self.handover.view(size),
            rope_positions=self._rope_positions(size),
        )

    def _rope_positions(self, size: int) -> torch.Tensor | None:
        return None if self.media.offsets is None else self.static.rope_positions[:size]

    def decode_groups(
        self, decodes: DecodeInputs, rows: torch.Tensor, longest: int | None = None,
        prefixes: PrefixGroups | None = None,
    ) -> list[GroupStep]:
        """Every cache group over these decodes of ``rows`` [B] int64, its backend prepared. Of lengths the host knows
        bounds only, at most ``longest`` (None: any), for the choice of kernels and their grids; except on a CPU, whose
        backends read them. ``prefixes``: which of them begin alike, on the device."""
        size = len(decodes.token_ids)
        longest = self.layout.max_model_len if longest is None else longest
        is_cpu = decodes.kv_lens.device.type == "cpu"
        lengths = list(map(int, decodes.kv_lens)) if is_cpu else [longest] * size
        steps = []
        for group, backend in enumerate(self.backends):
            inputs = AttentionInputs(
                num_tokens=size, num_decodes=size, query_lens_cpu=[1] * size, kv_lens_cpu=lengths, max_query_len=1,
                max_kv_len=max(lengths), query_start=decodes.query_start, kv_lens=decodes.kv_lens,
                page_table=decodes.page_tables[group], slots=decodes.slots[group], rows=rows,
                prefixes=prefixes if backend.prefix_members else None,
            )
            backend.prepare(inputs)
            steps.append(GroupStep(inputs, backend))
        return steps

    def _write(self, shape: StepShape, sent: dict[str, torch.Tensor]) -> None:
        static, num_tokens, num_requests = self.static, shape.num_tokens, len(shape.rows)
        token_ids, positions, page_size = static.token_ids[:num_tokens], sent["positions"], self.layout.page_size
        count, own = shape.num_decodes, self.rows.tensors
        kv_lens = sent["kv_lens"]
        if count:
            # Decodes come first. The previous step's sampling wrote their tokens and lengths on the device, ahead of us
            # in the stream; no step before this one reads the upload.
            rows, offsets = sent["rows"][:count], sent["offsets"]
            token_ids[:count] = (
                entry_tokens(rows, offsets, own) if shape.most_drafts else own.last_token.index_select(0, rows)
            )
            torch.add(own.computed_len.index_select(0, rows), offsets, out=positions[:count])
            torch.add(positions[:count], 1, out=kv_lens[:count])
        token_ids[count:] = sent["prefill_tokens"]
        static.positions[:num_tokens] = positions
        rotated_by = self.media.find_positions(sent["token_rows"], positions)
        if rotated_by is not None:
            static.rope_positions[:num_tokens] = rotated_by
        static.query_start[: num_requests + 1] = sent["query_start"]
        static.kv_lens[:num_requests] = kv_lens
        num_entries = self._num_entries(shape)
        offset, page = positions % page_size, positions // page_size
        for group in range(len(self.backends)):
            table = self.tables.tensor[group]
            # [T]: flat index into [rows, entries] of the page that holds each token
            entry = sent["token_rows"] * table.shape[1] + page
            torch.add(
                table.view(-1).index_select(0, entry).long() * page_size, offset, out=static.slots[group, :num_tokens]
            )
            # Entries beyond stay stale: kv_lens bounds what attention reads.
            pages = table[:, :num_entries].index_select(0, sent["rows"])
            static.page_tables[group, :num_requests, :num_entries] = pages
        self.handover.receive(num_tokens)  # last: a CPU waits here

    def _num_entries(self, shape: StepShape) -> int:
        return -(-int(shape.ends.max()) // self.layout.page_size)

    def _prune(self, whole: AttentionInputs, ends: np.ndarray, requests: torch.Tensor) -> AttentionInputs:
        """Attention inputs of the last tokens of some requests, each as a decode; ``requests`` [S] are their indices
        among the step's, ``ends`` [S] their lengths after the step."""
        count = len(ends)
        return AttentionInputs(
            num_tokens=count, num_decodes=count, query_lens_cpu=[1] * count, kv_lens_cpu=list(map(int, ends)),
            max_query_len=1, max_kv_len=int(ends.max(initial=1)),
            query_start=torch.arange(count + 1, dtype=torch.int32, device=requests.device),
            kv_lens=whole.kv_lens.index_select(0, requests), page_table=whole.page_table.index_select(0, requests),
            slots=whole.slots,  # [T]: the last layer still writes K and V of all tokens
            rows=None if whole.rows is None else whole.rows.index_select(0, requests),
        )

    def _prepare_group(
        self, group: int, shape: StepShape, rows: torch.Tensor, prefixes: PrefixGroups | None
    ) -> GroupStep:
        static, num_requests = self.static, len(shape.rows)
        last_pages = -(-int(shape.ends[-1]) // self.layout.page_size)
        inputs = AttentionInputs(
            num_tokens=shape.num_tokens, num_decodes=shape.num_decodes, query_lens_cpu=list(map(int, shape.lengths)),
            kv_lens_cpu=list(map(int, shape.ends)), max_query_len=int(shape.lengths.max()),
            max_kv_len=int(shape.ends.max()),
            query_start=static.query_start[: num_requests + 1], kv_lens=static.kv_lens[:num_requests],
            page_table=static.page_tables[group, :num_requests, : self._num_entries(shape)],
            slots=static.slots[group, : shape.num_tokens],
            last_run=self.tables.find_run(group, int(shape.rows[-1]), last_pages), rows=rows,
            prefixes=prefixes if self.backends[group].prefix_members else None,
        )
        self.backends[group].prepare(inputs)
        return GroupStep(inputs, self.backends[group])
