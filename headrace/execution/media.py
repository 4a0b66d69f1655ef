"""`MediaState`: encoder outputs on the device, and what rows with media are rotated by. T tokens, N placeholders.

Refuses: deciding what is encoded or forgotten; plans say that.
"""

from __future__ import annotations

import numpy as np
import torch

from headrace.base.media import MediaPlace
from headrace.base.step import Encode, MediaPlan, MediaUse, RowStart
from headrace.execution.rows import HAS_MEDIA, HAS_ROPE_OFFSET, Rows
from headrace.execution.step import Step, StepFeature, StepShape
from headrace.execution.upload import Upload
from headrace.layers.attention.contract import MediaBlock
from headrace.layers.batch import ForwardBatch, MediaVectors
from headrace.layers.media import CapturedVectors, EncoderInput, InPieces, finish
from headrace.layers.model import ServedModel
from headrace.memory.copies import copy_to_device


class StaticMedia:
    """Inputs for media of captured steps of at most ``most`` tokens: ``vectors`` [most, W], zero except where ``mask``
    [most, 1] is set; and ``axes`` [3, most] int64, the positions for rotary embedding of models with several axes. The
    stream orders writes behind the steps that read them."""

    def __init__(self, most: int, room: CapturedVectors, device: torch.device):
        self.vectors = torch.zeros((most, room.size), dtype=room.dtype, device=device)
        self.mask = torch.zeros((most, 1), dtype=torch.bool, device=device)
        self.axes = torch.zeros((3, most), dtype=torch.int64, device=device)

    def write(self, size: int, indices: torch.Tensor | None, vectors: list[torch.Tensor]) -> None:
        """Put vectors [N, W] in the places ``indices`` [N] of a step captured for ``size`` tokens."""
        self.vectors[:size].zero_()
        self.mask[:size].zero_()
        if indices is not None:
            self.vectors.index_copy_(0, indices, torch.cat(vectors))
            self.mask.index_fill_(0, indices, True)


class _Batch:
    """Media that are encoded over several steps; see `MediaPlan`."""

    def __init__(self, encodes: list[Encode], pieces: InPieces[list[torch.Tensor]]):
        self.encodes, self._pieces = encodes, pieces
        self.keys = {each.key for each in encodes}
        self.outputs: list[torch.Tensor] = []

    def advance(self, num_pieces: int) -> bool:
        """Compute so many pieces; returns whether these were the last."""
        for _ in range(num_pieces):
            try:
                next(self._pieces)
            except StopIteration as end:
                self.outputs = end.value
                return True
        return False


