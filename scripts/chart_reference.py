# SPDX-License-Identifier: Apache-2.0
"""Generate the README of the Helm chart from its values.

    python scripts/chart_reference.py

Descriptions are the comments in charts/mizzen/values.yaml; types come from values.schema.json. A test checks
that the README is up to date.
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

{description}.

Version {version} of the chart installs Mizzen {app_version}. It requires Kubernetes 1.30 or later and Helm
3.17 or later (the tests run Helm 4).

<!-- skip: tests/chart installs and tests it -->
```console
$ helm install mizzen charts/mizzen --namespace mizzen-system --create-namespace --wait \\
    --set images.registry=registry.example.com/team
$ helm test mizzen --namespace mizzen-system
```

`images.registry` names the registry and organisation that have the images. The chart of a release has it as
the default; the chart in the repository has no default, and is not rendered without it.

The chart installs the CRD and the operator: two replicas with their roles, ServiceAccount, Service,
PodDisruptionBudget and NetworkPolicy. If the cluster has `monitoring.coreos.com/v1`, it also installs
monitors, alert rules and dashboards. [docs/install.md](../../docs/install.md) explains how to install it into
one namespace without cluster-wide rights, how to upgrade it, and how to uninstall it.

## Values

`values.schema.json` rejects any value that is not listed here, with a message that names it.
`scripts/chart_reference.py` generates this page from values.yaml.

"""


class Value(NamedTuple):
    """A documented value of the chart: its dotted path, its default and its description."""

    path: str
    default: Any
    meaning: str


def values(text: str) -> Iterator[Value]:
    """Yield the values of the text of a values.yaml, in file order.

    A mapping without a comment is not yielded itself; the values in it are.

    Raises:
        ValueError: a value has no comment and is not a mapping, or the text is not a mapping.
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
                raise ValueError(f"values.yaml: {path} has no comment that describes it")

    root = yaml.compose(text)
    if not isinstance(root, yaml.MappingNode):
        raise ValueError("values.yaml: not a mapping")
    yield from below(root, "")


def comment(lines: list[str], line: int) -> str:
    """Return the comment directly above a line, joined into one line; `line` counts from 0."""
    first = line
    while first > 0 and lines[first - 1].strip().startswith("#"):
        first -= 1
    return " ".join(above.strip().removeprefix("#").strip() for above in lines[first:line])


def kind(schema: dict[str, Any], path: str) -> str:
    """Return the type of the value at a dotted path, as Markdown for the table.

    Raises:
        KeyError: the schema does not contain the value.
    """
    part = schema
    for name in path.split("."):
        part = resolved(schema, part["properties"][name])
    if "enum" in part:
        return " \\| ".join(f"`{value}`" for value in part["enum"])
    if part.get("additionalProperties") and "propertyNames" in part:
        return "map"
    types = part["type"] if isinstance(part["type"], list) else [part["type"]]
    named = [{"array": "list", "object": "map"}.get(type_name, type_name) for type_name in types]
    return " or ".join(named)


def resolved(schema: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """Return the definition to which the `$ref` of a schema part refers; without `$ref`, the part itself."""
    reference = part.get("$ref")
    return schema["$defs"][reference.rpartition("/")[2]] if reference else part


def page(folder: Path = CHART) -> str:
    """Return the text of the README of the chart in a folder."""
    chart = yaml.safe_load((folder / "Chart.yaml").read_text(encoding="utf-8"))
    schema = json.loads((folder / "values.schema.json").read_text(encoding="utf-8"))
    head = HEAD.format(
        description=chart["description"], version=chart["version"], app_version=chart["appVersion"]
    )
    rows = ["| value | type | default | description |", "|---|---|---|---|"]
    for value in values((folder / "values.yaml").read_text(encoding="utf-8")):
        default = json.dumps(value.default)
        meaning = value.meaning.replace("|", "\\|")
        rows.append(f"| `{value.path}` | {kind(schema, value.path)} | `{default}` | {meaning} |")
    return head + "\n".join(rows) + "\n"


PAGES = {"charts/mizzen/README.md": page}

if __name__ == "__main__":
    README.write_text(page(), encoding="utf-8")
