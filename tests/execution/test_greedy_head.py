"""Argmax ids among ranks that have the logits of some tokens each: those of one rank that has all."""

from __future__ import annotations

import pytest
import torch
from parallel.thread_group import on_all_ranks

from headrace.execution.sampling import GreedyHead
from headrace.layers.build import Build
from headrace.layers.model import ServedModel
from headrace.layers.vocabulary import Head
from headrace.parallel.cut import cut_of
from headrace.parallel.group import Group

CPU = torch.device("cpu")
VOCAB, WIDTH = 101, 16


class HeadAlone(ServedModel):
    """A model of nothing but a head."""

    def __init__(self, group: Group):
        super().__init__()
        self.head = Head(Build(CPU, torch.float32, tensor=group), VOCAB, WIDTH, divisor=2.0, softcap=3.0)
        whole = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(0))
        whole[77] = whole[5]  # two tokens of different ranks that are alike
        with torch.no_grad():
            self.head.weight.copy_(cut_of(self.head.weight).keep(whole))

    @property
    def divided_head(self) -> Head | None:
        """See `ServedModel`."""
        return None if self.head.group.is_single else self.head

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `ServedModel`."""
        return self.head(hidden)


@pytest.mark.parametrize("size", [2, 3])
@torch.inference_mode()
def test_ids_and_logits_are_those_of_one_rank(size: int):
    model = HeadAlone(Group())
    hidden = torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(1))
    hidden[3], hidden[4, 0] = 0.5 * model.head.weight[5], float("nan")
    alone = GreedyHead(model, CPU)
    logits, sampled = alone.compute(hidden)
    assert sampled[0, 3] == 5 and sampled[1].tolist() == [0] * 4 + [1] + [0] * 15
    assert alone.gather(logits) is logits

    def run(group: Group) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with torch.inference_mode():
            head = GreedyHead(HeadAlone(group), CPU)
            own, found = head.compute(hidden)
            return own, found, head.gather(own[:7])

    for own, found, gathered in on_all_ranks(size, run):
        assert own.shape[1] < VOCAB
        assert torch.equal(found[1], sampled[1])
        finite = sampled[1] == 0
        assert torch.equal(found[0, finite], sampled[0, finite])
        torch.testing.assert_close(gathered, logits[:7], equal_nan=True)
