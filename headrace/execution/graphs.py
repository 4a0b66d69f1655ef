"""Steps that replay CUDA graphs, one launch instead of hundreds: `DecodeGraphPath` for decodes alone, by number of
requests; `MixedGraphPath` for steps with prefill, by number of tokens; `CapturedSteps`, which records both.

Refuses: sampling beyond the argmax; the runner samples from the logits that a replay leaves. B bucket size, T tokens, D
hidden size, V vocabulary.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np
import torch

from headrace.base.cache import NULL_PAGE
from headrace.base.speculation import StepTimes, Times
from headrace.base.step import MAX_DRAFTS
from headrace.execution.adapters import CapturedAdapters
from headrace.execution.captures import B, Buckets, Capture, Records
from headrace.execution.device import row_query
from headrace.execution.graph_sizes import MAX_SPAN, GraphSizes, bucket_sizes
from headrace.execution.inputs import InputBuilder
from headrace.execution.paths import Launch, Sent, StepOutput, StepPath, compute_sampled_logits
from headrace.execution.proposing import ChainGraph, FollowGraph, Proposer
from headrace.execution.sampling import GreedyHead
from headrace.execution.step import Step, StepFeature, StepShape
from headrace.execution.upload import Upload
from headrace.kernels.attention import LONG_CONTEXT, PrefixGroups, count_packed
from headrace.kernels.verify import DECODE_INPUTS, DecodeInputs
from headrace.layers.batch import ForwardBatch
from headrace.layers.model import ServedModel
from headrace.parallel.links import Handover

MEASURED_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Numbers of decodes whose time is measured at the start where drafts are made: by these it is decided how many pay."""
NUM_REPLAYS = 5
"""Times that a captured step is run to measure it."""
FEW_DECODES = 64
"""Attention captured for dynamic lengths does not split a decode's keys among programs (no split-KV), unless a backend
says so. That is too slow for steps with fewer than ``FEW_DECODES`` decodes of which one has more than `LONG_CONTEXT`
keys."""


def find_bounds(inputs: InputBuilder, num_decodes: int) -> list[int]:
    """For what lengths captured steps of so many decodes differ, ascending; the last one is that of any."""
    longest = inputs.layout.max_model_len
    short = max((backend.short_context(num_decodes) for backend in inputs.backends), default=0)
    return [short, longest] if 0 < short < longest else [longest]


