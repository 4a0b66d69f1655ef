"""Patterns over module names match what Python's own engine matches."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import AdapterError
from headrace.models.adapters.patterns import compile_pattern

LEAVES = st.sampled_from(["a", "b", r"\.", ".", "[ab]", "[^a.]", r"\d", r"\w", "q_proj", "0", "^", "$", r"\b"])


def _extend(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(inner, inner).map("".join), st.tuples(inner, inner).map(lambda p: f"(?:{p[0]}|{p[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "*?", "+?"])).map(lambda p: f"({p[0]}){p[1]}"),
        inner.map(lambda p: f"(?={p})"), inner.map(lambda p: f"(?!{p})"),
    )


PATTERNS = st.recursive(LEAVES, _extend, max_leaves=5)
NAMES = st.text(alphabet="ab.0_q", min_size=0, max_size=7) | st.sampled_from(["a.0.q_proj", "q_proj", "a.b", "b.a.a"])


@given(PATTERNS, NAMES)
def test_as_python(pattern: str, name: str):
    try:
        found = compile_pattern(pattern, "field")
    except AdapterError as error:
        assert "nested" in str(error)
        return
    assert found.matches(name) == (re.fullmatch(pattern, name) is not None)
    assert found.matches_end(name) == (re.fullmatch(rf"(?:.*\.)?(?:{pattern})", name) is not None)


@pytest.mark.parametrize("pattern", [
    r".*\.(self_attn|mlp)\.(q_proj|k_proj|up_proj)", r"model\.layers\.(1[0-9]|2\d)\..*",
    r"(?:.*?(?:language|text).*?(?:self_attn|attn|mlp).*?(?:q_proj|v_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\."
    r"(?:self_attn|mlp)\.(?:(?:q_proj|v_proj)))",
    r"^(?!.*visual).*(?:q_proj|v_proj)$", r"model\.language_model\..*(q|k)_proj",
])
def test_patterns_that_people_use(pattern: str):
    for name in (
        "model.layers.12.self_attn.q_proj", "model.layers.1.mlp.up_proj", "visual.blocks.0.attn.q_proj",
        "model.language_model.layers.3.self_attn.k_proj", "lm_head",
    ):
        assert compile_pattern(pattern, "f").matches(name) == (re.fullmatch(pattern, name) is not None), name
