"""What tests/models/deepseek_v4.md says is tested is: each test it names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_tests_named_in_the_table_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "tests" / "models" / "deepseek_v4.md").read_text())
    assert len(named) > 40
    missing = [
        f"{path}::{name}" for path,
        name in named if not re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE)
    ]
    assert not missing
