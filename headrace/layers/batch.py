"""`ForwardBatch`: the device tensors of one step, built by ``execution/inputs`` and read by every layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from headrace.base.pooling import Alignment
from headrace.kernels.lora import SlotRows
from headrace.layers.attention.contract import AttentionBackend, AttentionInputs, MediaBlock
from headrace.layers.residual import Residual


@dataclass(slots=True)
class GroupStep:
    """A cache group in this step: its inputs, and its backend, which is prepared with them."""

    inputs: AttentionInputs
    backend: AttentionBackend


@dataclass(slots=True)
class WantedTokens:
    """The S tokens of a step whose hidden states are needed, at most the last one of each request: ``indices`` [S]
    int64 among the T. ``inputs[g]`` describes only their queries, each a decode, to cache group g; its ``slots`` are
    still those of all T tokens, whose keys and values are written in any case. ``adapters``: which of
    them have which adapter, None where none has."""

    indices: torch.Tensor
    inputs: list[AttentionInputs]
    adapters: SlotRows | None = None


@dataclass(frozen=True)
class FeatureSpec:
    """Which hidden states of a target model a drafter reads. ``layers``: layers whose input is read, numbered from 0:
    the residual stream that enters them, with the output of the branch before added; for a model of n layers, n is
    what enters the final norm. ``has_final``: the states after the final norm are read too, behind those. ``streams``:
    how many parallel streams a layer's input has, all of which are read."""

    layers: tuple[int, ...] = ()
    has_final: bool = False
    streams: int = 1

    @property
    def count(self) -> int:
        """Hidden states per token."""
        return len(self.layers) * self.streams + self.has_final

    def needs_last_layer(self, num_layers: int) -> bool:
        """Whether the last layer must be computed for all tokens."""
        return self.has_final or num_layers in self.layers


@dataclass(slots=True)
class Features:
    """Asks a forward to copy hidden states: it sets ``values`` [T, spec.count * D] in the model's dtype, of all T
    tokens whatever ``ForwardBatch.wanted`` says. In a captured graph every replay writes that tensor again: ``out``, if
    that is given. ``write_sum`` is a kernel of `headrace.kernels.rowwise.WRITE_SUM`."""

    spec: FeatureSpec
    write_sum: Callable[[torch.Tensor | None, torch.Tensor, torch.Tensor], None]
    out: torch.Tensor | None = None
    values: torch.Tensor = field(init=False)

    def begin(self, x: torch.Tensor) -> None:
        """Make room, for embedded tokens ``x`` [T, D]."""
        self.values = x.new_empty(len(x), self.spec.count * x.shape[1]) if self.out is None else self.out

    def take(self, layer: int, residual: Residual) -> None:
        """Copy what enters ``layer``, if it is read. The residual stays as it is, so that the model computes the same
        numbers with and without a drafter."""
        if layer in self.spec.layers:
            residual.gather()
            for place, wanted in enumerate(self.spec.layers):
                if wanted == layer:
                    self.write_sum(residual.pending, residual.stream, self._column(place))

    def take_final(self, hidden: torch.Tensor) -> None:
        """Copy the states after the final norm [T, D], if they are read."""
        if self.spec.has_final:
            self._column(self.spec.count - 1).copy_(hidden)

    def _column(self, place: int) -> torch.Tensor:
        """The view [T, D] of one hidden state."""
        return self.values.unflatten(1, (self.spec.count, -1))[:, place]


@dataclass(slots=True)
class StepContext:
    """Gives layers access to the current step's batch. A model has one, made with its `Build`, and sets ``batch`` when
    its ``forward`` begins; layers keep a reference to the context and read it during a forward.

    One forward at a time may run over a model, by one runner or by several in turn. A captured graph reads the batch
    of its capture, whose tensors are refilled in place; replays run no Python and need nothing here.

    ``output_rows``: which of the rows that a head or classifier is called with next have which adapter; None where none
    has. Set by who calls it.
    """

    batch: ForwardBatch = field(init=False)
    output_rows: SlotRows | None = None


