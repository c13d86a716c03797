# SPDX-License-Identifier: Apache-2.0
"""The schema of the chart's values, the chart's package, README and notes; without a cluster."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import mizzen
from chart_manifests import CHART, REGISTRY, ROOT

SCHEMA = json.loads((CHART / "values.schema.json").read_text())


DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())


MOST_BYTES = 200 * 1024


OPEN = {
    "manifest",
    "volume",
    "container",
    "global",
    "valueFrom",
    "nodeAffinity",
    "podAffinity",
    "podAntiAffinity",
}
"""Parts of the schema that accept any field: the API server validates them; `global` belongs to Helm."""


OF_PODS = ("operator.resources", "operator.podSecurityContext", "operator.securityContext")
"""Values that are copied into the pod; the defaults set only some of their fields."""


def test_a_package_renders_like_the_chart_in_the_tree(offline: Any, tmp_path: Path) -> None:
    """The CRD is a symbolic link in the tree; a package must contain the file."""
    offline("package", CHART, "--destination", tmp_path)
    [package] = tmp_path.glob("mizzen-*.tgz")
    values = ("--set", "monitoring.enabled=true")
    assert offline("template", "sail", package, *values) == offline("template", "sail", CHART, *values)


def test_the_rendered_chart_is_at_most_200_kib(offline: Any) -> None:
    command = ("template", "sail", CHART, "--set", "monitoring.enabled=true")
    assert len(offline(*command).encode()) <= MOST_BYTES


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"operator": {"replica": 1}}, "at '/operator': additional properties 'replica' not allowed"),
    ({"operator": {"image": "mizzen/operator:0.1.0"}}, "additional properties 'image' not allowed"),
    ({"operator": {"replicas": "two"}}, "at '/operator/replicas': got string, want integer"),
    ({"operator": {"replicas": None}}, "at '/operator': missing property 'replicas'"),
    ({"operator": {"logLevel": "loud"}}, "value must be one of 'debug', 'info', 'warning', 'error'"),
    ({"operator": {"tolerations": [{"keys": "a"}]}}, "additional properties 'keys' not allowed"),
    ({"rbac": {"scope": "galaxy"}}, "at '/rbac/scope': value must be one of 'cluster', 'namespace'"),
    ({"images": {"engine": {"digest": "sha256:0"}}}, "at '/images/engine/digest'"),
    ({"monitoring": {"enabled": "yes"}}, "at '/monitoring/enabled': got string, want"),
    ({"networkPolicy": {"apiServerPorts": []}}, "minItems: got 0, want 1"),
    ({"commonLabels": {"a": "b c"}}, "at '/commonLabels/a'"),
    (
        {"acceleratorProfiles": {"h100": {"selector": {}}}},
        "at '/acceleratorProfiles/h100': additional properties 'selector' not allowed",
    ),
    ({"acceleratorProfiles": {"h100": {"memory": "80G"}}}, "at '/acceleratorProfiles/h100/memory'"),
    (
        {"acceleratorProfiles": {"h100": {"resourceName": "gpu"}}},
        "at '/acceleratorProfiles/h100/resourceName'",
    ),
    ({"acceleratorProfiles": {"H100": {}}}, "'H100' does not match pattern"),
    ({"monitor": True}, "additional properties 'monitor' not allowed"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_an_invalid_value_is_rejected_by_its_name(offline: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match="specifications of the schema") as refusal:
        offline.template(values)
    assert message in str(refusal.value)


def test_contradictory_times_of_the_leader_election_are_rejected(offline: Any) -> None:
    with pytest.raises(Exception, match="leaseSeconds must exceed renewSeconds"):
        offline.template({"operator": {"leaderElection": {"renewSeconds": 10}}})


def objects(schema: Any, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the schema of every object in a schema."""
    if isinstance(schema, dict):
        types = schema.get("type", "")
        if types == "object" or "object" in types:
            yield name, schema
        for key, part in schema.items():
            yield from objects(part, key)
    elif isinstance(schema, list):
        for part in schema:
            yield from objects(part, name)


def test_the_schema_rejects_unknown_fields() -> None:
    loose = {
        name for name, part in objects(SCHEMA, "values") if part.get("additionalProperties", True) is True
    }
    assert loose == OPEN


def test_the_schema_has_the_fields_of_the_default_values() -> None:
    def compare(schema: dict[str, Any], values: dict[str, Any], path: str) -> None:
        if "$ref" in schema:
            schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
        if "properties" not in schema or path in OF_PODS:
            return
        assert set(schema["properties"]) - {"global"} == set(values) or not values, path
        for name, value in values.items():
            if isinstance(value, dict):
                compare(schema["properties"][name], value, f"{path}.{name}".strip("."))

    compare(SCHEMA, DEFAULTS, "")


def test_the_generator_of_the_readme_rejects_a_value_without_a_comment() -> None:
    values = runpy.run_path(str(ROOT / "scripts/chart_reference.py"))["values"]
    with pytest.raises(ValueError, match=r"a\.b has no comment"):
        list(values("a:\n  b: 1\n"))


def test_the_notes_name_the_next_commands(offline: Any) -> None:
    values = ("--set", "rbac.scope=namespace,operator.replicas=1")
    notes = offline("install", "sail", CHART, "-n", "harbour", "--dry-run=client", *values)
    assert f"The operator runs the image {REGISTRY}/mizzen/operator:{mizzen.__version__}." in notes
    assert "helm test sail --namespace harbour" in notes
    assert "kubectl apply --namespace harbour -f -" in notes
    assert "The operator has one replica" in notes


def test_the_notes_do_not_mention_helm_test_without_an_operator(offline: Any) -> None:
    values = ("--set", "rbac.create=false,operator.replicas=0")
    notes = offline("install", "sail", CHART, "--dry-run=client", *values).rpartition("NOTES:")[2]
    assert "helm test" not in notes
    assert "The operator has no replicas" in notes


def test_dots_in_a_release_name_are_replaced(offline: Any) -> None:
    """The name of a Service must not contain dots."""
    rendered = [
        manifest for manifest in yaml.safe_load_all(offline("template", "sail.v1", CHART)) if manifest
    ]
    names = {manifest["metadata"]["name"] for manifest in rendered if manifest["kind"] == "Service"}
    assert names == {"sail-v1-operator"}
