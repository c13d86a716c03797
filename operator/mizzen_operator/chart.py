"""Renders the operator's manifests from the Helm chart's files without Helm.

The files hold two kinds of template syntax: plain paths such as `{{ .Values.operator.replicas }}`, and paths
that end in `| toJson`. Helm renders the very same files through `tpl` and lays the rest of its values over
them (templates/operator.yaml); a test compares the two. Beside `.Values` and `.Release` there are `.Names`,
`.Images` and `.Scope`, which both derive from the values.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

_PATH = re.compile(r"\{\{\s*((?:\.[A-Za-z_]\w*)+)\s*(\|\s*toJson\s*)?\}\}")
_OTHER = re.compile(r"\{\{.*?\}\}")


class ChartError(ValueError):
    """A chart file or a value that cannot be rendered; names it."""


def operator_manifests(
    chart: Path, values: Mapping[str, Any], namespace: str, release: str = "mizzen"
) -> list[dict[str, Any]]:
    """Render everything that the operator needs but the CRD.

    Args:
        chart: folder of the chart, with values.yaml and files/*.yaml.
        values: laid over values.yaml; only what differs.
        namespace: namespace of the operator itself.
        release: prefix of the names.

    Returns:
        The manifests, in the order of the files' names.

    Raises:
        ChartError: names the file and the path that has no value, or the value that the chart does not have,
            or that Helm alone can render.
    """
    defaults = yaml.safe_load((chart / "values.yaml").read_text())
    version = yaml.safe_load((chart / "Chart.yaml").read_text())["appVersion"]
    scope = _scope(_overlay(defaults, values, ".Values"), namespace, release, version)
    manifests: list[dict[str, Any]] = []
    for path in sorted((chart / "files").glob("*.yaml")):
        text = _substitute(path.read_text(), scope, path.name)
        manifests += [document for document in yaml.safe_load_all(text) if document]
    return manifests


def _scope(values: Mapping[str, Any], namespace: str, release: str, version: str) -> dict[str, Any]:
    """What paths may lead to; the same as `mizzen.scope` of the chart's templates has."""
    if values["rbac"]["scope"] != "cluster":
        raise ChartError(".Values.rbac.scope: only Helm renders another scope than cluster")
    return {
        "Values": values,
        "Release": {"Name": release, "Namespace": namespace},
        "Names": {
            "app": "mizzen",
            "operator": f"{release}-operator",
            "serviceAccount": f"{release}-operator",
            "gatewayRole": f"{release}-gateway",
        },
        "Images": {
            program: _image(values["images"], program, version)
            for program in ("operator", "engine", "gateway")
        },
        "Scope": {"namespace": values["operator"]["watchNamespace"], "roleKind": "ClusterRole"},
    }


def _image(images: Mapping[str, Any], program: str, version: str) -> str:
    image = images[program]
    name = "/".join(part for part in (images["registry"], image["repository"]) if part)
    return f"{name}@{image['digest']}" if image["digest"] else f"{name}:{image['tag'] or version}"


def _overlay(below: Mapping[str, Any], above: Mapping[str, Any], path: str) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        if key not in below:
            raise ChartError(f"{path}.{key}: the chart has no such value; it has {', '.join(sorted(below))}")
        if below[key] and isinstance(below[key], Mapping) and isinstance(value, Mapping):
            merged[key] = _overlay(below[key], value, f"{path}.{key}")
        else:
            merged[key] = value
    return merged


def _substitute(text: str, scope: Mapping[str, Any], file: str) -> str:
    def value(match: re.Match[str]) -> str:
        found: Any = scope
        for part in match[1].strip(".").split("."):
            if not isinstance(found, Mapping) or part not in found:
                raise ChartError(f"{file}: {match[1]} has no value")
            found = found[part]
        if match[2]:
            return _flow(found)
        if isinstance(found, bool):
            return "true" if found else "false"
        if not isinstance(found, (str, int)):
            raise ChartError(f"{file}: {match[1]} is {found!r}; only strings, integers and booleans fit")
        return str(found)

    plain = _PATH.sub(value, text)
    if other := _OTHER.search(plain):
        raise ChartError(f"{file}: {other[0]} is no plain path, nor one with toJson")
    return plain


def _flow(value: Any) -> str:
    """A value as YAML in one line; JSON's escapes of rare characters are not YAML's."""
    return yaml.safe_dump(value, default_flow_style=True, width=sys.maxsize).removesuffix("...\n").strip()
