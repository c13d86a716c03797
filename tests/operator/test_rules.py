# SPDX-License-Identifier: Apache-2.0
"""Each validation rule of the CRD rejects an invalid service and accepts a valid one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from crd_cases import WRONG
from crd_valid_cases import RIGHT
from marks import CONTROL_PLANE

CRD = Path(__file__).parents[2] / "crds/inferenceservices.yaml"
OF_UPDATES = "spec.gateway.mode is immutable"
"""Message of a rule that applies only to updates; gateway/test_shared.py tests it, this module does not."""

pytestmark = CONTROL_PLANE


def rules(schema: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the path and the message of each rule in a schema; `*` in a path stands for any list item."""
    for rule in schema.get("x-kubernetes-validations", []):
        yield path, rule["message"]
    for name, below in schema.get("properties", {}).items():
        yield from rules(below, (*path, name))
    if "items" in schema:
        yield from rules(schema["items"], (*path, "*"))


def holds(value: Any, path: tuple[str, ...]) -> bool:
    """Return whether an object has a value at a path, so that a rule there is evaluated."""
    if not path:
        return True
    name, *rest = path
    if name == "*":
        return any(holds(item, tuple(rest)) for item in value)
    return name in value and holds(value[name], tuple(rest))


@pytest.fixture(scope="module")
def all_rules() -> list[tuple[tuple[str, ...], str]]:
    [version] = yaml.safe_load(CRD.read_text())["spec"]["versions"]
    every = [rule for rule in rules(version["schema"]["openAPIV3Schema"]) if OF_UPDATES not in rule[1]]
    assert len(every) > 40
    return every


def answer(api: Any, body: dict[str, Any]) -> Any:
    """Dry-run the creation of a service; return the API server's response: the object or the error."""
    body["metadata"]["namespace"] = "default"
    try:
        return api.create(body, dryRun="All")
    except Exception as refusal:
        assert getattr(refusal, "code", 0) == 422, refusal
        return str(refusal)


def test_each_rule_rejects_an_invalid_service(
    api: Any, minimal: Callable[..., dict[str, Any]], all_rules: list[tuple[tuple[str, ...], str]]
) -> None:
    bodies = [*(minimal(**case[1]) for case in WRONG), minimal("a" * 41)]
    errors = [answer(api, body) for body in bodies]
    assert all(isinstance(error, str) for error in errors)
    silent = [message for _, message in all_rules if not any(message in error for error in errors)]
    assert silent == []


def test_each_rule_accepts_a_valid_service(
    api: Any, minimal: Callable[..., dict[str, Any]], all_rules: list[tuple[tuple[str, ...], str]]
) -> None:
    accepted = [answer(api, minimal(**spec)) for spec in RIGHT]
    assert not [error for error in accepted if isinstance(error, str)]
    unchecked = [message for path, message in all_rules if not any(holds(body, path) for body in accepted)]
    assert unchecked == []


AS_IN_KUBERNETES = (
    "spec.engine.env.*.",
    "spec.gateway.resources.",
    "spec.gateway.service.",
    "spec.model.credentialsSecretRef.",
    "spec.podTemplate.",
)
"""Fields whose subfields belong to Kubernetes types."""


def undescribed(schema: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of fields without a description, for which `kubectl explain` shows only the type."""
    for name, below in schema.get("properties", {}).items():
        here = f"{path}.{name}".removeprefix(".")
        if "description" not in below:
            yield here
        yield from undescribed(below, here)
    if "items" in schema:
        yield from undescribed(schema["items"], f"{path}.*")


def test_every_field_of_mizzen_has_a_description() -> None:
    [version] = yaml.safe_load(CRD.read_text())["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert [path for path in undescribed(schema, "spec") if not path.startswith(AS_IN_KUBERNETES)] == []
