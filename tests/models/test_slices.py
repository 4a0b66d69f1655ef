"""Steps of ranks whose rows go through layers in slices: the model computes the same, and sums over ranks are under way
while the next slice is computed."""

from __future__ import annotations

import pytest
import torch
from family_cases import CASES, config_json, make_oracle, prompt
from harness import Harness, build_harness
from parallel.thread_group import ThreadGroup, on_all_ranks

from headrace.kernels.collective import BegunSum
from headrace.kernels.rowwise.reference import add_rms_norm
from headrace.layers.decoder import decoder
from headrace.parallel.group import Group
from headrace.parallel.limits import LEAST_SLICE_BYTES, SLICE_ROWS, slice_rows

SLICED = ("llama", "llama-tied-biased", "phi3-window-gqa", "starcoder2", "mixtral", "qwen3-moe-some-dense")
WHOLE = ("olmo2", "granite", "cohere", "gemma2", "deepseek-v3")
"""What is added to the residual is normalised or scaled before, or a kind of attention takes all rows at once."""


class Begun:
    """A sum under way: nothing may write its tensor, and sums are finished in their order."""

    def __init__(self, group: SlicingGroup, x: torch.Tensor):
        self._group, self._x, self._before = group, x, x.clone()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `BegunSum`."""
        assert x is self._x and torch.equal(x, self._before)
        assert self._group.begun.pop(0) is self
        return x.copy_(self._group.all_reduce(self._before))

    def reduce_add_norm(
        self, x: torch.Tensor, stream: torch.Tensor, weight: torch.Tensor, *, eps: float, offset: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `BegunSum`."""
        out, total = add_rms_norm(self.all_reduce(x), stream, weight, eps, offset)
        return x.copy_(out), total


class SlicingGroup(ThreadGroup):
    """``most``: of sums that were under way at once."""

    begun: list[Begun]
    most = num_begun = 0
    can_slice = True

    def begin_sum(self, x: torch.Tensor) -> BegunSum:
        """See `Group`."""
        if len(x) < 2:
            return self
        self.begun.append(Begun(self, x))
        self.num_begun, self.most = self.num_begun + 1, max(self.most, len(self.begun))
        return self.begun[-1]


def compute(harness: Harness) -> torch.Tensor:
    """Prompts, decodes and both, of all tokens and of those that are wanted."""
    first, second = harness.start(), harness.start()
    logits = harness.step((first, prompt(0, 5)), (second, prompt(1, 9)))
    logits += harness.step((first, [3]), (second, [4]))
    if harness.model.prunes_last_layer:
        logits += harness.step((first, [5]), (second, prompt(2, 8)), wanted=[0])
        logits += harness.step((first, [5]), (second, prompt(3, 8)), wanted=[])
    return torch.cat(logits)


def slice_in_three(num_rows: int, row_bytes: int) -> list[int]:
    return [num_rows // 3, num_rows // 3, num_rows - 2 * (num_rows // 3)] if num_rows > 3 else [num_rows]


@pytest.mark.parametrize("case", [*SLICED, *WHOLE])
def test_logits(case: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decoder, "slice_rows", slice_in_three)
    oracle = make_oracle(*CASES[case])
    config, weights = config_json(oracle), oracle.state_dict()
    expected = compute(build_harness(config, weights))

    def run(base: Group) -> tuple[torch.Tensor, int, int]:
        assert isinstance(base, ThreadGroup)
        group = SlicingGroup(base.rank, base.size, base._board, base._barrier)
        group.begun = []
        with torch.inference_mode():
            logits = compute(build_harness(config, weights, tensor=group))
        assert not group.begun, "all sums were finished"
        return logits, group.most, group.num_begun

    for logits, most, num_begun in on_all_ranks(2, run):
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)
        assert (most > 1) == (case in SLICED) and num_begun >= 2 * most


def test_large_steps_have_slices_of_whole_tiles():
    row = 8192
    least = 2 * LEAST_SLICE_BYTES // row
    assert slice_rows(least - 1, row) == [least - 1]
    assert slice_rows(least, row) == [least // 2] * 2
    for count in (least + 1, 5000, 8191, 8192, 100_000):
        lengths = slice_rows(count, row)
        assert len(lengths) == 2 and sum(lengths) == count
        assert lengths[0] % SLICE_ROWS == 0 and 0 < lengths[1] <= lengths[0] < lengths[1] + 2 * SLICE_ROWS
