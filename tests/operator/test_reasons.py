"""Every reason that a status can give is explained, and none that it cannot."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import mizzen_operator
from mizzen_operator.pods.container_state import DEVICE_LOST, FAILING_WAIT_REASONS, NODE_LOST
from mizzen_operator.rollout.progress import RESTART_BUDGET, VERIFICATION
from mizzen_operator.status.conditions import CONDITION_TYPES

CODE = Path(mizzen_operator.__file__).parent
PAGE = Path(__file__).parents[2] / "docs/conditions.md"
GIVEN_BY = {"Condition": 2, "progress": 0, "not_ready": 0, "Failure": 0, "Refused": 0, "Scale": 2}
"""What gives a reason, and which of its arguments it is."""
KUBERNETES = {"Error", "OOMKilled", "Evicted", "UnexpectedAdmissionError", "EvictionByEvictionAPI"}
"""Reasons that Kubernetes gives, and that pass through: the most common ones."""
REJECTED = {"PersistentVolumeClaimRejected", "JobRejected"}
SCALES = {"SaturationAboveTarget", "SaturationBelowTarget"}
"""Those of the other metrics are called likewise."""
BY_CONDITION = {"progress": "Progressing", "not_ready": "GatewayReady"}
CONDITIONS = [
    "ApiKeysInForce",
    "Available",
    "Conflict",
    "GatewayReady",
    "KeysRotating",
    "ModelCached",
    "Progressing",
    "ScalingActive",
    "Scheduled",
]
GATES = {"GatewaysRoute", "NoGatewayRoutes", "EngineNotReady", "Passed", "Refused", "NotAsked"}


def literals(node: ast.expr, scope: ast.AST) -> Iterator[str]:
    """The texts that an expression may have, as far as the function that it is in says so."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from (*literals(node.body, scope), *literals(node.orelse, scope))
    elif isinstance(node, ast.BoolOp):
        yield from (text for value in node.values for text in literals(value, scope))
    elif isinstance(node, ast.Name):
        for one in ast.walk(scope):
            if isinstance(one, ast.Assign) and ast.dump(one.targets[0]) == ast.dump(
                ast.Name(node.id, ast.Store())
            ):
                yield from literals(one.value, scope)


def reasons(path: Path) -> Iterator[tuple[str, str]]:
    """What gives reasons in a file, such as the type of a condition, and the reasons."""
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for call in ast.walk(function):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
                continue
            name = call.func.id
            if name not in GIVEN_BY or len(call.args) <= GIVEN_BY[name]:
                continue
            kind = next(literals(call.args[0], function), name) if name == "Condition" else name
            for reason in literals(call.args[GIVEN_BY[name]], function):
                yield BY_CONDITION.get(name, kind), reason


def given() -> set[str]:
    """Reasons in the operator's code."""
    found = {reason for path in CODE.rglob("*.py") for _, reason in reasons(path)}
    return (
        found | {RESTART_BUDGET, VERIFICATION, DEVICE_LOST, NODE_LOST, *SCALES} | FAILING_WAIT_REASONS | REJECTED
    )


def explained(heading: str = "") -> set[str]:
    """Reasons in the first column of the page's tables, of one of its parts or of all."""
    parts = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    rows = [
        line.split("|")[1]
        for part in parts
        for line in part.splitlines()
        if line.startswith("| `") and part.startswith(heading)
    ]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_every_reason_is_explained_and_each_is_given() -> None:
    named = set(re.findall(r"`([A-Z]\w+)`", PAGE.read_text()))
    assert given() - named == set()
    assert explained() - given() - KUBERNETES == set()


@pytest.mark.parametrize("kind", CONDITIONS)
def test_each_conditions_reasons_are_in_its_part(kind: str) -> None:
    every = (*reasons(CODE / "conditions.py"), *reasons(CODE / "serving.py"))
    found = {reason for condition, reason in every if condition == kind}
    assert found
    assert found == explained(f"{kind}\n")


def test_every_condition_that_is_given_is_known_as_the_operators() -> None:
    every = (*reasons(CODE / "conditions.py"), *reasons(CODE / "serving.py"))
    assert {kind for kind, _ in every if kind not in GIVEN_BY} == CONDITION_TYPES


def test_the_gates_reasons_are_explained() -> None:
    text = (CODE / "gates.py").read_text()
    assert {name for name in GATES if f'"{name}"' in text} == GATES
    part = PAGE.read_text().split("## Pod readiness gates")[1]
    assert set(re.findall(r"`([A-Z]\w+)`", part)) == GATES
