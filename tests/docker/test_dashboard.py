"""The dashboard held to Grafana's own published types (grafana-foundation-sdk), and to itself."""

from __future__ import annotations

import copy
import itertools
import json
from typing import Any

import pytest
import yaml

from tests.docker.test_files import DOCKER

pytest.importorskip("grafana_foundation_sdk", reason="Grafana's types have packages for Python 3.11 and later only")

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

register_default_plugins()


def board() -> dict[str, Any]:
    return dict(json.loads((DOCKER / "grafana/dashboards/nereid.json").read_text()))


def unknown(given: Any, known: Any, place: str = "") -> list[str]:
    """Places in `given` that did not survive the way through Grafana's types, which keep what they know."""
    if isinstance(given, dict):
        lost = [f"{place}.{name}" for name in given if name not in known]
        return lost + [
            p for name in given if name in known for p in unknown(given[name], known[name], f"{place}.{name}")
        ]
    if isinstance(given, list):
        pairs = zip(given, known, strict=True)
        return [p for n, (one, other) in enumerate(pairs) for p in unknown(one, other, f"{place}[{n}]")]
    return [] if given == known else [place]


def through_grafanas_types(given: dict[str, Any]) -> Any:
    return json.loads(JSONEncoder().encode(Dashboard.from_json(copy.deepcopy(given))))


def test_every_field_is_one_that_grafana_knows() -> None:
    assert unknown(board(), through_grafanas_types(board())) == []


def test_a_field_that_grafana_does_not_know_would_be_found() -> None:
    wrong = board()
    panel = next(number for number, panel in enumerate(wrong["panels"]) if panel["type"] == "timeseries")
    wrong["panels"][panel]["fieldConfig"]["defaults"]["custom"]["lineWidht"] = 2
    wrong["panels"][panel]["titel"] = "x"
    found = unknown(wrong, through_grafanas_types(wrong))
    assert set(found) == {f".panels[{panel}].titel", f".panels[{panel}].fieldConfig.defaults.custom.lineWidht"}


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    panels = board()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for one, other in itertools.combinations([panel["gridPos"] for panel in panels], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)
        assert one["x"] + one["w"] <= 24


def test_the_dashboard_asks_the_data_source_that_is_provisioned() -> None:
    (source,) = yaml.safe_load((DOCKER / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    asked = {json.dumps(panel["datasource"], sort_keys=True) for panel in board()["panels"] if "datasource" in panel}
    asked |= {json.dumps(v["datasource"], sort_keys=True) for v in board()["templating"]["list"] if "datasource" in v}
    assert asked == {json.dumps({"type": source["type"], "uid": source["uid"]}, sort_keys=True)}
    (provider,) = yaml.safe_load((DOCKER / "grafana/provisioning/dashboards/nereid.yaml").read_text())["providers"]
    volumes = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["grafana"]["volumes"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in volumes