class DecodeGraph:
    """Decodes of one bucket, with or without drafts; short contexts may have a graph of their own. ``entries`` [2, B]
    int64 is its input (`headrace.kernels.verify`); padding is the null row. `run` returns logits (see `GreedyHead`) and
    [3, B] int64 (argmax ids, states, counts), and writes the rows' state as if all were greedy; a sampler overwrites
    that before the next step reads it. In pipeline stages before the last it returns hidden states [B, W] and its input
    instead, and leaves the state alone. Outputs may be overwritten by the next run of any bucket, as all share one
    memory pool; readers are safe on the same stream before that run. ``adapter_rows``: which entries have which adapter
    (`AdapterInputs`), of a graph that was made for ``adapters``. ``packed_prefixes``: which entries begin with the same
    pages (`PrefixGroups`), of a graph that was made for steps that say it."""

    def __init__(
        self, size: int, model: ServedModel, inputs: InputBuilder, recorder: Records, proposer: Proposer | None = None,
        adapters: CapturedAdapters | None = None, *, has_prefixes: bool = False,
    ):
        self.size, self._model, self._inputs, self._proposer = size, model, inputs, proposer
        is_usual = adapters is None and not has_prefixes
        bounds = find_bounds(inputs, size) if is_usual else [inputs.layout.max_model_len]
        self._captures = [(bound, Capture(partial(self._compute, bound), recorder)) for bound in bounds]
        device = inputs.rows.tensors.last_token.device
        self._adapters = adapters
        self.adapter_rows = None if adapters is None else adapters.make_static(size)
        self.packed_prefixes = torch.zeros(count_packed(size) * has_prefixes, dtype=torch.int64, device=device)
        self.entries = torch.empty((2, size), dtype=torch.int64, device=device)
        query = row_query(device)
        self._decode_inputs, self._head = DECODE_INPUTS.choose(query), GreedyHead(model, device)
        self.inputs = DecodeInputs.allocate(size, inputs.tables.tensor)

    def record(self) -> None:
        """See `Bucket`."""
        # The replay below runs for real: null rows write to the null page and to the null row's last token only.
        self.entries[0] = self._inputs.tables.null_row
        self.entries[1] = 0
        self.packed_prefixes.zero_()
        for _, capture in self._captures:
            capture.run()

    @property
    def is_recorded(self) -> bool:
        """See `Bucket`."""
        return all(capture.is_recorded for _, capture in self._captures)

    def run(self, longest: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute ``entries``, none of which has more than ``longest`` tokens after the step."""
        for bound, capture in self._captures[:-1]:
            if longest <= bound:
                return capture.run()
        return self._captures[-1][1].run()

    def pack(self, entries: np.ndarray) -> np.ndarray:
        """Pad ``entries`` [2, R] int64 to the bucket: [2 * B], rows first."""
        count = entries.shape[1]
        packed = np.zeros((2, self.size), dtype=np.int64)
        packed[0, count:] = self._inputs.tables.null_row
        packed[:, :count] = entries
        return packed.ravel()

    def _compute(self, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        # Captured: only device tensors at fixed addresses may be read here. The inputs of all layers are derived on the
        # device from ``entries``, the rows' state and the page tables.
        inputs, decodes, rows = self._inputs, self.inputs, self._inputs.rows
        self._decode_inputs(self.entries, rows.tensors, inputs.tables.tensor, inputs.layout.page_size, decodes)
        packed = self.packed_prefixes
        prefixes = PrefixGroups.of(packed, self.size) if len(packed) else None
        groups = inputs.decode_groups(decodes, self.entries[0], longest, prefixes)
        carried, proposer = inputs.handover.view(self.size), self._proposer
        batch = ForwardBatch(
            decodes.token_ids, decodes.positions, groups, carried=carried,
            rope_positions=inputs.media.find_positions(self.entries[0], decodes.positions),
        )
        if proposer is not None:
            batch.features = proposer.ask_features(self.size)
        outputs: AbstractContextManager[None] = nullcontext()
        if self._adapters is not None and self.adapter_rows is not None:
            batch.adapters = self._adapters.view_static(self.adapter_rows, self.size)
            outputs = self._adapters.inputs.outputs(batch.adapters)
        hidden = self._model.forward(batch)
        if not inputs.handover.is_last:
            return hidden, self.entries
        with outputs:
            logits, sampled = self._head.compute(hidden)
        return logits, rows.accept(sampled, self.entries, decodes.positions, MAX_DRAFTS)

    def read_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Rows of the logits that a run returned, of all tokens [S, V]."""
        return self._head.gather(logits)


class DraftGraphs:
    """Drafting behind captured steps: ``follows`` behind decodes, by number of entries; ``mixed_follows`` behind steps
    with prefill, by number of tokens; ``chains`` behind either, by number of rows that sample."""

    def __init__(
        self, sizes: GraphSizes, decodes: Buckets[DecodeGraph], inputs: InputBuilder, proposer: Proposer,
        recorder: Records,
    ):
        def follow_decodes(size: int) -> FollowGraph:
            graph = decodes.find(size)
            assert graph is not None and graph.size == size
            own, rows = graph.inputs, graph.entries[0]
            return FollowGraph(
                size, proposer,
                lambda: ForwardBatch(own.token_ids, own.positions, inputs.decode_groups(own, rows)),
                lambda: own.slots.fill_(NULL_PAGE * inputs.layout.page_size), recorder,
            )

        def follow_mixed(size: int) -> FollowGraph:
            return FollowGraph(
                size, proposer, lambda: inputs.padded_batch(size), lambda: inputs.clear(size), recorder
            )

        self._proposer = proposer
        self.follows = Buckets(sizes.decodes, follow_decodes)
        self.mixed_follows = Buckets(sizes.tokens, follow_mixed)
        self.chains = Buckets(
            bucket_sizes(inputs.layout.max_rows), lambda size: ChainGraph(size, proposer, recorder)
        )

    def pack(self, step: Step, upload: Upload) -> None:
        """Add the rows that sample, and where in the step their first sampled positions are."""
        firsts = step.batch.firsts
        if len(firsts):
            chain = self.chains.find(len(firsts))
            assert chain is not None, "a step has no more rows than there are"
            tokens = step.shape.query_start[1:][step.samples] - 1
            upload.add("chain", chain.pack(step.batch.rows[firsts], tokens[firsts]))

    @torch.inference_mode()
    def propose_behind_decodes(self, size: int, step: Step, sent: Sent, tokens: torch.Tensor) -> None:
        """Make drafts behind a replay of the bucket of ``size`` entries; ``tokens`` [3, S or more] were sampled."""
        count = step.shape.num_tokens
        self._proposer.sampled[:, :count].copy_(tokens[:, :count])
        follow = self.follows.find(size)
        assert follow is not None
        follow.run()
        self._run_chain(step, sent)

    @torch.inference_mode()
    def propose_behind_mixed(self, size: int, step: Step, sent: Sent, tokens: torch.Tensor) -> None:
        """The same behind a replay of the bucket of ``size`` tokens."""
        count, sampled = len(step.samples), self._proposer.sampled
        sampled[0, : step.shape.num_tokens].copy_(sent["following"])
        if count:
            sampled.index_copy_(1, sent["sample_tokens"], tokens[:, :count])
        follow = self.mixed_follows.find(size)
        assert follow is not None
        follow.run()
        self._run_chain(step, sent)

    def _run_chain(self, step: Step, sent: Sent) -> None:
        if "chain" in sent:
            packed = sent["chain"].view(2, -1)
            chain = self.chains.find(packed.shape[1])
            assert chain is not None
            self._proposer.firsts[:, : chain.size].copy_(packed)
            chain.run(step.plan.num_proposals)


class DecodeGraphPath:
    """Decodes alone: replays the smallest graph that holds the requests. With ``adapters`` the graphs are those of
    steps with adapters, behind which no drafter runs. With ``has_prefixes`` they are those of steps in which many
    decodes begin with the same pages, again without a drafter."""

    covers = StepFeature.SAMPLING | StepFeature.GRAMMAR | StepFeature.DRAFTING | StepFeature.ROPE_OFFSETS
    is_greedy_sampler = True

    def __init__(
        self, buckets: Buckets[DecodeGraph], handover: Handover, drafting: DraftGraphs | None = None,
        adapters: CapturedAdapters | None = None, *, has_prefixes: bool = False,
    ):
        self._buckets, self._handover, self._drafting, self._adapters = buckets, handover, drafting, adapters
        self._has_prefixes = has_prefixes
        if adapters is not None:
            self.covers = with_adapters(self.covers)
        if has_prefixes:
            self.covers &= ~StepFeature.DRAFTING

    def prepare(self, step: Step, upload: Upload) -> Launch | None:
        """See `StepPath`."""
        if self._has_prefixes and step.grouped is None:
            return None
        graph = self._buckets.find(step.shape.num_decodes)
        if graph is None or (self._adapters is not None and not self._adapters.fits(step)):
            return None
        upload.add("decodes", graph.pack(step.shape.entries))
        if self._has_prefixes and step.grouped is not None:
            upload.add("prefixes", step.grouped.pack(graph.size))
        if self._adapters is not None:
            self._adapters.inputs.pack(step, upload, graph.size)
        if StepFeature.DRAFTING in step.features and self._drafting is not None:
            self._drafting.pack(step, upload)
        return partial(self._launch, step, graph)

    def _launch(self, step: Step, graph: DecodeGraph, sent: Sent) -> StepOutput:
        graph.entries.view(-1).copy_(sent["decodes"])
        if graph.adapter_rows is not None:
            graph.adapter_rows.copy_(sent["adapter_rows"])
        if self._has_prefixes:
            graph.packed_prefixes.copy_(sent["prefixes"])
        self._handover.receive(step.shape.num_tokens)
        logits, greedy = graph.run(int(step.shape.ends.max()))
        if self._handover.pass_on(logits[: step.shape.num_tokens]):
            return StepOutput()
        count = len(step.samples)
        output = (
            StepOutput(greedy=greedy) if step.is_greedy
            else StepOutput(graph.read_logits(logits[:count]), graph.inputs.positions[:count])
        )
        if StepFeature.DRAFTING in step.features and self._drafting is not None:
            output.propose = partial(self._drafting.propose_behind_decodes, graph.size, step, sent)
        return output


class MixedGraph(Capture[torch.Tensor]):
    """Steps with prefill of one bucket of T tokens. It reads what `InputBuilder.fill` wrote to the static tensors, and
    returns hidden states [T, D], which the next run of any bucket may overwrite. ``adapter_rows``: as in `DecodeGraph`.
    ``has_media``: some of the tokens may be placeholders."""

    def __init__(
        self, size: int, model: ServedModel, inputs: InputBuilder, recorder: Records, proposer: Proposer | None = None,
        adapters: CapturedAdapters | None = None, *, has_media: bool = False,
    ):
        super().__init__(self._compute, recorder)
        self.size, self._model, self._inputs, self._proposer = size, model, inputs, proposer
        self._adapters, self._has_media = adapters, has_media
        self.adapter_rows = None if adapters is None else adapters.make_static(size)

    def record(self) -> None:
        """See `Bucket`."""
        self._inputs.clear(self.size)
        self.run()

    def _compute(self) -> torch.Tensor:
        batch, proposer = self._inputs.padded_batch(self.size), self._proposer
        if self._adapters is not None and self.adapter_rows is not None:
            batch.adapters = self._adapters.view_static(self.adapter_rows, self.size)
        if self._has_media:
            self._inputs.media.view_static(batch, self.size)
        if proposer is None:
            return self._model.forward(batch)
        batch.features = proposer.ask_features(self.size)
        return self._model.forward(batch)


class MixedGraphPath:
    """Any step but text pairs: replays the smallest graph that holds its tokens. Leaves to the plain path steps larger
    than every bucket, and those whose attention needs a kernel chosen for their lengths (see `find`). With
    ``has_media`` the graphs are those of steps with placeholders, behind which no drafter runs."""

    covers = (
        StepFeature.PREFILL | StepFeature.SAMPLING | StepFeature.GRAMMAR | StepFeature.PROMPT_LOGPROBS
        | StepFeature.POOLING | StepFeature.DRAFTING | StepFeature.ROPE_OFFSETS
    )
    is_greedy_sampler = False

    def __init__(
        self, buckets: Buckets[MixedGraph], model: ServedModel, inputs: InputBuilder,
        drafting: DraftGraphs | None = None, *, adapters: CapturedAdapters | None = None, has_media: bool = False
    ):
        self._buckets, self._model, self._inputs, self._drafting = buckets, model, inputs, drafting
        self._adapters, self._has_media = adapters, has_media
        self._divides_keys = all(backend.divides_dynamic_keys for backend in inputs.backends)
        if adapters is not None:
            self.covers = with_adapters(self.covers)
        if has_media:
            self.covers = (self.covers | StepFeature.MEDIA) & ~StepFeature.DRAFTING

    def find(self, shape: StepShape) -> MixedGraph | None:
        """The graph for a step of this shape; None where a graph would be slower or none is large enough."""
        decodes = shape.ends[: shape.num_decodes]
        has_few_long = (
            not self._divides_keys and 0 < len(decodes) < FEW_DECODES and int(decodes.max()) > LONG_CONTEXT
        )
        # A capture without a drafter has room for as many requests as there are rows; with drafts there may be more.
        has_room = len(shape.rows) <= self._inputs.max_requests
        if int(shape.lengths.max()) > MAX_SPAN or has_few_long or not has_room:
            return None
        return self._buckets.find(shape.num_tokens)

    def prepare(self, step: Step, upload: Upload) -> Launch | None:
        """See `StepPath`."""
        graph = self.find(step.shape)
        if graph is None or (self._adapters is not None and not self._adapters.fits(step)):
            return None
        self._inputs.pack(step, upload, graph.size)
        if StepFeature.DRAFTING in step.features and self._drafting is not None:
            self._drafting.pack(step, upload)
        return partial(self._launch, step, graph)

    def _launch(self, step: Step, graph: MixedGraph, sent: Sent) -> StepOutput:
        self._inputs.fill(step.shape, sent, graph.size)
        if self._has_media:
            self._inputs.fill_media(step, sent, graph.size)
        if graph.adapter_rows is not None:
            graph.adapter_rows.copy_(sent["adapter_rows"])
        hidden = graph.run()[: step.shape.num_tokens]  # [size, D], padding behind the step's tokens
        if self._inputs.handover.pass_on(hidden):
            return StepOutput()
        # Logits are computed outside of the graph: S varies, and is far below the bucket's size.
        with self._inputs.sampled_outputs(step, sent):
            logits = compute_sampled_logits(self._model, hidden, step, sent)
        output = StepOutput(logits, self._inputs.find_positions(sent), hidden=hidden)
        if StepFeature.DRAFTING in step.features and self._drafting is not None:
            output.propose = partial(self._drafting.propose_behind_mixed, graph.size, step, sent)
        return output


def with_adapters(covers: StepFeature) -> StepFeature:
    """The features that graphs of steps with adapters cover."""
    return (covers | StepFeature.ADAPTERS) & ~StepFeature.DRAFTING


class CapturedSteps:
    """The graphs of one runner, and when they are recorded: all at the start, or each when a step first needs it and in
    idle moments. A step whose bucket has no graph yet records it with the bucket's padding, and then replays it."""

    def __init__(
        self, sizes: GraphSizes, model: ServedModel, inputs: InputBuilder, recorder: Records,
        proposer: Proposer | None = None,
    ):
        decodes = Buckets(sizes.decodes, lambda size: DecodeGraph(size, model, inputs, recorder, proposer))
        mixed = Buckets(sizes.tokens, lambda size: MixedGraph(size, model, inputs, recorder, proposer))
        # Recorded in this order: logits [B, V] are the largest single tensor, and later graphs reuse its memory.
        self._kinds: list[
            Buckets[DecodeGraph] | Buckets[MixedGraph] | Buckets[FollowGraph] | Buckets[ChainGraph]
        ] = [decodes, mixed]
        self._decodes, self._drafting = decodes, None
        if proposer is not None:
            self._drafting = DraftGraphs(sizes, decodes, inputs, proposer, recorder)
            self._kinds += [self._drafting.follows, self._drafting.mixed_follows, self._drafting.chains]
        self.decodes = DecodeGraphPath(decodes, inputs.handover, self._drafting)
        self.mixed = MixedGraphPath(mixed, model, inputs, self._drafting)
        self.paths: list[StepPath] = [self.decodes, self.mixed]
        """Fastest first."""
        if any(backend.prefix_members for backend in inputs.backends):
            grouped = Buckets(
                sizes.with_prefixes, lambda size: DecodeGraph(size, model, inputs, recorder, has_prefixes=True)
            )
            self._kinds.append(grouped)
            self.paths.insert(0, DecodeGraphPath(grouped, inputs.handover, has_prefixes=True))
        for adapters in () if inputs.adapters is None else inputs.adapters.captured:
            self._add_adapters(sizes, model, inputs, recorder, adapters)
        media_sizes = sizes.with_media
        if inputs.media.make_static(max(media_sizes, default=0)):
            # A repeated image leaves the end of a page to compute, some of which may be placeholders.
            media = Buckets(media_sizes, lambda size: MixedGraph(size, model, inputs, recorder, has_media=True))
            self._kinds.append(media)
            self.paths.append(MixedGraphPath(media, model, inputs, has_media=True))

    def _add_adapters(
        self, sizes: GraphSizes, model: ServedModel, inputs: InputBuilder, recorder: Records, adapters: CapturedAdapters
    ) -> None:
        """Graphs of their own for steps with adapters, so that the others do not pay for any."""
        decodes = Buckets(sizes.decodes, lambda size: DecodeGraph(size, model, inputs, recorder, adapters=adapters))
        mixed = Buckets(sizes.tokens, lambda size: MixedGraph(size, model, inputs, recorder, adapters=adapters))
        self._kinds += [decodes, mixed]
        self.paths += [
            DecodeGraphPath(decodes, inputs.handover, adapters=adapters),
            MixedGraphPath(mixed, model, inputs, adapters=adapters),
        ]

    def measure(self) -> StepTimes:
        """Times of some sizes, over padding, which has hardly any keys. Waits for the device."""
        steps = _time(self._decodes, DecodeGraph.run)
        if self._drafting is None:
            return StepTimes(steps)
        drafts = _time(self._drafting.chains, lambda chain: chain.run(NUM_REPLAYS))
        return StepTimes(
            steps, _time(self._drafting.follows, FollowGraph.run),
            tuple((size, seconds / NUM_REPLAYS) for size, seconds in drafts),
        )

    def record_all(self, advance: Callable[[], None]) -> None:
        """Record every bucket; ``advance`` is called after each."""
        while self.record_next():
            advance()

    def record_largest(self) -> None:
        """Record the largest of each kind, so that the others fit into their memory whenever they come."""
        for buckets in self._kinds:
            for size in buckets.unrecorded()[:1]:
                buckets.record(size)

    def record_next(self) -> bool:
        """Record one bucket that has no graph; False when there is none."""
        for buckets in self._kinds:
            for size in buckets.unrecorded()[:1]:
                buckets.record(size)
                return True
        return False


def _time(buckets: Buckets[B], run: Callable[[B], object]) -> Times:
    """Seconds of one run by size, for those of `MEASURED_SIZES`, over padding; recorded now if need be."""
    sizes, times = buckets.sizes, []
    for size in sorted({sizes[bisect_left(sizes, min(size, sizes[-1]))] for size in MEASURED_SIZES}):
        buckets.record(size)
        graph = buckets.find(size)
        assert graph is not None
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(NUM_REPLAYS):
            run(graph)
        end.record()
        end.synchronize()
        times.append((size, begin.elapsed_time(end) / NUM_REPLAYS / 1e3))
    return tuple(times)