@dataclass(slots=True)
class MediaVectors:
    """Encoder outputs of a step: ``vectors`` [N, W] take the places ``indices`` [N] int64 among the T tokens. W is the
    hidden size, or several times that for models that add further parts behind their first layers. ``blocks``: tokens
    that attend in both directions. In a captured step, which has room for any number of placeholders, ``indices`` is
    None, ``vectors`` [T, W] are zero but where ``mask`` [T, 1] says that a placeholder is."""

    indices: torch.Tensor | None
    vectors: torch.Tensor
    blocks: list[MediaBlock] = field(default_factory=list)
    mask: torch.Tensor | None = None

    def replace_embeddings(self, x: torch.Tensor) -> torch.Tensor:
        """Embeddings [T, D] with the vectors in their places; ``x`` may be overwritten."""
        part = self.vectors[:, : x.shape[1]]
        if self.indices is not None:
            return x.index_copy_(0, self.indices, part)
        assert self.mask is not None, "a captured step has one"
        return torch.where(self.mask, part, x)

    def add_part(self, number: int, x: torch.Tensor) -> None:
        """Add part ``number`` of the vectors, each of D elements, to x [T, D], in place."""
        part = self.vectors[:, number * x.shape[1] : (number + 1) * x.shape[1]]
        if self.indices is None:
            x.add_(part)
        else:
            x.index_add_(0, self.indices, part)


@dataclass(slots=True)
class AlignedTexts:
    """Asks a forward how much tokens attend to sound: of the step's ``requests``, in the heads of ``alignments``. It
    adds to ``weights[i]``, of the tokens of request i behind its window, [heads, tokens, positions] float32 by layer;
    nothing where none of them is in the step."""

    requests: list[int]
    alignments: list[Alignment]
    weights: list[list[torch.Tensor]]


@dataclass(slots=True)
class ForwardBatch:
    """T tokens of R requests. ``token_ids`` [T] int64, ``positions`` [T] int64, both on the device. ``groups[g]`` is
    cache group g, as numbered by the layout. ``lengths`` [R] are the requests' tokens in this step, on the host;
    ``text_kinds`` [T] int64: which text of a pair each token belongs to (None: all to the first). Only models without
    cache groups read these two. ``wanted``: for models with ``prunes_last_layer``, which then return hidden states
    [S, D]; in their last layer, ``queries`` [S] int64 are the indices of the tokens that still attend.
    ``features``: hidden states to copy for a drafter, for models with ``captures_features``. ``carried`` [T, W]: what
    the pipeline stage before computed, in the model's dtype; None in the first stage.
    ``replica_tokens``: how many tokens each of the replicas that divide experts has in this step; empty where only
    this one is concerned. ``adapters``: which of the T tokens have which adapter; None where none has.
    ``media``: encoder outputs in place of embeddings. ``rope_positions``: what is rotated by in place of ``positions``,
    [T] int64, or [3, T] where tokens have positions in time, height and width. ``rotations`` [T, E] float32: rows of
    cosines and sines made of the latter, of which ``rope_positions`` then are the numbers. ``aligned``: for models that
    attend to sound."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    groups: list[GroupStep]
    lengths: list[int] = field(default_factory=list)
    text_kinds: torch.Tensor | None = None
    wanted: WantedTokens | None = None
    queries: torch.Tensor | None = None
    features: Features | None = None
    carried: torch.Tensor | None = None
    replica_tokens: list[int] = field(default_factory=list)
    adapters: SlotRows | None = None
    media: MediaVectors | None = None
    rope_positions: torch.Tensor | None = None
    rotations: torch.Tensor | None = None
    aligned: AlignedTexts | None = None

    def select_queries(self, q: torch.Tensor) -> torch.Tensor:
        """The rows of ``q`` [T, ...] that still attend, [S, ...]; from here on the layer has these rows only."""
        if self.queries is None:
            return q
        self.adapters = None if self.wanted is None else self.wanted.adapters
        return q.index_select(0, self.queries)

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
