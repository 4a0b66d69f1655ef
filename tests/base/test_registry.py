"""`Registry`: lazy, exact about failures, choosing by capability and priority."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace.base.errors import PluginError
from headrace.base.registry import Registry


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    (tmp_path / "plugin_good.py").write_text("VALUE = 'good'\nOTHER = 'other'\n")
    (tmp_path / "plugin_bad.py").write_text("raise KeyError('no such thing')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("plugin_good", "plugin_bad"):
        sys.modules.pop(name, None)
    return Registry("plug-in")


def test_nothing_is_imported_before_it_is_asked_for(registry: Registry):
    registry.add("bad", "plugin_bad:VALUE", priority=5)
    registry.add("good", "plugin_good:VALUE")
    assert registry.names() == ["bad", "good"]
    assert "plugin_good" not in sys.modules
    assert registry.load("good") == "good"


def test_choice_is_by_priority_among_those_that_can(registry: Registry):
    registry.add("small", "plugin_good:VALUE", priority=1)
    registry.add(
        "large", "plugin_good:OTHER", priority=2, supports=lambda size: None if size > 10 else "size is at most 10"
    )
    assert registry.choose(11) == "other"
    assert registry.choose(10) == "good"
    with pytest.raises(PluginError, match="size is at most 10"):
        registry.choose(10, "large")


def test_a_broken_plugin_is_passed_over_and_explained(registry: Registry):
    registry.add("bad", "plugin_bad:VALUE", priority=5)
    registry.add("good", "plugin_good:VALUE")
    assert registry.choose(None) == "good"
    assert "no such thing" in registry.reason_against("bad", None)
    with pytest.raises(PluginError, match="no such thing") as caught:
        registry.load("bad")
    assert isinstance(caught.value.__cause__, KeyError)


def test_no_choice_lists_every_reason(registry: Registry):
    registry.add("bad", "plugin_bad:VALUE")
    registry.add("picky", "plugin_good:VALUE", supports=lambda q: "needs a moon")
    with pytest.raises(PluginError, match=r"(?s)no such thing.*needs a moon"):
        registry.choose("query")


def test_unknown_name_suggests_the_nearest(registry: Registry):
    registry.add("good", "plugin_good:VALUE")
    with pytest.raises(PluginError, match="nearest: good; all: good"):
        registry.load("god")


def test_same_name_needs_the_same_target(registry: Registry):
    registry.add("good", "plugin_good:VALUE")
    registry.add("good", "plugin_good:VALUE")
    with pytest.raises(PluginError, match="already registered"):
        registry.add("good", "plugin_good:OTHER")


def test_disabled_by_environment(registry: Registry, monkeypatch: pytest.MonkeyPatch):
    registry.add("good", "plugin_good:VALUE")
    monkeypatch.setenv("HEADRACE_DISABLE_PLUGINS", "other, good")
    with pytest.raises(PluginError, match="HEADRACE_DISABLE_PLUGINS"):
        registry.load("good")
