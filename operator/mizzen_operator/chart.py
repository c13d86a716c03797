# SPDX-License-Identifier: Apache-2.0
"""Renders the operator's manifests from the Helm chart's files, without Helm.

The files use two kinds of template syntax: plain paths such as `{{ .Values.operator.replicas }}`, and paths
with `| toJson`. Helm renders the same files through `tpl` and merges in the values that this module does not
support (templates/operator.yaml); a test compares the results. A path begins with `.Values`, `.Release`, or
one of `.Names`, `.Images` and `.Scope`, which both renderers derive from the values.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mizzen_operator.kube.go_json import go_json

_PATH = re.compile(r"\{\{\s*((?:\.[A-Za-z_]\w*)+)\s*(\|\s*toJson\s*)?\}\}")
_OTHER = re.compile(r"\{\{.*?\}\}")
_WITH_REGISTRY = re.compile(r"(localhost|[^/]*[.:][^/]*)/")


class ChartError(ValueError):
    """A chart file or a value cannot be rendered; the message names it."""


def operator_manifests(
    chart: Path, values: Mapping[str, Any], namespace: str, release: str = "mizzen"
) -> list[dict[str, Any]]:
    """Render everything that the operator needs, except the CRD.

    Args:
        chart: folder of the chart, with values.yaml and files/*.yaml.
        values: values that differ from values.yaml.
        namespace: namespace of the operator itself.
        release: name of the release, which is the prefix of all names.

    Returns:
        The manifests, in the order of the files' names.

    Raises:
        ChartError: a file refers to a value that does not exist, `values` contains one that the chart does
            not have, only Helm can render a file or value, or an image has no registry; the message names
            the file or the value.
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
    """Return the objects in which template paths are looked up.

    They are the same as in the chart's template `mizzen.scope`.
    """
    if values["rbac"]["scope"] != "cluster":
        raise ChartError(".Values.rbac.scope: only Helm can render a scope other than cluster")
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
        "Scope": {
            "acceleratorProfiles": go_json(values["acceleratorProfiles"]).decode(),
            "namespace": values["operator"]["watchNamespace"],
            "roleKind": "ClusterRole",
        },
    }


def _image(images: Mapping[str, Any], program: str, version: str) -> str:
    """Return an image reference; the chart's template `mizzen.image` returns the same."""
    image = images[program]
    name = image["repository"]
    if not _WITH_REGISTRY.match(name):
        if not images["registry"]:
            raise ChartError(
                f".Values.images.registry: set it to the registry and organisation that have the image {name}"
            )
        name = f"{images['registry']}/{name}"
    return f"{name}@{image['digest']}" if image["digest"] else f"{name}:{image['tag'] or version}"


def _overlay(base: Mapping[str, Any], values: Mapping[str, Any], path: str) -> dict[str, Any]:
    merged = dict(base)
    for key, value in values.items():
        if key not in base:
            raise ChartError(f"{path}.{key}: the chart has no such value; it has {', '.join(sorted(base))}")
        if base[key] and isinstance(base[key], Mapping) and isinstance(value, Mapping):
            merged[key] = _overlay(base[key], value, f"{path}.{key}")
        else:
            merged[key] = value
    return merged


def _substitute(text: str, scope: Mapping[str, Any], file: str) -> str:
    def value(match: re.Match[str]) -> str:
        node: Any = scope
        for part in match[1].strip(".").split("."):
            if not isinstance(node, Mapping) or part not in node:
                raise ChartError(f"{file}: {match[1]} has no value")
            node = node[part]
        if match[2]:
            return _flow(node)
        if isinstance(node, bool):
            return "true" if node else "false"
        if not isinstance(node, (str, int)):
            raise ChartError(
                f"{file}: {match[1]} is {node!r}; without toJson only strings, integers and booleans fit"
            )
        return str(node)

    plain = _PATH.sub(value, text)
    if other := _OTHER.search(plain):
        raise ChartError(f"{file}: {other[0]} is neither a plain path nor a path with toJson")
    return plain


def _flow(value: Any) -> str:
    """Format a value as one line of YAML; JSON cannot be used, because YAML lacks some of its escapes."""
    return yaml.safe_dump(value, default_flow_style=True, width=sys.maxsize).removesuffix("...\n").strip()
