"""Each of the CRD's rules refuses something that nothing else does, and lets something pass."""

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
"""A rule that compares with what was there, of which `test_shared` has both cases."""

pytestmark = CONTROL_PLANE


def rules(schema: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Paths and messages of a schema's rules; `*` is any item."""
    for rule in schema.get("x-kubernetes-validations", []):
        yield path, rule["message"]
    for name, below in schema.get("properties", {}).items():
        yield from rules(below, (*path, name))
    if "items" in schema:
        yield from rules(schema["items"], (*path, "*"))


def holds(value: Any, path: tuple[str, ...]) -> bool:
    """Whether something has a value at a path, so that a rule there is asked."""
    if not path:
        return True
    name, *rest = path
    if name == "*":
        return any(holds(one, tuple(rest)) for one in value)
    return name in value and holds(value[name], tuple(rest))


@pytest.fixture(scope="module")
def every() -> list[tuple[tuple[str, ...], str]]:
    [version] = yaml.safe_load(CRD.read_text())["spec"]["versions"]
    found = [one for one in rules(version["schema"]["openAPIV3Schema"]) if OF_UPDATES not in one[1]]
    assert len(found) > 40
    return found


def answer(api: Any, body: dict[str, Any]) -> Any:
    """What the API server makes of a service: the object, or its refusal's words."""
    body["metadata"]["namespace"] = "default"
    try:
        return api.create(body, dryRun="All")
    except Exception as refusal:
        assert getattr(refusal, "code", 0) == 422, refusal
        return str(refusal)


def test_each_rule_refuses_something(
    api: Any, minimal: Callable[..., dict[str, Any]], every: list[tuple[tuple[str, ...], str]]
) -> None:
    bodies = [*(minimal(**case[1]) for case in WRONG), minimal("a" * 41)]
    said = [answer(api, body) for body in bodies]
    assert all(isinstance(words, str) for words in said)
    silent = [message for _, message in every if not any(message in words for words in said)]
    assert silent == []


def test_each_rule_lets_something_pass(
    api: Any, minimal: Callable[..., dict[str, Any]], every: list[tuple[tuple[str, ...], str]]
) -> None:
    taken = [answer(api, minimal(**spec)) for spec in RIGHT]
    assert not [words for words in taken if isinstance(words, str)]
    unasked = [message for path, message in every if not any(holds(body, path) for body in taken)]
    assert unasked == []


AS_IN_KUBERNETES = (
    "spec.engine.env.*.",
    "spec.gateway.resources.",
    "spec.gateway.service.",
    "spec.model.credentialsSecretRef.",
    "spec.podTemplate.",
)
"""Whose fields are those of Kubernetes' own objects."""


def silent(schema: Any, path: str = "") -> Iterator[str]:
    """Paths of fields of which `kubectl explain` would tell the type alone."""
    for name, below in schema.get("properties", {}).items():
        here = f"{path}.{name}".removeprefix(".")
        if "description" not in below:
            yield here
        yield from silent(below, here)
    if "items" in schema:
        yield from silent(schema["items"], f"{path}.*")


def test_every_field_of_our_own_is_explained() -> None:
    [version] = yaml.safe_load(CRD.read_text())["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert [path for path in silent(schema, "spec") if not path.startswith(AS_IN_KUBERNETES)] == []
