# SPDX-License-Identifier: Apache-2.0
"""Every alert has a runbook, fires when it should, and stays silent otherwise."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from alert_rules import ROOT, RULES, render_rule_text, render_rules

CASES = Path(__file__).parent / "alerts"
SEVERITIES = {"critical", "warning", "info"}

pytestmark = [pytest.mark.xdist_group("observability")]


def rules() -> list[dict[str, Any]]:
    files = [yaml.safe_load(render_rule_text(path.read_text())) for path in RULES]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def cases(path: Path) -> list[dict[str, Any]]:
    tests = yaml.safe_load((CASES / f"{path.stem}_test.yaml").read_text())["tests"]
    return [case for test in tests for case in test["alert_rule_test"]]


def promtool(programs: Path, *arguments: str) -> str:
    done = subprocess.run(
        [programs / "promtool", *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_accepts_the_rules(prometheus_programs: Path, tmp_path: Path) -> None:
    for path in render_rules(tmp_path):
        assert "SUCCESS" in promtool(
            prometheus_programs, "check", "rules", "--lint=all", "--lint-fatal", str(path)
        )


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.stem)
def test_alerts_fire_in_their_cases_and_are_silent_otherwise(
    prometheus_programs: Path, tmp_path: Path, path: Path
) -> None:
    render_rules(tmp_path)
    case = tmp_path / f"{path.stem}_test.yaml"
    case.write_text((CASES / case.name).read_text())
    assert "SUCCESS" in promtool(prometheus_programs, "test", "rules", str(case))


def test_every_value_of_the_rules_is_used_in_a_rule_file() -> None:
    values = yaml.safe_load((ROOT / "charts/mizzen/values.yaml").read_text())["monitoring"]["rules"]
    names = {f"{part}.{name}" for part in ("objectives", "floors", "thresholds") for name in values[part]}
    used = {name for path in RULES for name in re.findall(r"\$\{([\w.]+)\}", path.read_text())}
    assert names == used


def test_a_rule_uses_the_values_of_the_chart() -> None:
    text = render_rule_text(
        "x > ${floors.failedRequests} + ${floors.queuedRequests}", floors={"failedRequests": 9}
    )
    assert text == "x > 9 + 5"


def test_every_alert_has_cases_in_which_it_fires_and_is_silent() -> None:
    firing = {case["alertname"] for path in RULES for case in cases(path) if case["exp_alerts"]}
    silent = {case["alertname"] for path in RULES for case in cases(path) if not case["exp_alerts"]}
    names = {alert["alert"] for alert in alerts()}
    assert firing == names
    # MizzenSlowFirstToken is silent for the healthy services in the case in which it fires for another one.
    assert names - silent <= {"MizzenSlowFirstToken"}


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    pages = {path.stem: path.read_text() for path in (ROOT / "docs/runbooks").glob("*.md")}
    pages.pop("index", None)
    assert {alert["annotations"]["runbook_url"] for alert in alerts()} == set(pages)
    for name, text in pages.items():
        assert text.startswith(f"# {name}\n")
        sections = re.findall(r"^## (.+)$", text, re.MULTILINE)
        assert sections == ["Meaning", "Impact", "Diagnosis", "Mitigation"], name


def test_every_panel_that_a_runbook_names_exists() -> None:
    boards = [json.loads(path.read_text()) for path in (ROOT / "charts/mizzen/dashboards").glob("*.json")]
    titles = {board["title"] for board in boards} | {p["title"] for board in boards for p in board["panels"]}
    named = {
        (path.stem, name)
        for path in (ROOT / "docs/runbooks").glob("*.md")
        for name in re.findall(r"(?<!\*)\*([A-Z][^*\n]+)\*(?!\*)", path.read_text())
    }
    assert len(named) > 20
    assert {(page, name) for page, name in named if name not in titles} == set()


def test_every_alert_has_a_severity_a_summary_and_a_description() -> None:
    for alert in alerts():
        assert alert["labels"]["severity"] in SEVERITIES, alert["alert"]
        assert {"summary", "description"} <= set(alert["annotations"]), alert["alert"]


def test_every_metric_in_a_rule_exists() -> None:
    catalogue = (ROOT / "docs/metrics.md").read_text()
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for rule in rules():
        for name in re.findall(r"\bmizzen[_:][a-z0-9_:]+", rule["expr"]):
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            assert name in recorded or f"`{base}`" in catalogue or f"`{name}`" in catalogue, name


def test_every_metric_in_a_dashboard_exists() -> None:
    catalogue = (ROOT / "docs/metrics.md").read_text()
    names = set()
    for path in sorted((ROOT / "charts/mizzen/dashboards").glob("*.json")):
        names |= set(re.findall(r"\b(?:mizzen_|sglang:|process_)[a-z0-9_]+", path.read_text()))
    assert len(names) > 60
    missing = [n for n in names if f"`{re.sub(r'_(bucket|sum|count)$', '', n)}`" not in catalogue]
    assert missing == []
