"""Where caches are, by the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.base import env


@pytest.mark.parametrize(("xdg", "own", "cache", "extensions"), [
    ("", "", "/home/me/.cache/headrace", "/home/me/.cache/torch_extensions"),
    ("/big/cache", "", "/big/cache/headrace", "/big/cache/torch_extensions"),
    ("/big/cache", "/own", "/own", "/big/cache/torch_extensions"),
    ("relative", "", "/home/me/.cache/headrace", "/home/me/.cache/torch_extensions"),  # invalid, says the XDG standard
])
def test_caches_are_where_the_user_wants_them(monkeypatch, xdg: str, own: str, cache: str, extensions: str):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    monkeypatch.setenv("HEADRACE_CACHE", own)
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    assert (env.cache_dir(), env.torch_extensions_dir()) == (Path(cache), Path(extensions))
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert env.cache_dir() == Path(own or "/home/me/.cache/headrace")
