"""The engine's quick import of torch: the same results, and a compiler's parts for whoever asks for them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headrace.service import torch_import


def run(code: str) -> str:
    """What a new interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


QUICK = "import sys; from headrace.service.torch_import import OMITTED, import_torch; import_torch(); import torch; "


def test_products_are_the_same():
    code = (
        "torch.manual_seed(1); x = torch.randn(9, 16); print((torch.nn.functional.silu(x) @ "
        "x.t()).double().sum().item())"
    )
    assert run(QUICK + code) == run("import torch; " + code)


def test_random_weights_can_be_drawn():
    code = (
        "from headrace.models.weights.dummy import fill_dummy_weights; m = torch.nn.Linear(3, 2); "
        "fill_dummy_weights(m, 1); print(m.weight.sum().item())"
    )
    assert run(QUICK + code) == run("import torch; " + code)


def test_random_numbers_are_the_same():
    code = (
        "g = torch.Generator().manual_seed(3); print(torch.rand(3, generator=g).tolist(), torch.randperm(9, "
        "generator=g).tolist())"
    )
    assert run(QUICK + code) == run("import torch; " + code)


@pytest.mark.skipif(not torch_import._find_omitted(), reason="here torch is imported whole")
def test_what_was_omitted_is_not_there_until_it_is_asked_for():
    code = (
        "before = [n in sys.modules for n in OMITTED]; import torch._dynamo; print(any(before), all(n in sys.modules "
        "for n in OMITTED))"
    )
    assert run(QUICK + code) == "False True"


def test_fake_tensors_and_export_work_afterwards():
    code = (
        "m = torch.nn.Linear(3, 2); e = torch.export.export(m, (torch.ones(1, 3),)); "
        "print(torch.equal(e.module()(torch.ones(1, 3)), m(torch.ones(1, 3))))"
    )
    assert run(QUICK + code) == "True"


def test_distributions_are_there_for_whoever_takes_them():
    code = (
        "print(torch.distributions.Normal(0.0, 1.0).log_prob(torch.tensor(0.5)).item(), hasattr(torch, "
        "'no_such_thing'))"
    )
    assert run(QUICK + code) == run("import torch; " + code)


def test_unknown_versions_are_imported_whole(monkeypatch):
    monkeypatch.setattr(torch_import, "version", lambda _: "9.9.0")
    assert not torch_import._find_omitted()


@pytest.mark.parametrize("number", ["2.11.0+cu130", "2.12.1", "2.13.0+cpu"])
def test_gpus_keep_what_torch_has_for_them_and_unknown_devices_everything(monkeypatch, tmp_path, number):
    monkeypatch.setattr(torch_import, "version", lambda _: number)
    monkeypatch.setattr(torch_import, "UNKNOWN_DEVICES", ())
    monkeypatch.setattr(torch_import, "GPUS", ())
    without = torch_import._find_omitted()
    assert without[: len(torch_import.OMITTED)] == list(torch_import.OMITTED)
    monkeypatch.setattr(torch_import, "GPUS", (str(tmp_path),))
    assert torch_import._find_omitted() == [name for name in without if name != torch_import.GPU_KERNELS]
    monkeypatch.setattr(torch_import, "UNKNOWN_DEVICES", (str(tmp_path),))
    assert not torch_import._find_omitted()
