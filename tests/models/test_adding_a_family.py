"""docs/adding-a-family.md: the file it shows serves an out-of-tree family, found by its entry point."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from family_cases import config_json, make_oracle, prompt
from harness import build_harness
from test_parity import TOLERANCE, oracle_logits, prefill_in_chunks

from headrace.base.registry import Registry
from headrace.models import catalog
from headrace.models.family import Family

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-family.md"
MAX_LINES = 40


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The file in an installed package of its own; returns its text."""
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.S).group(1)
    toml = re.search(r"```toml\n.*?\n(.*?)```", PAGE.read_text(), re.S).group(1)
    files = {
        "my_package/__init__.py": "", "my_package/nemotron.py": code,
        "my_package-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n",
        "my_package-1.0.dist-info/entry_points.txt": "[headrace.families]\n" + toml.replace('"', ""),
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    registry: Registry[Family] = Registry("model family")
    monkeypatch.setattr(catalog, "FAMILIES", registry)
    return code


def test_the_file_shown_serves_its_family(installed: str):
    assert len(installed.splitlines()) < MAX_LINES
    model = make_oracle("Nemotron", {"head_dim": 16})
    harness = build_harness(config_json(model), model.state_dict())
    tokens = prompt(0)
    for chunk in (len(tokens), 5, 1):
        _, logits = prefill_in_chunks(harness, tokens, chunk)
        torch.testing.assert_close(logits, oracle_logits(model, tokens), **TOLERANCE)
    assert catalog.FAMILIES.names() == ["nemotron"]
