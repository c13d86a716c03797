"""What the chart's values do to what is rendered, and which are refused. No cluster."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from chart_manifests import CHART, ROOT

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
"""Parts of the schema that are the API server's to check, and `global`, which is Helm's."""


OF_PODS = ("operator.resources", "operator.podSecurityContext", "operator.securityContext")
"""Values that are handed to Kubernetes whole, of which the defaults set a few fields."""


def test_a_package_holds_everything(offline: Any, tmp_path: Path) -> None:
    """The CRD is a link in the tree; a package carries the file."""
    offline("package", CHART, "--destination", tmp_path)
    [package] = tmp_path.glob("mizzen-*.tgz")
    asked = ("--set", "monitoring.enabled=true")
    assert offline("template", "sail", package, *asked) == offline("template", "sail", CHART, *asked)


def test_everything_rendered_is_small(offline: Any) -> None:
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
    ({"monitor": True}, "additional properties 'monitor' not allowed"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_a_wrong_value_is_refused_by_name(offline: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match="specifications of the schema") as refusal:
        offline.template(values)
    assert message in str(refusal.value)


def test_times_of_the_election_that_contradict_each_other_are_refused(offline: Any) -> None:
    with pytest.raises(Exception, match="leaseSeconds must exceed renewSeconds"):
        offline.template({"operator": {"leaderElection": {"renewSeconds": 10}}})


def objects(schema: Any, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every object in a schema, with the name it has there."""
    if isinstance(schema, dict):
        types = schema.get("type", "")
        if types == "object" or "object" in types:
            yield name, schema
        for key, part in schema.items():
            yield from objects(part, key)
    elif isinstance(schema, list):
        for part in schema:
            yield from objects(part, name)


def test_the_schema_is_closed() -> None:
    loose = {
        name for name, part in objects(SCHEMA, "values") if part.get("additionalProperties", True) is True
    }
    assert loose == OPEN


def test_the_schema_has_exactly_the_values() -> None:
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


def test_the_readme_is_current() -> None:
    page: Callable[[], str] = runpy.run_path(str(ROOT / "scripts/chart_reference.py"))["page"]
    written = (CHART / "README.md").read_text()
    assert written == page(), "README.md is out of date: run python scripts/chart_reference.py"


def test_a_value_without_a_comment_is_named() -> None:
    values = runpy.run_path(str(ROOT / "scripts/chart_reference.py"))["values"]
    with pytest.raises(ValueError, match=r"a\.b has no comment"):
        list(values("a:\n  b: 1\n"))


def test_the_notes_tell_the_next_command(offline: Any) -> None:
    values = ("--set", "rbac.scope=namespace,operator.replicas=1")
    notes = offline("install", "sail", CHART, "-n", "harbour", "--dry-run=client", *values)
    assert "helm test sail --namespace harbour" in notes
    assert "kubectl apply --namespace harbour -f -" in notes
    assert "The operator has one replica" in notes


def test_the_notes_name_no_check_that_is_not_there(offline: Any) -> None:
    values = ("--set", "rbac.create=false,operator.replicas=0")
    notes = offline("install", "sail", CHART, "--dry-run=client", *values).rpartition("NOTES:")[2]
    assert "helm test" not in notes
    assert "The operator has no replicas" in notes


def test_a_releases_dots_are_in_no_name(offline: Any) -> None:
    """A Service has none in its name."""
    rendered = offline("template", "sail.v1", CHART)
    names = {
        one["metadata"]["name"] for one in yaml.safe_load_all(rendered) if one and one["kind"] == "Service"
    }
    assert names == {"sail-v1-operator"}
