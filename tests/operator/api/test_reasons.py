# SPDX-License-Identifier: Apache-2.0
"""Condition types and reasons are constants of one module, and docs/conditions.md explains each of them."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

import mizzen_operator
from mizzen_operator.api import reasons
from source_code import parse_source

ROOT = Path(__file__).parents[3]
CODE = Path(mizzen_operator.__file__).parent
PAGE = (ROOT / "docs/conditions.md").read_text()
CONTRACT = json.loads((ROOT / "tests/golden/data/operator_reasons.json").read_text())["conditions"]
"""Reasons of each condition, as the golden tests find them in the code."""
CONSTANTS = {
    name: value for name, value in vars(reasons).items() if name.isupper() and isinstance(value, str)
}
GATES = {"GatewaysRoute", "NoGatewayRoutes", "EngineNotReady", "Passed", "Refused", "NotAsked"}
SUFFIXES = {"AboveTarget", "BelowTarget"}
"""Suffixes of reasons that begin with the name of an autoscaling metric."""
ERRORS = {"Unreachable", "Vanished", "NotSeenYet", "NamePassed", "Timeout", "Unexpected"}
"""Label values of the failed-reconcile metric; they do not appear as reasons in a status."""
COMPARED = {
    "Completed",
    "ContainerCreating",
    "PodInitializing",
    "SchedulingGated",
    "DeletionByTaintManager",
    "DeletionByPodGC",
    "Disrupted",
}
"""Kubernetes reasons that the operator recognises but does not copy; it may write its own reason instead."""
COMPOSED = {"PersistentVolumeClaimRejected", "JobRejected", "SaturationAboveTarget", "SaturationBelowTarget"}
PASSED_ON = {"Evicted", "UnexpectedAdmissionError", "EvictionByEvictionAPI"}
"""Kubernetes reasons that docs/conditions.md gives as examples of those the operator copies unchanged."""
SINGLE_WORDS = {"Unschedulable", "Settled"}
"""Reasons of one word that have no other meaning in the operator's code."""


def first_column(heading: str = "") -> set[str]:
    """Return the reasons in the first column of the tables of docs/conditions.md.

    Only sections whose heading begins with `heading` count; by default, all sections count.
    """
    parts = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    rows = [
        line.split("|")[1]
        for part in parts
        for line in part.splitlines()
        if line.startswith("| `") and part.startswith(heading)
    ]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_a_constant_is_named_after_its_value() -> None:
    words = {
        "OOMKilled": "OOM_KILLED",
        "NotAsked": "VERIFICATION_REMOVED",
        "DeletionByPodGC": "DELETION_BY_POD_GC",
    }
    for name, value in CONSTANTS.items():
        assert name == words.get(value, re.sub(r"(?<!^)(?=[A-Z])", "_", value).upper())


def test_every_reason_in_a_status_is_explained_on_the_page() -> None:
    named = set(re.findall(r"`([A-Z]\w+)`", PAGE))
    assert set(CONSTANTS.values()) - ERRORS - COMPARED - SUFFIXES - reasons.CONDITION_TYPES - named == set()


def test_every_reason_in_the_tables_exists() -> None:
    assert first_column() - set(CONSTANTS.values()) - COMPOSED - PASSED_ON == set()


@pytest.mark.parametrize("condition", sorted(set(CONTRACT) - {"Ready", "Failed"}))
def test_the_table_of_a_condition_lists_exactly_its_reasons(condition: str) -> None:
    assert first_column(f"{condition}\n") == set(CONTRACT[condition])


def test_the_contract_covers_every_condition_type() -> None:
    assert set(CONTRACT) == reasons.CONDITION_TYPES


def test_the_reasons_of_readiness_gates_are_explained_below_their_heading() -> None:
    part = PAGE.split("## Pod readiness gates")[1]
    assert set(re.findall(r"`([A-Z]\w+)`", part)) == GATES
    assert set(CONSTANTS.values()) >= GATES


def test_no_other_module_spells_out_a_reason() -> None:
    """If a reason were renamed in only one place, Ready or a metric would change silently."""
    unmistakable = {
        value for value in CONSTANTS.values() if len(re.findall(r"[A-Z]", value)) > 1
    } | SINGLE_WORDS
    spelled_out = [
        f"{path.relative_to(CODE)}:{node.lineno} {node.value}"
        for path in sorted(CODE.rglob("*.py"))
        if path != CODE / "api/reasons.py"
        for node in ast.walk(parse_source(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in unmistakable
    ]
    assert spelled_out == []
