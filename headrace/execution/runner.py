"""`Runner`: one plan, from integers to a pending result: update rows, choose a path, launch, sample, copy back.

Refuses: deciding what runs, waiting for the device, and knowing which model or backend it drives.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

import numpy as np
import torch

from headrace.base.cache import CacheLayout
from headrace.base.speculation import StepTimes
from headrace.base.step import AdapterLoad, StepPlan
from headrace.execution.adapters import AdapterInputs, AdapterStore
from headrace.execution.captures import Records
from headrace.execution.graph_sizes import GraphSizes
from headrace.execution.graphs import CapturedSteps
from headrace.execution.inputs import InputBuilder
from headrace.execution.logprobs import PromptScorer
from headrace.execution.media import MediaState
from headrace.execution.paths import FusedPath, Launch, PlainPath, Sent, StepOutput, StepPath
from headrace.execution.pooling import Pooler
from headrace.execution.proposing import Proposer
from headrace.execution.result import PendingDrafts, PendingSample
from headrace.execution.rows import Rows
from headrace.execution.sampling import ReceivingSampler, Sampled, Sampler
from headrace.execution.step import OF_LAST_STAGE, Step, StepFeature
from headrace.execution.structured.library import GrammarStore
from headrace.execution.structured.rows import BitmaskFill, GrammarRows
from headrace.execution.upload import Upload
from headrace.layers.attention.contract import AttentionBackend, KvPages
from headrace.layers.draft import DraftModel
from headrace.layers.model import ServedModel
from headrace.layers.self_attention import AttentionLayer
from headrace.memory.hot_pool import SwapCounts, build_pools
from headrace.memory.page_tables import PageTables
from headrace.memory.pools import Pool
from headrace.memory.prefix_groups import PrefixFinder
from headrace.parallel.links import Handover
from headrace.parallel.ranks import Ranks


class Runner:
    """Owns the pools, the page tables, the rows and the sampler of one model on one device.

    ``backends[g]`` serves cache group g of the layout. ``max_tokens`` bounds the tokens of a step. ``paths``: the ways
    to compute a step, fastest first; the last one takes every step.

    All device work is launched on the current stream by one thread. Host state (`Rows`, the matchers) changes at once;
    device state (page tables, last tokens, penalty counts) changes in stream order, behind the steps in flight.
    """

    def __init__(
        self, model: ServedModel, layout: CacheLayout, backends: list[AttentionBackend], *, num_layers: int,
        vocab_size: int, max_tokens: int, device: torch.device, check_finite: bool = True,
    ):
        self._model, self._device, self._check_finite = model, device, check_finite
        self._num_layers = num_layers
        self.layout, self._backends = layout, backends
        self._captured: CapturedSteps | None = None
        self.pools = build_pools(layout, device)
        self.swaps = SwapCounts(self.pools, device)
        self._tables = PageTables(layout, device)
        members = [backend.prefix_members for backend in backends]
        self._prefixes = PrefixFinder(layout, members) if any(members) else None
        self._rows = Rows(layout.max_rows, device)
        self._samples, self._inference_mode = True, torch.inference_mode()  # entered again by each step
        self._features = ~StepFeature(0)
        self._sampler = Sampler(self._rows, layout.max_rows, vocab_size)
        self._grammars: GrammarRows | None = None
        self._step: Step | None = None  # the latest, from which the next is derived when the same rows decode again
        self._open: PendingSample | None = None  # the latest step with a grammar: its sampling may not be launched yet
        self._media = MediaState(model, self._rows)
        self._inputs = InputBuilder(layout, self._rows, self._tables, backends, max_tokens, self._media)
        if model.adapters is not None:
            self._inputs.adapters = AdapterInputs(model.adapters, self._rows, device)
        outputs_of = self._inputs.outputs_of
        self._pooler = Pooler(self._rows, model, outputs_of)
        self._prompt_scorer = PromptScorer(self._rows, model, outputs_of)
        self.paths: list[StepPath] = [PlainPath(model, self._inputs)]
        if all(backend.fuses_layers for backend in backends):
            self.paths.insert(0, FusedPath(model, self._rows, self._tables))
        self._proposer: Proposer | None = None
        self.adapters: AdapterStore | None = None
        self.times = StepTimes()
        pages, groups = _pages_by_layer(layout, self.pools, num_layers)
        model.bind_cache(pages[:num_layers], groups[:num_layers])
        self._plans = _plan_ahead(model, backends, self._inputs.max_tokens, layout.max_model_len)

    def join(self, ranks: Ranks, dtype: torch.dtype) -> None:
        """Run the same plans as the other ranks: rank 0 samples, and the others of its pipeline stage take what it
        sampled; those of stages before it learn it from plans. ``dtype``: of what stages send each other."""
        self._samples, links = ranks.layout.rank == 0, ranks.links
        kind = Sampler if self._samples else ReceivingSampler
        self._sampler = kind(self._rows, self.layout.max_rows, self._sampler.vocab_size, ranks.tensor)
        shape = (self._inputs.max_tokens, self._model.carried_width)
        carried = torch.zeros(shape, dtype=dtype, device=self._device) if links.has_previous else None
        self._inputs.handover = Handover(links, carried)
        self._features = ~StepFeature(0) if self._inputs.handover.is_last else ~OF_LAST_STAGE

    def draft_with(self, draft: DraftModel, *, hidden_size: int, dtype: torch.dtype, max_tokens: int) -> None:
        """Let a drafter make drafts behind steps that ask for it. Its layers are the layout's behind those of the
        model. Captured steps have at most ``max_tokens`` tokens."""
        pages, groups = _pages_by_layer(self.layout, self.pools, self._num_layers + draft.num_layers)
        draft.bind_cache(pages[self._num_layers :], groups[self._num_layers :])
        self._inputs.make_draft_room()
        self._proposer = Proposer(draft, self._inputs, hidden_size=hidden_size, dtype=dtype, max_tokens=max_tokens)
        self.paths[-1] = PlainPath(self._model, self._inputs, self._proposer)

    def accept_at_rate(self, rate: float) -> None:
        """Let drafts be right at this rate, whatever they are: for benchmarks."""
        self._rows.accept_at_rate(rate)

    def execute(self, plan: StepPlan) -> PendingSample:
        """Launch a plan without waiting for the device; results are read later, in plan order. May raise
        `torch.OutOfMemoryError`; the caller must then `reset` and start all rows anew."""
        with self._inference_mode:
            return self._execute(plan)

    def _execute(self, plan: StepPlan) -> PendingSample:
        # First: the sampling reads row state (penalties, rules, matchers) that this plan's releases and starts change.
        self._close_step()
        upload, later = Upload(), self._load_adapters(plan)
        self._apply_rows(plan, upload)
        if not plan.rows:
            self._apply_pages(upload.send(self._device))
            self._media.encode(plan.media)
            self._media.drop(plan.media.drops)
            if any(plan.replica_tokens):
                self._model.take_part(plan.replica_tokens)
            return PendingSample(plan.step_id)
        read = Step.of if self._step is None else self._step.follow
        step = self._step = read(plan, self._rows, self._prefixes)
        step.features &= self._features
        path, launch = self._choose_path(step, upload)
        self._pack_tokens(step, upload)
        # Every part packs its host arrays now: one copy to the device serves the whole step.
        if not (step.is_greedy and path.is_greedy_sampler):
            self._sampler.pack(step.batch, upload)
        has_prompt_logprobs = StepFeature.PROMPT_LOGPROBS in step.features
        spans = self._prompt_scorer.pack(step.shape, upload) if has_prompt_logprobs else []
        pooled = self._pooler.pack(step.shape, upload) if StepFeature.POOLING in step.features else None
        sent = upload.send(self._device)
        self._apply_pages(sent)
        self._apply_tokens(plan, sent)
        self._media.encode(plan.media)
        output = launch(sent)
        self.swaps.fetch()
        for load in later:
            assert self.adapters is not None
            self.adapters.load_beside(load.slot, load.adapter_id)
        self._media.drop(plan.media.drops)
        # Behind the launch: a fill may wait for the previous step's tokens, and by now the device has work.
        fill = self._begin_fill(step, sent)
        pending = PendingSample(
            plan.step_id, step.batch, self._plan_sampling(step, output, sent, fill),
            self._prompt_scorer.compute(spans, output.hidden, sent), check_finite=self._check_finite, order=step.order,
            pooled=self._pooler.pool(pooled, output.hidden, sent, output.aligned), propose=output.propose,
        )
        return self._leave(pending, fill)

    def serve_grammars(self, store: GrammarStore) -> None:
        """Take rows with grammars of a store from now on."""
        self._grammars = GrammarRows(
            store, self._sampler.vocab_size, self.layout.max_rows, self._device,
            forces=all(backend.most_drafts for backend in self._backends),
        )

    def reset(self) -> None:
        """Drop the state of failed steps. Rows and page tables are left: the scheduler starts every row anew, which
        overwrites both, before it computes it again."""
        self._open = self._step = None
        self._media.reset()
        if self._grammars is not None:
            self._grammars.reset()

    def detach(self) -> None:
        """Unbind the pools from the model, which may get another runner. This one cannot be used afterwards. Graphs go
        too: they hold addresses of the pools, and their own memory."""
        if self.adapters is not None:
            self.adapters.wait()
        self._model.bind_cache([None] * self._num_layers, [None] * self._num_layers)
        if self._proposer is not None:
            draft, self._proposer = self._proposer.draft, None
            draft.bind_cache([None] * draft.num_layers, [None] * draft.num_layers)
        self._captured = None
        self._plans.close()
        self.paths.clear()

    def capture(self, sizes: GraphSizes, recorder: Records) -> CapturedSteps:
        """Run steps of these sizes as graphs from now on; the caller decides when these are recorded."""
        if self._captured is not None:
            del self.paths[: len(self._captured.paths)]  # the captured paths are always in front
        self._captured = CapturedSteps(sizes, self._model, self._inputs, recorder, self._proposer)
        self.paths[:0] = self._captured.paths
        return self._captured

    @torch.inference_mode()
    def record_next(self) -> bool:
        """Record one missing graph; False when there is none. Call it with no step in flight: recording runs the work
        on padding and overwrites the outputs that an unread step may still sample from."""
        return self._captured is not None and self._captured.record_next()

    @torch.inference_mode()
    def plan_next(self) -> bool:
        """Let a backend build a plan that later steps may need; False when there are none left."""
        return next(self._plans, False)

    def _choose_path(self, step: Step, upload: Upload) -> tuple[StepPath, Launch]:
        """The first path that covers the step's features and has room for its shape, and its launch. A path that
        declines has added nothing to the upload, so the next one may use the same names."""
        for path in self.paths:
            if step.features in path.covers:
                launch = path.prepare(step, upload)
                if launch is not None:
                    return path, launch
        raise AssertionError("the plain path takes every step")

    def _plan_sampling(
        self, step: Step, output: StepOutput, sent: Sent, fill: BitmaskFill | None
    ) -> Callable[[], Sampled] | None:
        """The call that launches the step's sampling; None where no row samples."""
        greedy, logits = output.greedy, output.logits
        if greedy is not None:
            return lambda: Sampled(greedy, None)
        if logits is None:
            return None

        assert output.positions is not None, "a path says where it computed logits"
        positions = output.positions

        def sample() -> Sampled:
            # May wait for the step before. Inference mode again: this can run outside of `execute`.
            bitmasks = fill.result() if fill is not None else None
            with torch.inference_mode():
                return self._sampler.sample(logits, positions, step.batch, sent, bitmasks)

        return sample

    def _begin_fill(self, step: Step, sent: Sent) -> BitmaskFill | None:
        """Begin to fill the step's bitmasks; None where no row has a grammar."""
        if self._grammars is None:
            return None
        rows = sent.get("constrained_rows")  # of steps with drafts, which the bitmasks depend on
        drafts = None if rows is None else PendingDrafts(self._rows.tensors.drafts.index_select(0, rows))
        return self._grammars.begin(step.batch, drafts)

    def _leave(self, pending: PendingSample, fill: BitmaskFill | None) -> PendingSample:
        """Launch the step's sampling, or leave it open where bitmasks may depend on tokens not yet read: then the next
        `execute` or the reading of the result closes it, whichever comes first."""
        if fill is None:
            pending.close()
            return pending
        assert self._grammars is not None
        pending.before_result = self._grammars.catch_up
        fill.follow(pending)
        self._open = pending
        return pending

    def _close_step(self) -> None:
        """Launch the latest step's sampling if it was left open."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _release(self, row: int) -> None:
        self._rows.release(row)
        self._sampler.release(row)
        self._pooler.release(row)
        if self._grammars is not None:
            self._grammars.release(row)

    def _load_adapters(self, plan: StepPlan) -> list[AdapterLoad]:
        """Load those that the plan's own rows use, or all without any; returns the others, which nothing waits for."""
        if self.adapters is None:
            assert not plan.adapter_loads, "adapters are not served"
            return []
        self.adapters.begin_step(has_loads=bool(plan.adapter_loads))
        used = {start.adapter_slot for start in plan.starts}
        later = [load for load in plan.adapter_loads if plan.rows and load.slot not in used]
        for load in plan.adapter_loads:
            if load not in later:
                self.adapters.load(load.slot, load.adapter_id)
        return later

    def _apply_rows(self, plan: StepPlan, upload: Upload) -> None:
        """Change the host's row state now and pack the page table updates for `_apply_pages`. Releases come before
        starts: a row that is released may be started again in the same plan."""
        for row in plan.releases:
            self._release(row)
        for start in plan.starts:
            adapters, slot = self._inputs.adapters, start.adapter_slot
            has_extras = slot >= 0 and adapters is not None and adapters.banks.has_extras(slot)
            known = self._rows.start(start, has_adapter_extras=has_extras)
            self._sampler.start(start.row, known)
            if known.sampling.grammar is not None and self._samples:
                assert self._grammars is not None, "the row has a grammar, and grammars are not served"
                self._grammars.start(start.row, known)
        self._media.start(plan.starts, upload)
        # Rows given back as well as rows taken: a write beyond a request's pages then lands in the null page.
        cleared = [*plan.releases, *(start.row for start in plan.starts)]
        if cleared:
            upload.add("cleared", cleared)
        if self._prefixes is not None:
            self._prefixes.note(plan.starts, plan.appends)
        if plan.appends:
            index, pages = self._tables.flatten(plan.appends)
            upload.add("append_index", index)
            upload.add("append_pages", pages)

    def _pack_tokens(self, step: Step, upload: Upload) -> None:
        """Pack what the host knows of decodes' tokens: those that another stage sampled, those of rows that start with
        a decode, and drafts."""
        plan, count = step.plan, step.plan.num_decodes
        first, last = 0 if plan.last_tokens else count, count + step.shape.num_resumed
        if first < last:
            known, begins = plan.rows[first:last], plan.begins[first:last]
            tokens = [
                *plan.last_tokens,
                *(self._rows[plan.rows[i]].token_ids[plan.begins[i]] for i in range(count, last)),
            ]
            upload.add("known", np.array((known, tokens, begins)).ravel())
        if plan.drafts:
            upload.add("guesses", self._rows.pack_drafts(plan.drafts))
        if self._grammars is not None and step.batch.most_drafts and len(step.batch.constrained):
            upload.add("constrained_rows", self._grammars.find_rows(step.batch))

    def _apply_tokens(self, plan: StepPlan, sent: Sent) -> None:
        if "known" in sent:
            self._rows.take_known(sent["known"].view(3, -1))
        if plan.drafts:
            self._rows.place_drafts(sent["guesses"], len(plan.drafts))

    def _apply_pages(self, sent: Sent) -> None:
        self._media.apply(sent)
        # Clear before write: a row started by this plan gets its first pages in the same upload.
        if "cleared" in sent:
            self._tables.clear(sent["cleared"])
            for pool in self.pools:
                pool.clear_rows(sent["cleared"])
        if "append_index" in sent:
            self._tables.write(sent["append_index"], sent["append_pages"])


def _plan_ahead(
    model: ServedModel, backends: list[AttentionBackend], most_tokens: int, longest: int
) -> Generator[bool, None, None]:
    layers = [own for own in model.modules() if isinstance(own, AttentionLayer) and own.uses_backend]
    for group, backend in enumerate(backends):
        layer = next((layer for layer in layers if layer.group == group), None)
        if layer is not None and layer.pages is not None:
            yield from backend.plan_ahead(layer.pages, layer.params, most_tokens, longest)


def _pages_by_layer(
    layout: CacheLayout, pools: list[Pool], num_layers: int
) -> tuple[list[KvPages | None], list[int | None]]:
    """Per model layer its pages and its cache group; None for layers without a KV cache."""
    num_layers = max(num_layers, 1 + max((layer for group in layout.groups for layer in group.layers), default=0))
    pages: list[KvPages | None] = [None] * num_layers
    group_of_layer: list[int | None] = [None] * num_layers
    for g, (group, pool) in enumerate(zip(layout.groups, pools, strict=True)):
        for layer in group.layers:
            pages[layer], group_of_layer[layer] = KvPages(*pool.layer(layer), hot=pool.hot(layer)), g
    return pages, group_of_layer
