# SPDX-License-Identifier: Apache-2.0
"""Builds the parts of gateway and engine pods that configure tracing."""

from __future__ import annotations

from typing import Any

from mizzen_operator.api.types import Tracing
from mizzen_operator.config import OperatorConfig

HEADERS_FOLDER = "/var/run/mizzen/otlp"
HEADERS_FILE = f"{HEADERS_FOLDER}/headers"
_VOLUME = "mizzen-otlp"


def effective_tracing(tracing: Tracing, config: OperatorConfig) -> Tracing:
    """Return a service's tracing; if the service names no collector, that of the operator's options.

    A service's own headers take precedence for either collector: with them, it says who it is.
    """
    if tracing.endpoint or not config.otlp_endpoint:
        return tracing
    name = config.otlp_headers_secret
    common = (name, config.otlp_headers_key) if name else None
    return Tracing(config.otlp_endpoint, tracing.sampling_percent, tracing.headers_secret or common)


def headers_volumes(tracing: Tracing) -> list[dict[str, Any]]:
    """Return the volume with the headers for the collector; an empty list if it requires no headers.

    A missing Secret does not keep pods from starting: traces must not make serving depend on them.
    """
    if not tracing.endpoint or tracing.headers_secret is None:
        return []
    name, key = tracing.headers_secret
    items = [{"key": key, "path": "headers"}]
    source = {"secretName": name, "items": items, "defaultMode": 0o444, "optional": True}
    return [{"name": _VOLUME, "secret": source}]


def headers_mounts(tracing: Tracing) -> list[dict[str, Any]]:
    """Return the mount of `headers_volumes`."""
    return [
        {"name": volume["name"], "mountPath": HEADERS_FOLDER, "readOnly": True}
        for volume in headers_volumes(tracing)
    ]


def engine_variables(tracing: Tracing, service: str, group: int) -> list[dict[str, Any]]:
    """Return the environment variables that configure an engine's tracing; empty if tracing is off.

    Engines get variables instead of options, because an image of an older release would reject an option. The
    variables POD_NAMESPACE and POD_NAME must precede them.
    """
    if not tracing.endpoint:
        return []
    attributes = f"{_POD_ATTRIBUTES},mizzen.service={service},mizzen.group={group}"
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": tracing.endpoint, "OTEL_RESOURCE_ATTRIBUTES": attributes}
    if tracing.headers_secret is not None:
        variables["MIZZEN_OTLP_HEADERS_FILE"] = HEADERS_FILE
    return [{"name": name, "value": value} for name, value in variables.items()]


def gateway_options(tracing: Tracing) -> list[tuple[str, str]]:
    """Return the options that configure a gateway's tracing; empty if tracing is off."""
    if not tracing.endpoint:
        return []
    headers = [("--otlp-headers-file", HEADERS_FILE)] if tracing.headers_secret is not None else []
    return [("--otlp-endpoint", tracing.endpoint), *headers]


def gateway_variables(tracing: Tracing) -> list[dict[str, Any]]:
    """Return a gateway's environment variables for tracing; empty if tracing is off.

    Traces that begin at the gateway are sampled; for other traces, the caller's decision applies.
    """
    if not tracing.endpoint:
        return []
    return [
        {"name": "OTEL_TRACES_SAMPLER", "value": "parentbased_traceidratio"},
        {"name": "OTEL_TRACES_SAMPLER_ARG", "value": f"{tracing.sampling_percent / 100:g}"},
        {"name": "OTEL_RESOURCE_ATTRIBUTES", "value": _POD_ATTRIBUTES},
    ]


_POD_ATTRIBUTES = "k8s.namespace.name=$(POD_NAMESPACE),k8s.pod.name=$(POD_NAME)"
