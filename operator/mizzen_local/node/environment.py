"""Commands and variables of a container: references resolved, paths of its file system made real."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mizzen_local.node.images import programs
from mizzen_local.node.sources import MissingError, Sources, field

REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_.\-][A-Za-z0-9_.\-]*)\)")
INHERITED = re.compile(
    r"(LANG|LC_\w+|TZ|TMPDIR|LD_LIBRARY_PATH|SSL_CERT_\w+|REQUESTS_CA_BUNDLE|CUDA_\w+|OMP_\w+)$"
)
UNITS = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12} | {
    f"{letter}i": float(2 ** (10 * power)) for power, letter in enumerate("KMGT", start=1)
}


class Places:
    """Maps paths of a container's file system to paths on this machine."""

    def __init__(self, places: Mapping[str, Path]) -> None:
        self.places = dict(places)
        longest_first = sorted((path.rstrip("/") for path in places), key=len, reverse=True)
        paths = "|".join(map(re.escape, longest_first))
        # At the start, after the = of an option or a variable, or as a file URL.
        self._pattern = re.compile(rf"^((?:[^=\s]*=)?(?:file://)?)({paths})(?=/|$)") if paths else None

    def rewrite(self, text: str) -> str:
        """A path at the start of `text`, or behind its first `=` or `file://`, made this machine's."""
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda found: found[1] + str(self.places[found[2]]), text, count=1)


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Put variables in for `$(NAME)`; unknown ones stay as they are, and `$$` is one `$`."""

    def put(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else variables.get(found[1], found[0])

    return REFERENCE.sub(put, text)


def base_environment(home: Path, hostname: str) -> dict[str, str]:
    """Return the variables that an image would set, and those needed by programs of this machine."""
    inherited = {name: value for name, value in os.environ.items() if INHERITED.match(name)}
    path = os.environ.get("PATH", os.defpath)
    return {
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        **inherited,
        "PATH": f"{programs()}:{path}",
        "HOME": str(home),
        "HOSTNAME": hostname,
    }


async def variables(pod: Mapping[str, Any], container: Mapping[str, Any], sources: Sources) -> dict[str, str]:
    """The variables of `envFrom` and `env`, in the order and with the references of Kubernetes.

    Raises:
        MissingError: a Secret, ConfigMap or key that is not optional is not there.
    """
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        prefix = source.get("prefix", "")
        for kind in ("configMapRef", "secretRef"):
            if reference := source.get(kind):
                data = await sources.data(kind.removesuffix("Ref"), reference)
                found |= {prefix + key: value.decode() for key, value in data.items()}
    for entry in container.get("env", ()):
        value = await _value(pod, container, entry, found, sources)
        if value is not None:
            found[entry["name"]] = value
    return found


async def _value(
    pod: Mapping[str, Any],
    container: Mapping[str, Any],
    entry: Mapping[str, Any],
    earlier: Mapping[str, str],
    sources: Sources,
) -> str | None:
    source = entry.get("valueFrom")
    if source is None:
        return expand(entry.get("value", ""), earlier)
    if "fieldRef" in source:
        return field(pod, source["fieldRef"]["fieldPath"])
    if "resourceFieldRef" in source:
        return resource(pod, container, source["resourceFieldRef"])
    for kind in ("secret", "configMap"):
        if reference := source.get(f"{kind}KeyRef"):
            data = await sources.data(kind, reference)
            if reference["key"] in data:
                return data[reference["key"]].decode()
            if reference.get("optional"):
                return None
            raise MissingError(f"couldn't find key {reference['key']} in {kind} {reference['name']!r}")
    raise MissingError(f"env {entry['name']}: mizzen-local does not know this valueFrom")


def resource(pod: Mapping[str, Any], container: Mapping[str, Any], reference: Mapping[str, Any]) -> str:
    """A `resourceFieldRef`, rounded up to whole divisors; without a limit it is the machine's."""
    wanted = reference.get("containerName")
    if wanted:
        everything = [*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())]
        container = next((item for item in everything if item["name"] == wanted), container)
    kind, _, name = reference["resource"].partition(".")
    amount = container.get("resources", {}).get(kind, {}).get(name)
    if amount is None and kind == "limits":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        amount = {"cpu": str(os.cpu_count() or 1), "memory": str(memory)}.get(name)
    return str(math.ceil(quantity(amount or "0") / (quantity(reference.get("divisor") or "0") or 1.0)))


def quantity(text: str) -> float:
    """The value of a Kubernetes quantity such as `500m`, `2` or `4Gi`.

    Raises:
        ValueError: it is none.
    """
    found = re.fullmatch(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)([A-Za-z]*)", str(text))
    if found is None or found[2] not in UNITS:
        raise ValueError(f"{text!r} is no quantity")
    return float(found[1]) * UNITS[found[2]]