class MediaState:
    """State of one runner. ``offsets`` [max_rows + 1] int64 is added to positions of output tokens to find what these
    are rotated by; None for models whose tokens have one position each."""

    def __init__(self, model: ServedModel, rows: Rows):
        self._model, self._rows = model.media, rows
        self._rope_length = 0 if model.media is None else model.media.rope_length
        device = rows.tensors.last_token.device
        self._device = device
        self._outputs: dict[int, torch.Tensor] = {}
        self._positions: dict[int, np.ndarray] = {}  # by row, [3, prompt_len + 1], of rows with media
        self._places: dict[int, list[MediaPlace]] = {}
        self._static: StaticMedia | None = None
        self._batch: _Batch | None = None
        self.offsets: torch.Tensor | None = None
        if self._rope_length:
            self.offsets = torch.zeros(rows.tensors.last_token.shape[0], dtype=torch.int64, device=device)

    def start(self, starts: list[RowStart], upload: Upload) -> None:
        """Rows were started: find positions of prompts with media."""
        offsets = []
        for start in starts:
            row, offset = start.row, 0
            self._positions.pop(row, None)
            self._places.pop(row, None)
            self._rows.media_end_np[row] = max((place.end for place in start.media), default=0)
            if start.media:
                self._rows.flags_np[row] |= HAS_MEDIA
                self._places[row] = start.media
                if self.offsets is not None and self._model is not None:
                    # one more than the prompt has: output goes on from there
                    found = self._positions[row] = self._model.find_positions(start.prompt_len + 1, start.media)
                    offset = int(found[0, -1]) - start.prompt_len
                    self._rows.flags_np[row] |= HAS_ROPE_OFFSET
            offsets.append(offset)
        if self.offsets is not None and starts:
            upload.add("offset_rows", [start.row for start in starts])
            upload.add("offsets_of_rows", offsets)

    def apply(self, sent: dict[str, torch.Tensor]) -> None:
        """Write what `start` has added to the upload."""
        if "offset_rows" in sent and self.offsets is not None:
            self.offsets.index_copy_(0, sent["offset_rows"], sent["offsets_of_rows"])

    def encode(self, plan: MediaPlan) -> None:
        """Compute pieces of the batch under way, then what is encoded whole, all in one call."""
        is_continued = plan.num_pieces > 0 and not plan.begun
        if self._batch is not None and not is_continued and not self._batch.keys.isdisjoint(plan.drops):
            self._batch = None  # nobody waits for it any more
        if plan.begun:
            assert self._batch is None, "one batch at a time"
            self._batch = _Batch(plan.begun, self._start(plan.begun))
        if self._batch is not None and self._batch.advance(plan.num_pieces):
            self._keep(self._batch.encodes, self._batch.outputs)
            self._batch = None
        if plan.encodes:
            self._keep(plan.encodes, finish(self._start(plan.encodes)))

    def _start(self, encodes: list[Encode]) -> InPieces[list[torch.Tensor]]:
        assert self._model is not None, "media for a model that takes text alone"
        return self._model.encode([EncoderInput(each.item.place, self._send(each)) for each in encodes])

    def _keep(self, encodes: list[Encode], outputs: list[torch.Tensor]) -> None:
        for each, vectors in zip(encodes, outputs, strict=True):
            assert len(vectors) == each.item.place.num_tokens, "as many vectors as placeholders"
            self._outputs[each.key] = vectors.clone()  # a view would keep the outputs of the whole call alive

    def _send(self, each: Encode) -> dict[str, torch.Tensor]:
        arrays = {}
        for name, array in each.item.arrays.items():
            arrays[name] = copy_to_device(np.frombuffer(array.data, array.dtype).reshape(array.shape), self._device)
        return arrays

    def drop(self, keys: list[int]) -> None:
        """Forget outputs; steps that read them are in flight at most, and their memory is used again behind them."""
        for key in keys:
            self._outputs.pop(key, None)

    def reset(self) -> None:
        """Forget all outputs, and what is under way."""
        self._outputs.clear()
        self._batch = None

    def pack(self, step: Step, upload: Upload) -> None:
        """Add the places of placeholders, and the positions of a step with rows with media."""
        shape = step.shape
        if step.plan.media.uses:
            upload.add("media_indices", np.concatenate([p for p, _ in self._find(step)]))
        if self.offsets is not None and StepFeature.MEDIA in step.features:
            upload.add("axes", self._find_axes(shape).ravel())

    def fill(self, batch: ForwardBatch, step: Step, sent: dict[str, torch.Tensor]) -> None:
        """Give a batch the vectors of its placeholders, and positions in three axes where it needs them."""
        if step.plan.media.uses:
            batch.media = MediaVectors(
                sent["media_indices"], torch.cat(self._collect(step)), self._find_blocks(step)
            )
        if "axes" in sent and batch.rope_positions is not None:
            batch.rope_positions = _with_decodes(sent["axes"], batch.rope_positions, step)

    def make_static(self, most: int) -> bool:
        """Make room for captured steps with media of at most ``most`` tokens; False where there are none."""
        room = None if self._model is None else self._model.captured
        if room is None or not most:
            return False
        self._static = StaticMedia(most, room, self._device)
        return True

    def fill_static(self, step: Step, sent: dict[str, torch.Tensor], rotated_by: torch.Tensor, size: int) -> None:
        """`fill` for a step that was captured for ``size`` tokens; ``rotated_by`` [T or more] is that of decodes."""
        static = self._static
        assert static is not None, "make_static comes first"
        static.write(size, sent.get("media_indices"), self._collect(step))
        if "axes" in sent:
            static.axes[:, : step.shape.num_tokens] = _with_decodes(sent["axes"], rotated_by, step)

    def view_static(self, batch: ForwardBatch, size: int) -> None:
        """Let a batch of ``size`` tokens, which is captured, read what `fill_static` writes."""
        static = self._static
        assert static is not None, "make_static comes first"
        batch.media = MediaVectors(None, static.vectors[:size], mask=static.mask[:size])
        if self.offsets is not None:
            batch.rope_positions = static.axes[:, :size]

    def _collect(self, step: Step) -> list[torch.Tensor]:
        """The vectors of the step's placeholders, in the order of its uses."""
        return [self._outputs[key][begin:end] for _, slices in self._find(step) for key, begin, end in slices]

    def find_positions(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """Rotary positions of the tokens at ``positions`` [T] of ``rows`` [T], outside of prompts with media."""
        if self.offsets is None:
            return None
        # Offsets are below 0, and those of output are no positions of the prompt before it. What is found for the
        # latter is not used, but stays as padding of later captured steps, which read the table there.
        found = positions + self.offsets.index_select(0, rows)
        return found.clamp_(0, self._rope_length - 1)

    def _find(self, step: Step) -> list[tuple[np.ndarray, list[tuple[int, int, int]]]]:
        """For each use: the step's tokens that are placeholders, and the slices ``(key, begin, end)`` of vectors that
        they take."""
        shape, found = step.shape, []
        number_of = {int(row): i for i, row in enumerate(shape.rows)}
        for use in step.plan.media.uses:
            i = number_of[use.row]
            begin, end = int(shape.begins[i]), int(shape.ends[i])
            found.append(self._find_one(use, begin, end, int(shape.query_start[i])))
        return found

    def _find_one(
        self, use: MediaUse, begin: int, end: int, first: int
    ) -> tuple[np.ndarray, list[tuple[int, int, int]]]:
        places, slices, number = [], [], 0
        for offset, count in self._places[use.row][use.index].runs:
            low, high = max(begin, offset), min(end, offset + count)
            if low < high:
                places.append(np.arange(low, high) - begin + first)
                slices.append((use.key, number + low - offset, number + high - offset))
            number += count
        return np.concatenate(places), slices

    @property
    def is_whole(self) -> bool:
        """Whether the placeholders of an item attend to one another in both directions."""
        return self._model is not None and self._model.is_whole

    def _find_blocks(self, step: Step) -> list[MediaBlock]:
        """One for each run of placeholders that the step computes."""
        if not self.is_whole:
            return []
        shape, blocks = step.shape, []
        number_of = {int(row): i for i, row in enumerate(shape.rows)}
        for use in step.plan.media.uses:
            i = number_of[use.row]
            begin, first = int(shape.begins[i]), int(shape.query_start[i])
            for offset, count in self._places[use.row][use.index].runs:
                low, end = max(begin, offset), offset + count
                if low < end <= int(shape.ends[i]):
                    blocks.append(MediaBlock(i, first + low - begin, end - low, end))
        return blocks

    def _find_axes(self, shape: StepShape) -> np.ndarray:
        """[3, T]: positions of the prefill's tokens; 0 for decodes, whose positions the device knows."""
        axes = np.zeros((3, shape.num_tokens), dtype=np.int64)
        for i in range(shape.num_decodes, len(shape.rows)):
            begin, end, first = int(shape.begins[i]), int(shape.ends[i]), int(shape.query_start[i])
            plain, known = np.arange(begin, end), self._positions.get(int(shape.rows[i]))
            if known is None:
                axes[:, first : first + end - begin] = plain
                continue
            inside = known[:, begin : min(end, known.shape[1])]
            axes[:, first : first + inside.shape[1]] = inside
            offset = int(known[0, -1]) - (known.shape[1] - 1)
            axes[:, first + inside.shape[1] : first + end - begin] = plain[inside.shape[1] :] + offset
        return np.minimum(axes, self._rope_length - 1)


def _with_decodes(axes: torch.Tensor, rotated_by: torch.Tensor, step: Step) -> torch.Tensor:
    """Axes [3 * T] of a step as [3, T], in which decodes, which come first, are rotated by what the device knows."""
    found, count = axes.view(3, -1), step.shape.num_decodes
    found[:, :count] = rotated_by[:count]
    return found
