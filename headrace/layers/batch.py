"""`ForwardBatch`: the device tensors of one step, built by ``execution/inputs`` and read by every layer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from headrace.layers.attention.contract import AttentionBackend, AttentionInputs


@dataclass(slots=True)
class GroupStep:
    """A cache group in this step: its inputs, and its backend, which is prepared with them."""

    inputs: AttentionInputs
    backend: AttentionBackend


@dataclass(slots=True)
class WantedTokens:
    """The S tokens of a step whose hidden states are needed, at most the last one of each request: ``indices`` [S]
    int64 among the T. ``inputs[g]`` describes only their queries, each a decode, to cache group g; its ``slots`` are
    still those of all T tokens, whose keys and values are written in any case."""

    indices: torch.Tensor
    inputs: list[AttentionInputs]


@dataclass(slots=True)
class StepContext:
    """Gives layers access to the current step's batch. A model has one, made with its `Build`, and sets ``batch`` when
    its ``forward`` begins; layers keep a reference to the context and read it during a forward.

    One forward at a time may run over a model, by one runner or by several in turn. A captured graph reads the batch
    of its capture, whose tensors are refilled in place; replays run no Python and need nothing here.
    """

    batch: ForwardBatch = field(init=False)


@dataclass(slots=True)
class ForwardBatch:
    """T tokens of R requests. ``token_ids`` [T] int64, ``positions`` [T] int64, both on the device. ``groups[g]`` is
    cache group g, as numbered by the layout. ``lengths`` [R] are the requests' tokens in this step, on the host;
    ``text_kinds`` [T] int64: which text of a pair each token belongs to (None: all to the first). Only models without
    cache groups read these two. ``wanted``: for models with ``prunes_last_layer``, which then return hidden states
    [S, D]; in their last layer, ``queries`` [S] int64 are the indices of the tokens that still attend."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    groups: list[GroupStep]
    lengths: list[int] = field(default_factory=list)
    text_kinds: torch.Tensor | None = None
    wanted: WantedTokens | None = None
    queries: torch.Tensor | None = None

    def for_last_layer(self, group: int) -> ForwardBatch:
        """The batch in which the last layer, of cache group ``group``, attends for the wanted tokens only.

        Side effect: prepares the group's backend again. Earlier layers of the group must have attended before, and no
        layer may use the original batch afterwards."""
        if self.wanted is None:
            return self
        step = GroupStep(self.wanted.inputs[group], self.groups[group].backend)
        step.backend.prepare(step.inputs)
        # token_ids and positions keep all T tokens: the last layer still writes keys and values for each of them
        groups = [step if g == group else other for g, other in enumerate(self.groups)]
        return replace(self, groups=groups, queries=self.wanted.indices)
