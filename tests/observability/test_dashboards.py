# SPDX-License-Identifier: Apache-2.0
"""Every panel is complete, and its queries return data for a cluster under load and faults."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "charts/mizzen/dashboards"
BOARDS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
WINDOW = "15s"
QUIET = {
    "mizzen_engine_integrity_violations_total": "only a bug of Mizzen causes a violation",
    "mizzen_gateway_watch_errors_total": "the API server is not taken down",
    "mizzen_gateway_prefix_index_forgotten_blocks": "the index has room for a hundred times as much",
    "mizzen_operator_model_": "the hub from which the service downloads its model does not answer",
    "mizzen_engine_image": "the model accepts no images",
    "mizzen_gateway_images_": "the model accepts no images",
    "DCGM_FI_DEV_XID_ERRORS": "the GPUs have no errors",
    "mizzen_operator_workqueue": "two services are reconciled as soon as they are due",
}
"""Metrics that may stay zero in this test, each with its reason."""
OF_OTHER_MODELS = (
    "mizzen_engine_expert_load_ratio",
    "mizzen_engine_expert_dropped_tokens_total",
    "mizzen_engine_image_decode_seconds_total",
    "mizzen_engine_image_encode_seconds_total",
)
"""Metrics without a value in this test, whose model has no experts and accepts no images."""

# The first test that uses `recorded_run` waits for the whole run.
pytestmark = [pytest.mark.xdist_group("observability"), pytest.mark.timeout(1200)]


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def queries() -> list[Any]:
    return [
        pytest.param(target["expr"], panel["type"], id=f"{name}-{panel['title']}-{target['refId']}")
        for name, board in BOARDS.items()
        for panel in panels(board)
        for target in panel["targets"]
    ]


def concrete(expr: str) -> str:
    """Return a query as Grafana sends it if every variable is set to All."""
    expr = expr.replace("$__rate_interval", WINDOW)
    return re.sub(r"\$[a-z]+\b", ".*", expr)


def numbers(series: list[dict[str, Any]]) -> list[float]:
    values = [float(value) for entry in series for _, value in entry["values"]]
    return [value for value in values if not math.isnan(value)]


@pytest.mark.cluster
@pytest.mark.parametrize(("expr", "kind"), queries())
def test_a_panels_query_returns_data_of_the_run(recorded_run: Any, expr: str, kind: str) -> None:
    query = concrete(expr)
    assert not re.search(r"\$[a-z_]", query)
    values = numbers(recorded_run.prometheus.over(query, recorded_run.began, recorded_run.ended))
    if any(metric in expr for metric in OF_OTHER_MODELS):
        assert not values, f"{query}: the run's model has neither experts nor images"
        return
    assert values, f"{query}: no data"
    if not any(metric in expr for metric in QUIET):
        assert any(values), f"{query}: zero throughout"
    if kind in ("table", "stat", "bargauge"):
        assert recorded_run.prometheus.query(query), f"{query}: no data at the end"


@pytest.mark.cluster
def test_every_variable_of_a_dashboard_has_values(recorded_run: Any) -> None:
    for board in BOARDS.values():
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                metric, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"]).groups()  # type: ignore[union-attr]
                assert recorded_run.prometheus.values(label, metric), variable["definition"]


@pytest.mark.cluster
def test_the_load_got_all_kinds_of_responses(recorded_run: Any) -> None:
    assert {200, 400, 404, 429} <= set(recorded_run.codes), recorded_run.codes


@pytest.mark.cluster
def test_every_rule_can_be_evaluated(recorded_run: Any) -> None:
    rules = recorded_run.prometheus.rules()
    assert len(rules) > 15
    assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []


@pytest.mark.cluster
def test_every_annotation_of_a_dashboard_marks_a_rollout(recorded_run: Any) -> None:
    for board in BOARDS.values():
        (annotation,) = board["annotations"]["list"]
        query = concrete(annotation["expr"])
        assert numbers(recorded_run.prometheus.over(query, recorded_run.began, recorded_run.ended)), query


def test_every_panel_of_the_fleet_with_a_series_per_service_links_to_the_service() -> None:
    linked = 0
    for panel in panels(BOARDS["fleet"]):
        by_service = panel["type"] == "table" or any(
            "{{service}}" in target.get("legendFormat", "") for target in panel["targets"]
        )
        links = panel["fieldConfig"]["defaults"].get("links", [])
        assert bool(links) == by_service, panel["title"]
        for link in links:
            assert link["url"].startswith(f"/d/{BOARDS['service']['uid']}?"), panel["title"]
            linked += 1
    assert linked > 10


def test_the_dashboard_files_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts/dashboards"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_all_dashboards_have_panels_and_no_row_is_collapsed() -> None:
    assert set(BOARDS) == {"service", "engine", "gateway", "operator", "fleet"}
    assert sum(len(panels(board)) for board in BOARDS.values()) >= 40
    rows = [panel for board in BOARDS.values() for panel in board["panels"] if panel["type"] == "row"]
    assert rows
    assert not any(row["collapsed"] or row["panels"] for row in rows)


@pytest.mark.parametrize("name", BOARDS)
def test_every_panel_has_a_description_a_unit_and_known_variables(name: str) -> None:
    board = BOARDS[name]
    variables = {variable["name"] for variable in board["templating"]["list"]}
    assert {"datasource", "namespace"} <= variables
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in panels(board):
        defaults = panel["fieldConfig"]["defaults"]
        assert len(panel["description"]) > 20, panel["title"]
        assert defaults["unit"], panel["title"]
        steps = defaults.get("thresholds", {"steps": [{"value": None}]})["steps"]
        assert steps[0]["value"] is None, panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            used = set(re.findall(r"\$([a-z]+)\b", target["expr"]))
            assert used <= variables, f"{panel['title']}: {used - variables}"


@pytest.mark.parametrize("name", BOARDS)
def test_panels_do_not_overlap(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARDS[name]["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        covered = {
            (place["x"] + column, place["y"] + line)
            for column in range(place["w"])
            for line in range(place["h"])
        }
        assert not covered & taken, panel["title"]
        taken |= covered
