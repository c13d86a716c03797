"""Write the chart's README from its values.

    python scripts/chart_reference.py

Each value's meaning is the comment above it in charts/mizzen/values.yaml, its type comes from
values.schema.json. A test compares the page with what this script would write.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "charts/mizzen"
README = CHART / "README.md"
HEAD = """\
# Mizzen's Helm chart

{description}. Version {version} installs Mizzen {app_version}; it needs Kubernetes 1.30 or later and
Helm 3.17 or later (the tests run Helm 4).

```console
$ helm install mizzen charts/mizzen --namespace mizzen-system --create-namespace
$ helm test mizzen --namespace mizzen-system
```

It installs the CRD, the operator with two replicas, its roles, ServiceAccount, Service, PodDisruptionBudget
and NetworkPolicy; and monitors, alert rules and dashboards where the cluster has `monitoring.coreos.com/v1`.
[docs/install.md](../../docs/install.md) says how to install it in one namespace without cluster-wide rights,
how to upgrade and how to uninstall it.

## Values

`values.schema.json` closes them: a value that is not here is refused by name. This page is made from
values.yaml by `scripts/chart_reference.py`.

"""


class Value(NamedTuple):
    """A value of the chart that may be set."""

    path: str
    default: Any
    meaning: str


def values(text: str) -> Iterator[Value]:
    """Yield the values that have a comment, in their order.

    Raises:
        ValueError: a value has no comment, neither of its own nor below it.
    """
    lines = text.splitlines()

    def below(node: yaml.MappingNode, prefix: str) -> Iterator[Value]:
        for key, value in node.value:
            path = prefix + key.value
            meaning = comment(lines, key.start_mark.line)
            if meaning:
                yield Value(path, yaml.safe_load(yaml.serialize(value)), meaning)
            elif isinstance(value, yaml.MappingNode) and value.value and not value.flow_style:
                yield from below(value, f"{path}.")
            else:
                raise ValueError(f"values.yaml: {path} has no comment that says what it means")

    root = yaml.compose(text)
    if not isinstance(root, yaml.MappingNode):
        raise ValueError("values.yaml: not a mapping")
    yield from below(root, "")


def comment(lines: list[str], line: int) -> str:
    """Return the comment right above a line (counted from 0), as one line."""
    first = line
    while first > 0 and lines[first - 1].strip().startswith("#"):
        first -= 1
    return " ".join(above.strip().removeprefix("#").strip() for above in lines[first:line])


def kind(schema: dict[str, Any], path: str) -> str:
    """Return a value's type for a reader.

    Raises:
        KeyError: the schema has no such value.
    """
    found = schema
    for part in path.split("."):
        found = resolved(schema, found["properties"][part])
    if "enum" in found:
        return " \\| ".join(f"`{value}`" for value in found["enum"])
    if found.get("additionalProperties") and "propertyNames" in found:
        return "map"
    types = found["type"] if isinstance(found["type"], list) else [found["type"]]
    named = [{"array": "list", "object": "map"}.get(one, one) for one in types]
    return " or ".join(named)


def resolved(schema: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """Return a part of the schema, or what it refers to."""
    reference = part.get("$ref")
    return schema["$defs"][reference.rpartition("/")[2]] if reference else part


def page() -> str:
    """Return the README."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    head = HEAD.format(
        description=chart["description"], version=chart["version"], app_version=chart["appVersion"]
    )
    rows = ["| value | type | default | meaning |", "|---|---|---|---|"]
    for value in values((CHART / "values.yaml").read_text(encoding="utf-8")):
        default = json.dumps(value.default)
        meaning = value.meaning.replace("|", "\\|")
        rows.append(f"| `{value.path}` | {kind(schema, value.path)} | `{default}` | {meaning} |")
    return head + "\n".join(rows) + "\n"


if __name__ == "__main__":
    README.write_text(page(), encoding="utf-8")
