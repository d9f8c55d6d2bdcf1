"""Alerts and the dashboard ask for figures that a served pair has, by the names that it gives."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from dflash_trt.core.yaml_files import read_yaml
from dflash_trt.decoding.jobs import Outcome
from dflash_trt.serving.openai.figures import FRONT_KINDS
from dflash_trt.serving.server.metrics import KINDS
from tests.deployment.test_image import TREE

ALL = FRONT_KINDS | KINDS
FOLDER = TREE / "deploy"
NAME = re.compile(r"\b(?:dflash|up)[a-z_:0-9]*\b(?=[\s{\[)]|$)")


def _rules() -> list[dict[str, Any]]:
    (group,) = read_yaml(FOLDER / "prometheus" / "rules.yaml")["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def _dashboard() -> Any:
    return json.loads((FOLDER / "grafana" / "dashboard.json").read_text(encoding="utf-8"))


def _queries() -> list[str]:
    targets = [target for panel in _dashboard()["panels"] for target in panel["targets"]]
    return [rule["expr"] for rule in _rules()] + [target["expr"] for target in targets]


def test_names_follow_the_conventions() -> None:
    for name, kind in ALL.items():
        assert re.fullmatch(r"dflash(_[a-z]+)+", name)
        assert (kind == "counter") == name.endswith("_total"), name
        assert kind != "histogram" or name.endswith("_seconds"), name
        assert not re.search(r"_(ms|millis\w*|us|minutes|kb|mb|percent)\b", name), name


@pytest.mark.parametrize("query", _queries())
def test_queries_ask_for_what_there_is(query: str) -> None:
    recorded = {rule["record"] for rule in _rules() if "record" in rule}
    names = NAME.findall(query)
    assert names
    for name in names:
        family = re.sub(r"_(bucket|sum|count)$", "", name)
        known = name in ("up", *recorded) or family in ALL
        assert known, name
        kind = ALL.get(family)
        assert (kind == "histogram") == (family != name), name
        if kind in ("counter", "histogram"):  # what only grows says nothing by itself
            assert re.search(rf"(rate|increase)\({name}[^()]*\[", query), name
    for outcome in re.findall(r'outcome="(\w*)"', query):
        assert outcome in set(Outcome)


def test_every_alert_is_explained() -> None:
    """In the page that says what to do about it, in its rule's unit test, and by a summary."""
    alerts = [rule for rule in _rules() if "alert" in rule]
    page = (TREE / "docs" / "serving.md").read_text(encoding="utf-8")
    tried = (FOLDER / "prometheus" / "rules_test.yaml").read_text(encoding="utf-8")
    for alert in alerts:
        assert f"`{alert['alert']}`" in page and f'"{alert["alert"]}"' in tried
        assert alert["labels"]["severity"] in ("page", "ticket") and alert["annotations"]["summary"]
    assert set(re.findall(r"`(Dflash\w+)`", page)) == {alert["alert"] for alert in alerts}


def test_panels_lie_side_by_side() -> None:
    cells = [
        (x, y)
        for panel in _dashboard()["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) == 23
    assert len({panel["id"] for panel in _dashboard()["panels"]}) == len(_dashboard()["panels"])
