# SPDX-License-Identifier: Apache-2.0
"""Resolves references and container paths in the command and environment of a container."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mizzen_local.node.images import programs_folder
from mizzen_local.node.sources import MissingError, PodSources, read_field

REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_.\-][A-Za-z0-9_.\-]*)\)")
INHERITED_VARIABLES = re.compile(
    r"(LANG|LC_\w+|TZ|TMPDIR|LD_LIBRARY_PATH|SSL_CERT_\w+|REQUESTS_CA_BUNDLE|CUDA_\w+|OMP_\w+)$"
)
UNITS = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12} | {
    f"{letter}i": float(2 ** (10 * power)) for power, letter in enumerate("KMGT", start=1)
}


class PathMap:
    """Maps paths in a container's file system to paths on this machine."""

    def __init__(self, places: Mapping[str, Path]) -> None:
        self.paths = dict(places)
        longest_first = sorted((path.rstrip("/") for path in places), key=len, reverse=True)
        paths = "|".join(map(re.escape, longest_first))
        # Matches a path at the start, after the first = (of an option or a variable), or in a file URL.
        self._pattern = re.compile(rf"^((?:[^=\s]*=)?(?:file://)?)({paths})(?=/|$)") if paths else None

    def rewrite(self, text: str) -> str:
        """Return `text` with its container path, if it has one, replaced by the path on this machine.

        The path must be at the start of the text, or directly after the text's first `=`. In both positions,
        `file://` may precede the path.
        """
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda match: match[1] + str(self.paths[match[2]]), text, count=1)


def expand_references(text: str, variables: Mapping[str, str]) -> str:
    """Replace `$(NAME)` with the variable's value and `$$` with `$`; keep references to unknown variables."""

    def substitute(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return REFERENCE.sub(substitute, text)


def base_environment(home: Path, hostname: str) -> dict[str, str]:
    """Return the variables that an image would set, and the inherited ones that local programs need."""
    inherited = {name: value for name, value in os.environ.items() if INHERITED_VARIABLES.match(name)}
    path = os.environ.get("PATH", os.defpath)
    return {
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        **inherited,
        "PATH": f"{programs_folder()}:{path}",
        "HOME": str(home),
        "HOSTNAME": hostname,
    }


async def resolve_variables(
    pod: Mapping[str, Any], container: Mapping[str, Any], sources: PodSources
) -> dict[str, str]:
    """Return the variables of `envFrom` and `env`, in Kubernetes' order and with references expanded.

    Raises:
        MissingError: a Secret, ConfigMap or key does not exist and is not optional.
    """
    resolved: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        prefix = source.get("prefix", "")
        for kind in ("configMapRef", "secretRef"):
            if reference := source.get(kind):
                data = await sources.read_data(kind.removesuffix("Ref"), reference)
                resolved |= {prefix + key: value.decode() for key, value in data.items()}
    for entry in container.get("env", ()):
        value = await _resolve_entry(pod, container, entry, resolved, sources)
        if value is not None:
            resolved[entry["name"]] = value
    return resolved


async def _resolve_entry(
    pod: Mapping[str, Any],
    container: Mapping[str, Any],
    entry: Mapping[str, Any],
    resolved: Mapping[str, str],
    sources: PodSources,
) -> str | None:
    source = entry.get("valueFrom")
    if source is None:
        return expand_references(entry.get("value", ""), resolved)
    if "fieldRef" in source:
        return read_field(pod, source["fieldRef"]["fieldPath"])
    if "resourceFieldRef" in source:
        return resolve_resource_field(pod, container, source["resourceFieldRef"])
    for kind in ("secret", "configMap"):
        if reference := source.get(f"{kind}KeyRef"):
            data = await sources.read_data(kind, reference)
            if reference["key"] in data:
                return data[reference["key"]].decode()
            if reference.get("optional"):
                return None
            raise MissingError(f"couldn't find key {reference['key']} in {kind} {reference['name']!r}")
    raise MissingError(f"env {entry['name']}: mizzen-local does not support this valueFrom")


def resolve_resource_field(
    pod: Mapping[str, Any], container: Mapping[str, Any], reference: Mapping[str, Any]
) -> str:
    """Return the value of a `resourceFieldRef`, in units of its divisor, rounded up.

    If a limit is not set, the number of CPUs or the memory of this machine is used instead.
    """
    container_name = reference.get("containerName")
    if container_name:
        containers = [*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())]
        container = next((item for item in containers if item["name"] == container_name), container)
    kind, _, name = reference["resource"].partition(".")
    amount = container.get("resources", {}).get(kind, {}).get(name)
    if amount is None and kind == "limits":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        amount = {"cpu": str(os.cpu_count() or 1), "memory": str(memory)}.get(name)
    return str(
        math.ceil(parse_quantity(amount or "0") / (parse_quantity(reference.get("divisor") or "0") or 1.0))
    )


def parse_quantity(text: str) -> float:
    """Return the value of a Kubernetes quantity such as `500m`, `2` or `4Gi`.

    Raises:
        ValueError: the text is not a quantity.
    """
    match = re.fullmatch(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)([A-Za-z]*)", str(text))
    if match is None or match[2] not in UNITS:
        raise ValueError(f"{text!r} is not a quantity")
    return float(match[1]) * UNITS[match[2]]
