"""Which paths may be loaded while a server runs: only what is inside the allowed folders, whatever links say."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.base.errors import ModelError, NotFound, RequestError
from headrace.models.adapters.finding import CONFIG_FILE, WEIGHTS_FILE, find_adapter, find_allowed, is_hub_name


@pytest.fixture
def allowed(tmp_path: Path) -> Path:
    folder = tmp_path / "allowed" / "sql"
    folder.mkdir(parents=True)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        (folder / name).write_text("{}")
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / CONFIG_FILE).write_text("{}")
    return tmp_path / "allowed"


def test_inside_by_relative_and_absolute_path(allowed: Path):
    for typed in ("sql", "./sql", "sql/../sql", str(allowed / "sql"), f"{allowed}/../allowed/sql"):
        assert find_allowed(typed, [str(allowed)]) == str(allowed / "sql")
    assert find_allowed("sql", [str(allowed.parent / "secret"), str(allowed)]) == str(allowed / "sql")


@pytest.mark.parametrize("typed", ["../secret", "sql/../../secret", "/etc", "..", "sql/../../allowed2"])
def test_outside_is_refused_without_a_word_about_what_is_there(allowed: Path, typed: str):
    with pytest.raises(RequestError, match="inside a folder of --lora-folders") as caught:
        find_allowed(typed, [str(allowed)])
    assert caught.value.status == 400 and str(allowed) not in str(caught.value)


@pytest.mark.parametrize("typed", ["", "a\0b"])
def test_no_path(allowed: Path, typed: str):
    with pytest.raises(RequestError):
        find_allowed(typed, [str(allowed)])


def test_links_lead_nowhere_else(allowed: Path):
    (allowed / "link").symlink_to(allowed.parent / "secret")
    (allowed / "sql" / WEIGHTS_FILE).unlink()
    (allowed / "sql" / WEIGHTS_FILE).symlink_to(allowed.parent / "secret" / CONFIG_FILE)
    with pytest.raises(RequestError, match="inside a folder"):
        find_allowed("link", [str(allowed)])
    with pytest.raises(RequestError, match=f"{WEIGHTS_FILE} of the adapter is a link"):
        find_allowed("sql", [str(allowed)])


def test_what_is_not_there_is_not_found(allowed: Path):
    with pytest.raises(NotFound) as caught:
        find_allowed("none", [str(allowed)])
    assert caught.value.status == 404
    with pytest.raises(RequestError, match="without --lora-folders"):
        find_allowed("sql", [])


def test_a_folder_that_begins_like_an_allowed_one(allowed: Path):
    (allowed.parent / "allowed-not").mkdir()
    with pytest.raises(RequestError, match="inside a folder"):
        find_allowed(str(allowed.parent / "allowed-not"), [str(allowed)])


def test_hub_names(allowed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert is_hub_name("owner/name") and not is_hub_name("name") and not is_hub_name("../name")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / ("b" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("b" * 40)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        (snapshot / name).write_text("{}")
    assert find_adapter("owner/name") == snapshot
    assert find_allowed("owner/name", ["hub"]) == str(snapshot)
    with pytest.raises(RequestError):
        find_allowed("owner/name", [str(allowed)])
    with pytest.raises(NotFound, match="owner/other"):
        find_allowed("owner/other", ["hub"])
    with pytest.raises(ModelError):
        find_adapter("owner/other")


def test_a_name_on_the_hub_is_no_path_below_the_working_folder(
    allowed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(allowed.parent)
    with pytest.raises(NotFound, match="allowed/sql"):
        find_allowed("allowed/sql", ["hub"])
