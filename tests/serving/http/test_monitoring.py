"""The dashboard and the alert rules speak of series and labels that a server really has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.base.adapters import AdapterStats
from headrace.base.messages import EngineStats
from headrace.serving.http.transport.metrics import Metrics

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "monitoring"
DASHBOARD, RULES = json.loads((FOLDER / "grafana.json").read_text()), yaml.safe_load((FOLDER / "rules.yml").read_text())
ADDED_BY_PROMETHEUS = {"job", "instance"}


def known_series() -> dict[str, set[str]]:
    """Names of the live registry, as they are scraped, with their labels."""
    metrics, series = Metrics(), {}
    metrics.finished.labels("stop").inc()
    metrics.engine.stats = EngineStats(adapters=AdapterStats(running={"a": 1}))
    metrics.http.count("GET", "/health", 200)
    for family in metrics.registry.collect():
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                series[sample.name] = set(sample.labels) | ADDED_BY_PROMETHEUS
    return series


SERIES = known_series()


def panels() -> Iterator[dict[str, Any]]:
    yield from (panel for panel in DASHBOARD["panels"] if panel["type"] != "row")


EXPRESSIONS = (
    [target["expr"] for panel in panels() for target in panel["targets"]]
    + [rule["expr"] for group in RULES["groups"] for rule in group["rules"]]
)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_each_name_and_label_exists(expression: str):
    names = set(re.findall(r"\bheadrace_\w+", expression))
    assert names and names <= set(SERIES), names - set(SERIES)
    labels = set.intersection(*(SERIES[name] for name in names))
    used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expression))
    used |= {label.strip() for group in re.findall(r"\bby \(([^)]*)\)", expression) for label in group.split(",")}
    assert used <= labels, used - labels
    assert all(expression.count(a) == expression.count(b) for a, b in ("()", "{}", "[]"))
    for name in names:
        if name.endswith(("_total", "_bucket")):
            assert re.search(rf"(?:rate|increase)\({name}", expression), f"{name} only ever grows"
        else:
            assert not re.search(rf"(?:rate|increase)\({name}", expression), f"{name} is a gauge"
        assert ("histogram_quantile" in expression) == any(n.endswith("_bucket") for n in names)


def test_every_engine_figure_is_on_the_dashboard():
    shown = " ".join(EXPRESSIONS)
    left_out = {
        name.removesuffix("_bucket") for name in SERIES if name not in shown and not name.endswith(("_sum", "_count"))
    }
    # the same figures by replica
    left_out = {name for name in left_out if not name.startswith("headrace_replica_")}
    assert left_out == {"headrace_kv_cache_evictable_ratio", "headrace_engine_requests_total"}


def test_the_dashboard_can_be_laid_out():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids)) and DASHBOARD["uid"] == "headrace"
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    text = json.dumps(DASHBOARD["panels"])
    assert set(re.findall(r"\$\{?([a-z]+)\}?", text)) <= variables


def test_alerts_are_complete():
    rules = [rule for group in RULES["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical") and rule["annotations"]["summary"]
        assert re.fullmatch(r"Headrace[A-Z]\w+", rule["alert"]) and re.fullmatch(r"\d+m", rule.get("for", "1m"))
