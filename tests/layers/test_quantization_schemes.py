"""The registry of quantization schemes: idempotent, lazy, chained by priority (lower is inner), and honest about
failures."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from headrace.base.errors import ConfigError, PluginError, WeightError
from headrace.base.quantization import CHECKPOINT_METHODS, MADE_AT_LOAD
from headrace.layers.quantization import SCHEMES, SchemeQuery, StoredAs, chain_schemes
from headrace.layers.quantization.contract import Named

SITE = '''
from headrace.layers.quantization.contract import SchemeQuery


class Mark:
    """Says on each tensor's name through whom it went."""

    plugin_api = 1
    mark = "?"

    def __init__(self, query):
        pass

    def read(self, tensors):
        return ((f"{name}>{self.mark}", tensor) for name, tensor in tensors)

    def finish(self, model):
        model.finished.append(self.mark)


class Inner(Mark):
    mark = "inner"


class Outer(Mark):
    mark = "outer"


class Acme(Mark):
    mark = "acme"


class Old(Mark):
    plugin_api = 0
'''


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The registry as it is, given back as it was, and a module with schemes to add."""
    for name in ("_entries", "_loaded", "_failures"):
        monkeypatch.setattr(SCHEMES, name, dict(getattr(SCHEMES, name)))
    (tmp_path / "marking_schemes.py").write_text(SITE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("marking_schemes", None)


def serves_x(query: SchemeQuery) -> str | None:
    return None if query.wanted == "x" else "serves x alone"


def names_after(chain: Iterable[Named]) -> list[str]:
    return [name for name, _ in chain]


def test_lower_priority_is_inner_whatever_the_order_of_registration(registry: None):
    SCHEMES.add("outer", "marking_schemes:Outer", supports=serves_x, priority=120)
    SCHEMES.add("inner", "marking_schemes:Inner", supports=serves_x, priority=110)
    SCHEMES.add("x", "marking_schemes:Mark", supports=serves_x, priority=130)
    assert "marking_schemes" not in sys.modules, "lazy"
    chain = chain_schemes(SchemeQuery(wanted="x"))
    assert chain.names == ("scaled_fp8", "mxfp4", "inner", "outer", "x")
    assert names_after(chain.read([("w", torch.ones(1))])) == ["w>inner>outer>?"]
    model = nn.Module()
    model.finished = []
    chain.finish(model)
    assert model.finished == ["inner", "outer", "?"]


def test_adding_twice_changes_nothing_and_another_under_the_same_name_is_refused(registry: None):
    before = SCHEMES.names()
    SCHEMES.add("scaled_fp8", SCHEMES.entry("scaled_fp8").target, priority=10)
    assert SCHEMES.names() == before
    with pytest.raises(PluginError, match="already registered"):
        SCHEMES.add("scaled_fp8", "marking_schemes:Mark")


@pytest.mark.parametrize(("query", "said"), [
    (SchemeQuery(stored="vptq"), "quant_method is 'vptq'.*known are .*awq.*gptq"),
    (
        SchemeQuery(wanted="int3"),
        "quantization 'int3' cannot be had here: known are fp8, int4, int8, w8a8, none and stored"
    ),
    (SchemeQuery(wanted="mxfp4"), "form of checkpoints.* this one states none"),
    (SchemeQuery(wanted="scaled_fp8", stored="mxfp4"), "reads fp8 and fbgemm_fp8 and mxfp8, not mxfp4"),
])
def test_what_nobody_serves_is_named(query: SchemeQuery, said: str):
    with pytest.raises(ConfigError, match=said):
        chain_schemes(query)


def test_a_broken_scheme_is_left_out_unless_it_is_needed(registry: None, caplog: pytest.LogCaptureFixture):
    SCHEMES._entries.pop("scaled_fp8")
    SCHEMES._loaded.pop("scaled_fp8", None)
    SCHEMES.add(
        "scaled_fp8", "a_module_that_is_not_there:Scheme", supports=lambda q: None if q.stored in ("", "fp8") else "no",
        priority=10
    )
    with caplog.at_level(logging.WARNING):
        assert chain_schemes(SchemeQuery()).names == ("mxfp4",)
    assert "scaled_fp8" in caplog.text and "a_module_that_is_not_there" in caplog.text
    for _ in range(2):
        with pytest.raises(PluginError, match="a_module_that_is_not_there") as caught:
            chain_schemes(SchemeQuery(stored="fp8"))
        assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_an_installed_package_adds_a_scheme(registry: None, tmp_path: Path):
    info = tmp_path / "acme_schemes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-schemes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[headrace.schemes]\nacme = marking_schemes:Acme\nacme_old = marking_schemes:Old\n"
    )
    assert (
        names_after(chain_schemes(SchemeQuery()).read([("w", torch.ones(1))])) == ["w"]
        and "marking_schemes" not in sys.modules
    )
    for query in (SchemeQuery(stored="acme"), SchemeQuery(wanted="acme")):
        assert names_after(chain_schemes(query).read([("w", torch.ones(1))])) == ["w>acme"]
    with pytest.raises(PluginError, match="acme_old' was made for plug-in API 0"):
        chain_schemes(SchemeQuery(stored="acme_old"))


def test_scales_meet_weights_of_their_own_form_across_the_chain():
    """A scale that comes first is held by the first scheme, and handed on when it meets a weight of another form."""
    codes, exponents = torch.full((2, 16), 0x22, dtype=torch.int8), torch.full((2, 1), 128, dtype=torch.uint8)
    pairs = [
        ("m.scale", exponents), ("f.scale", torch.full((1, 1), 4.0)), ("m.weight", codes),
        ("f.weight", torch.ones(3, 3).to(torch.float8_e4m3fn))
    ]
    read = dict(chain_schemes(SchemeQuery(stored="fp8")).read(pairs))
    assert (
        torch.equal(read["m.weight"], torch.full((2, 32), 2.0).bfloat16())
        and torch.equal(read["f.weight"], torch.full((3, 3), 4.0))
    )
    with pytest.raises(WeightError, match="m"):
        list(chain_schemes(SchemeQuery()).read([("m.weight", codes)]))


def test_the_names_that_the_option_takes_are_those_of_the_registry():
    """The option is checked where the registry cannot be imported."""
    methods = {m for entry in SCHEMES if isinstance(entry.supports, StoredAs) for m in entry.supports.methods}
    readers = {entry.name for entry in SCHEMES if isinstance(entry.supports, StoredAs)}
    own = {entry.name for entry in SCHEMES if not entry.is_out_of_tree} - readers
    assert own == set(MADE_AT_LOAD)
    assert methods | readers == {*CHECKPOINT_METHODS, *MADE_AT_LOAD} & (methods | readers)
    assert set(CHECKPOINT_METHODS) <= methods | readers
