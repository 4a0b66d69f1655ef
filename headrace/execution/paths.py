"""`StepPath`: the ways to compute a step. The runner takes the first, fastest first, that covers the step's features
and has room for its shape. Here are the plain path, which takes every step, and the fused one; those that replay CUDA
graphs are in ``graphs.py``.

T tokens, R requests, S sampled positions, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch

from headrace.execution.inputs import InputBuilder
from headrace.execution.proposing import Extension, Proposer
from headrace.execution.rows import Rows
from headrace.execution.step import Step, StepFeature
from headrace.execution.upload import Upload
from headrace.kernels.decoder_layers.table import FusedDecode
from headrace.kernels.verify.reference import entry_tokens
from headrace.layers.batch import AlignedTexts
from headrace.layers.model import ServedModel
from headrace.memory.page_tables import PageTables


@dataclass(slots=True)
class StepOutput:
    """What a path computed. ``logits`` [S, V] float32 may be overwritten by the reader; None if nothing is sampled from
    them. ``positions`` [S] int64: where they were computed; each predicts the token behind. ``greedy`` [3, S or more]
    int64: argmax ids, states and counts (`headrace.kernels.verify.ACCEPT`), which are already in the rows' state.
    ``hidden`` [T, D]: set at least where prompt logprobs or pooling need it. All may be overwritten by the next step's
    launch. ``propose`` makes drafts for the next step, given what was sampled (as ``greedy``, whoever sampled it); set
    where the step wants that. ``aligned``: of requests that ask which sound their tokens attend to. Empty in pipeline
    stages before the last."""

    logits: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    greedy: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    propose: Callable[[torch.Tensor], object] | None = None
    aligned: AlignedTexts | None = None


Sent = dict[str, torch.Tensor]
"""The step's upload on the device, by name."""

Launch = Callable[[Sent], StepOutput]
"""Computes a prepared step, once the page tables are up to date."""


class StepPath(Protocol):
    """One way to compute steps. ``covers``: the features a step may have. ``is_greedy_sampler``: for a greedy step the
    path computes the argmax itself, and the sampler is not called."""

    covers: StepFeature
    is_greedy_sampler: bool

    def prepare(self, step: Step, upload: Upload) -> Launch | None:
        """Add the path's inputs to the upload and return the launch; None, with nothing added, if the path cannot take
        the step's shape."""


class PlainPath:
    """Builds a batch and calls the model."""

    covers = ~StepFeature(0)
    is_greedy_sampler = False

    def __init__(self, model: ServedModel, inputs: InputBuilder, proposer: Proposer | None = None):
        self._model, self._inputs, self._proposer = model, inputs, proposer

    def prepare(self, step: Step, upload: Upload) -> Launch:
        """See `StepPath`."""
        self._inputs.pack(step, upload)
        if StepFeature.DRAFTING in step.features:
            firsts = step.batch.firsts
            upload.add("firsts", firsts)
            upload.add("drafted_rows", step.batch.rows[firsts])
        # Pruning gives hidden states [S, D]; prompt logprobs and pooling need [T, D].
        needs_hidden = step.features & (StepFeature.PROMPT_LOGPROBS | StepFeature.POOLING)
        is_pruned = self._model.prunes_last_layer and not needs_hidden and len(step.samples) < step.shape.num_tokens
        is_pruned = is_pruned and not step.plan.replica_tokens  # others know how many tokens each layer has
        is_pruned = is_pruned and (StepFeature.ADAPTERS not in step.features or self._inputs.prunes_adapters)
        # queries of both directions are among all of a step's
        is_pruned = is_pruned and not (step.plan.media.uses and self._inputs.media.is_whole)
        if is_pruned:
            upload.add("sample_requests", step.samples)
        return partial(self._launch, step, is_pruned)

    def _launch(self, step: Step, is_pruned: bool, sent: Sent) -> StepOutput:
        batch = self._inputs.build(step.shape, sent, step.samples if is_pruned else None)
        batch.replica_tokens = step.plan.replica_tokens
        if StepFeature.ADAPTERS in step.features and self._inputs.adapters is not None:
            batch.adapters = self._inputs.adapters.view(step, sent)
            if batch.wanted is not None and len(step.samples):
                batch.wanted.adapters = self._inputs.adapters.view_outputs(step, sent)
        if StepFeature.MEDIA in step.features:
            self._inputs.media.fill(batch, step, sent)
        if StepFeature.POOLING in step.features:
            batch.aligned = self._inputs.find_aligned(step.shape)
        is_drafting = StepFeature.DRAFTING in step.features
        if is_drafting and self._proposer is not None:
            batch.features = self._proposer.ask_features()
        hidden = self._model.forward(batch)
        if self._inputs.handover.pass_on(hidden):
            return StepOutput()
        output = StepOutput(positions=self._inputs.find_positions(sent), aligned=batch.aligned)
        if is_pruned:
            # hidden [S, D]: the sampled positions already
            with self._inputs.sampled_outputs(step, sent):
                output.logits = self._model.compute_logits(hidden) if len(step.samples) else None
        else:
            with self._inputs.sampled_outputs(step, sent):
                output.logits, output.hidden = compute_sampled_logits(self._model, hidden, step, sent), hidden
        if is_drafting and self._proposer is not None:
            features = hidden[:, :0] if batch.features is None else batch.features.values
            extension = Extension(
                batch, features, sent["drafted_rows"], sent["firsts"], sent["sample_tokens"], sent["following"],
                step.plan.num_proposals,
            )
            output.propose = partial(self._proposer.extend, extension)
        return output


