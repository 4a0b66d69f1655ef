"""`Runner`: one plan, from integers to a pending result: apply, build inputs, forward, sample, copy back.

Refuses: deciding anything, waiting for the device, and knowing which model or backend it drives.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from headrace.base.cache import CacheLayout
from headrace.base.step import StepPlan
from headrace.execution.captured_steps import CapturedSteps, GraphSizes
from headrace.execution.captures import Records
from headrace.execution.decodes import Decodes
from headrace.execution.graphs import DecodeGraph, DecodeState
from headrace.execution.inputs import InputBuilder, StepShape
from headrace.execution.logprobs import Logprobs, compute_prompt_logprobs
from headrace.execution.pooling import Pooler
from headrace.execution.result import PendingSample, PromptSpan
from headrace.execution.rows import WANTS_PROMPT_LOGPROBS, Rows
from headrace.execution.sampling import Drawn, SampleBatch, Sampler
from headrace.execution.structured.rows import Filling, GrammarRows
from headrace.execution.structured.store import GrammarStore
from headrace.execution.upload import Upload
from headrace.kernels.decoder_layers.table import FusedDecode
from headrace.layers.attention.contract import AttentionBackend, KvPages
from headrace.layers.model import ServedModel
from headrace.memory.page_tables import PageTables
from headrace.memory.pools import Pool, build_pool


class Runner:
    """Owns the pools, the page tables, the rows and the sampler of one model on one device.

    ``backends[g]`` serves group g of the layout. ``max_tokens`` is the largest step in tokens.
    """

    def __init__(
        self, model: ServedModel, layout: CacheLayout, backends: list[AttentionBackend], *, num_layers: int,
        vocab_size: int, max_tokens: int,
        device: torch.device, check_finite: bool = True,
    ):
        self._model, self._device, self._check_finite = model, device, check_finite
        self._num_layers = num_layers
        self.layout, self._backends = layout, backends
        self._narrows = model.prunes_last_layer
        self._joins = all(backend.fuses_layers for backend in backends)
        self._captured: CapturedSteps | None = None
        self.pools: list[Pool] = [build_pool(group, layout.page_size, device) for group in layout.groups]
        self._tables = PageTables(layout, device)
        self._rows = Rows(layout.max_rows, device)
        self._sampler = Sampler(self._rows, layout.max_rows, vocab_size)
        self._pooler = Pooler(self._rows, model)
        self._grammars: GrammarRows | None = None
        self._decodes: Decodes | None = None  # of the latest step, if it was of decodes alone
        self._open: PendingSample | None = None  # a step whose draw may not have been launched
        self._inputs = InputBuilder(layout, self._rows, self._tables, backends, max_tokens)
        model.bind_cache(*_pages_by_layer(layout, self.pools, num_layers))

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> PendingSample:
        """Launch a plan; its result is read later, in plan order."""
        self._close_step()
        upload = Upload()
        self._apply_rows(plan, upload)
        if not plan.rows:
            self._apply_pages(upload.send(self._device))
            return PendingSample(plan.step_id)
        if plan.num_decodes == len(plan.rows):
            graph = self._captured.find_decodes(len(plan.rows)) if self._captured else None
            if graph is not None:
                return self._replay(plan, upload, graph)
            joined = self._model.fuse_decode() if self._joins else None
            if joined is not None:
                return self._join(plan, upload, joined)
        return self._compute(plan, upload)

    def serve_grammars(self, store: GrammarStore) -> None:
        """Take rows with grammars of a store from now on."""
        self._grammars = GrammarRows(store, self._sampler.vocab_size, self.layout.max_rows, self._device)

    def reset(self) -> None:
        """Forget what failed steps left behind; every row is started anew before it is computed again."""
        self._open = self._decodes = None
        if self._grammars is not None:
            self._grammars.reset()

    def detach(self) -> None:
        """Take the pools from the model, which may get another runner. This one cannot be used afterwards."""
        self._model.bind_cache([None] * self._num_layers, [None] * self._num_layers)
        self._captured = None

    def capture(self, sizes: GraphSizes, recorder: Records) -> CapturedSteps:
        """Run steps of these sizes as graphs from now on; whoever calls decides when these are recorded."""
        state = DecodeState(self._rows, self._tables, self.layout, self._backends)
        self._captured = CapturedSteps(sizes, self._model, state, self._inputs, recorder)
        return self._captured

    @torch.inference_mode()
    def record_next(self) -> bool:
        """Use an idle moment: record one graph that is missing; False when there is none."""
        return self._captured is not None and self._captured.record_next()

    def _compute(self, plan: StepPlan, upload: Upload) -> PendingSample:
        shape, self._decodes = StepShape.of(plan), None
        self._rows.require(shape.rows)
        self._inputs.pack(shape, upload)
        samples = np.flatnonzero(plan.samples)
        batch = SampleBatch.of(shape.rows[samples], shape.ends[samples], self._rows)
        upload.add("sample_tokens", shape.query_start[1:][samples] - 1)
        self._sampler.pack(batch, upload)
        spans, reads = self._find_prompt_spans(shape, upload), self._pooler.pack(shape, upload)
        graph = self._captured.find(shape) if self._captured is not None else None
        is_narrow = graph is None and self._narrows and not spans and not reads and len(samples) < shape.num_tokens
        if is_narrow:
            upload.add("sample_requests", samples)
        sent = upload.send(self._device)
        filling = self._grammars.begin(batch) if self._grammars is not None else None
        self._apply_pages(sent)
        if graph is not None:
            hidden = graph.run(shape, sent)
        else:
            hidden = self._model.forward(self._inputs.build(shape, sent, samples if is_narrow else None))
        prompts, pooled = self._log_prompts(spans, hidden, sent), self._pooler.pool(reads, hidden, sent)
        draw: Callable[[], Drawn] | None = None
        if len(samples):
            logits = self._model.compute_logits(hidden if is_narrow else hidden.index_select(0, sent["sample_tokens"]))
            draw = self._plan_draw(logits, batch, sent, filling)
        return self._leave(
            PendingSample(plan.step_id, batch, draw, prompts, check_finite=self._check_finite, pooled=pooled), filling
        )

    def _replay(self, plan: StepPlan, upload: Upload, graph: DecodeGraph) -> PendingSample:
        """The same for decodes alone: the graph draws the likeliest tokens, the sampler whatever else was asked."""
        decodes = self._read_decodes(plan, upload)
        batch = decodes.batch
        upload.add("decodes", graph.pack(decodes.rows, decodes.ends))
        sent = upload.send(self._device)
        self._apply_pages(sent)
        logits, likeliest = graph.run(sent["decodes"])  # first: masks are needed only once it is done
        filling = self._grammars.begin(batch, is_launched=True) if self._grammars is not None else None
        if batch.is_greedy:
            draw: Callable[[], Drawn] = lambda: Drawn(likeliest, None)  # noqa: E731
        else:
            draw = self._plan_draw(logits[: len(plan.rows)], batch, sent, filling)
        return self._leave(
            PendingSample(plan.step_id, batch, draw, check_finite=self._check_finite, places=decodes.places), filling
        )

    def _join(self, plan: StepPlan, upload: Upload, step: FusedDecode) -> PendingSample:
        """The same for decodes alone where one call computes all of them, the likeliest tokens too."""
        decodes = self._read_decodes(plan, upload)
        batch = decodes.batch
        sent = upload.send(self._device)
        filling = self._grammars.begin(batch) if self._grammars is not None else None
        self._apply_pages(sent)
        logits, likeliest = step.run(
            torch.from_numpy(decodes.requests), self._rows.last_token, self._tables.tensor, is_greedy=batch.is_greedy
        )
        if logits is None:
            draw: Callable[[], Drawn] = lambda: Drawn(likeliest, None)  # noqa: E731
        else:
            draw = self._plan_draw(logits, batch, sent, filling)
        return self._leave(
            PendingSample(plan.step_id, batch, draw, check_finite=self._check_finite, places=decodes.places), filling
        )

    def _read_decodes(self, plan: StepPlan, upload: Upload) -> Decodes:
        """A plan of decodes alone, whose sampling state is added to the upload if it takes any."""
        decodes = self._decodes = (
            Decodes.of(plan, self._rows) if self._decodes is None else self._decodes.follow(plan, self._rows)
        )
        if not decodes.batch.is_greedy:
            self._sampler.pack(decodes.batch, upload)
        return decodes

    def _plan_draw(
        self, logits: torch.Tensor, batch: SampleBatch, sent: dict[str, torch.Tensor], filling: Filling | None
    ) -> Callable[[], Drawn]:
        def draw() -> Drawn:
            masks = filling.result() if filling is not None else None
            with torch.inference_mode():
                return self._sampler.draw(logits, batch, sent, masks)

        return draw

    def _leave(self, pending: PendingSample, filling: Filling | None) -> PendingSample:
        """Let a step draw, unless it has to wait for masks."""
        if filling is None:
            pending.close()
            return pending
        assert self._grammars is not None
        pending.before_result = self._grammars.catch_up
        filling.follow(pending)
        self._open = pending
        return pending

    def _close_step(self) -> None:
        """Launch the draw of the latest step, if it was left for later: it comes before whatever changes its rows."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _release(self, row: int) -> None:
        self._rows.release(row)
        self._sampler.release(row)
        if self._grammars is not None:
            self._grammars.release(row)

    def _apply_rows(self, plan: StepPlan, upload: Upload) -> None:
        for row in plan.releases:
            self._release(row)
        for start in plan.starts:
            known = self._rows.start(start)
            self._sampler.start(start.row, known)
            if known.sampling.grammar is not None:
                assert self._grammars is not None, "a grammar, and nobody to serve it"
                self._grammars.start(start.row, known)
        for growth in plan.growths:
            self._rows.grow(growth)
        cleared = [*plan.releases, *(start.row for start in plan.starts)]
        if cleared:
            upload.add("cleared", cleared)
        if plan.appends:
            index, pages = self._tables.flatten(plan.appends)
            upload.add("append_index", index)
            upload.add("append_pages", pages)

    def _apply_pages(self, sent: dict[str, torch.Tensor]) -> None:
        if "cleared" in sent:
            self._tables.clear(sent["cleared"])
        if "append_index" in sent:
            self._tables.write(sent["append_index"], sent["append_pages"])

    def _find_prompt_spans(self, shape: StepShape, upload: Upload) -> list[PromptSpan]:
        spans, targets = [], []
        for i in np.flatnonzero(self._rows.flags_np[shape.rows] & WANTS_PROMPT_LOGPROBS):
            row, begin, end = int(shape.rows[i]), int(shape.begins[i]), int(shape.ends[i])
            known = self._rows[row]
            stop = min(end + 1, known.prompt_len)
            if stop > begin + 1:
                spans.append(
                    PromptSpan(
                        row, begin + 1, stop - begin - 1, int(shape.query_start[i]), known.sampling.num_prompt_logprobs
                    )
                )
                targets.append(known.token_ids[begin + 1 : stop])
        if spans:
            upload.add("prompt_targets", np.concatenate(targets))
        return spans

    def _log_prompts(
        self, spans: list[PromptSpan], hidden: torch.Tensor, sent: dict[str, torch.Tensor]
    ) -> list[tuple[PromptSpan, Logprobs]]:
        if not spans:
            return []
        targets = sent["prompt_targets"].split([span.count for span in spans])
        return [
            (
                span,
                compute_prompt_logprobs(
                    hidden[span.hidden_start : span.hidden_start + span.count], ids, span.top_count,
                    self._model.compute_logits
                )
            )
            for span, ids in zip(spans, targets, strict=True)
        ]


def _pages_by_layer(
    layout: CacheLayout, pools: list[Pool], num_layers: int
) -> tuple[list[KvPages | None], list[int | None]]:
    pages: list[KvPages | None] = [None] * num_layers
    group_of_layer: list[int | None] = [None] * num_layers
    for g, (group, pool) in enumerate(zip(layout.groups, pools, strict=True)):
        for layer in group.layers:
            pages[layer], group_of_layer[layer] = KvPages(*pool.layer(layer)), g
    return pages, group_of_layer
