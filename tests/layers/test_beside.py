"""Work beside other work: in order unless a step is captured, and then with the same values."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from headrace.execution.captures import Recorder
from headrace.layers.beside import Beside

WIDTH, LAYERS = 256, 12


def test_is_done_in_order_without_a_capture():
    done: list[str] = []
    finish = Beside(torch.device("cpu")).begin(lambda: done.append("beside"))
    done.append("main")
    finish()
    assert done == ["main", "beside"]


@pytest.mark.cuda
def test_captured_branches_give_what_they_give_in_order():
    """Branches of several layers use each other's memory again, between products that take longer on either side."""
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    beside = Beside(device)
    weights = torch.randn(2 * LAYERS, WIDTH, WIDTH, device=device) / WIDTH**0.5
    stream = torch.randn(64, WIDTH, device=device)

    def run() -> torch.Tensor:
        x = stream.clone()
        for layer in range(LAYERS):
            long, short = (layer % 2, 1 - layer % 2) if layer % 3 else (1, 1)
            normed = torch.nn.functional.layer_norm(x, (WIDTH,))
            later = beside.begin(partial(multiply, normed, weights[2 * layer], long))
            own = multiply(normed, weights[2 * layer + 1], short)
            x = own + later()
            del normed, later, own
        return x

    def multiply(x: torch.Tensor, weight: torch.Tensor, is_long: int) -> torch.Tensor:
        for _ in range(20 if is_long else 1):
            x = torch.tanh(x @ weight)
        return x

    expected = run()
    replay = Recorder(device).record(run)
    assert replay is not None
    for _ in range(3):
        assert torch.equal(replay(), expected)
    stream.normal_()
    expected = run()
    assert torch.equal(replay(), expected)