class _DecodeArrays:
    """What a fused step of the same entries [2, R] reads and writes, step after step: the native call's tensors and
    numpy's views of them, as a call of torch takes longer than all that numpy does here.

    ``requests`` [3, R] and ``adapter_rows``, by ``slots`` [R]: see `FusedDecode`. ``tokens`` [3, R]: ids, states and
    counts, which are 1 without drafts; ``sampled`` are the first two."""

    def __init__(self, entries: np.ndarray, slots: np.ndarray):
        count, own = entries.shape[1], np.flatnonzero(slots >= 0)
        own = own[np.argsort(slots[own], kind="stable")]  # rows of one adapter share the reading of it
        self.adapter_rows = torch.from_numpy(np.stack((own, slots[own]))) if len(own) else None
        self.entries, self.rows = entries, entries[0]
        self.requests_np, tokens_np = np.empty((3, count), dtype=np.int64), np.ones((3, count), dtype=np.int64)
        self.requests_np[0] = entries[0]
        self.requests, self.tokens = torch.from_numpy(self.requests_np), torch.from_numpy(tokens_np)
        self.lengths_np, self.inputs_np, self.ids_np = self.requests_np[1], self.requests_np[2], tokens_np[0]
        self.sampled = self.tokens[:2]


class FusedPath:
    """Decodes alone, in one native call on a CPU that computes the argmax, too."""

    covers = StepFeature.SAMPLING | StepFeature.GRAMMAR | StepFeature.ADAPTERS
    is_greedy_sampler = True

    def __init__(self, model: ServedModel, rows: Rows, tables: PageTables):
        self._model, self._rows, self._tables = model, rows, tables
        self._arrays: _DecodeArrays | None = None  # of the latest step

    def prepare(self, step: Step, upload: Upload) -> Launch | None:
        """See `StepPath`; None until the native kernels are compiled and the weights packed for them."""
        fused = self._model.fuse_decode()
        if fused is None or (StepFeature.ADAPTERS in step.features and not fused.takes_adapters):
            return None
        return partial(self._launch, step, fused)

    def _launch(self, step: Step, fused: FusedDecode, sent: Sent) -> StepOutput:
        shape, rows, arrays = step.shape, self._rows, self._arrays
        # One memory on a CPU: lengths are exact, and the native call reads the page tables in place.
        assert rows.last_token_np is not None, "a fused path runs on a CPU"
        if arrays is None or arrays.entries is not shape.entries:
            arrays = self._arrays = _DecodeArrays(shape.entries, rows.adapter_slots_np[shape.rows])
        arrays.lengths_np[:] = shape.ends
        if shape.most_drafts:
            entries = torch.from_numpy(shape.entries)
            arrays.requests[2] = entry_tokens(entries[0], entries[1], rows.tensors)
        else:
            arrays.inputs_np[:] = rows.last_token_np[arrays.rows]
        sampled = arrays.sampled if step.is_greedy else None
        logits = fused.run(arrays.requests, self._tables.tensor, sampled, arrays.adapter_rows)
        if logits is not None:
            return StepOutput(logits, torch.from_numpy(shape.ends - 1))
        if shape.most_drafts:
            positions = torch.from_numpy(shape.ends - 1)
            return StepOutput(greedy=rows.accept(arrays.sampled, entries, positions, shape.most_drafts))
        rows.advance(arrays.rows, arrays.ids_np, shape.ends)
        return StepOutput(greedy=arrays.tokens)


def compute_sampled_logits(
    model: ServedModel, hidden: torch.Tensor, step: Step, sent: Sent
) -> torch.Tensor | None:
    """Logits [S, V] of the sampled positions among hidden states [T, D]; None where nothing is sampled."""
    return model.compute_logits(hidden.index_select(0, sent["sample_tokens"])) if len(step.samples) else None
