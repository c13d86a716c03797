# SPDX-License-Identifier: Apache-2.0
"""Settings for the export of spans by OTLP over HTTP, shared by gateways and engines.

This module does not import OpenTelemetry; `mizzen.common.span_export` does.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

log = logging.getLogger(__name__)

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
HEADERS_FILE_VARIABLE = "MIZZEN_OTLP_HEADERS_FILE"
ENDPOINT_HELP = (
    "Base URL of an OpenTelemetry collector (OTLP over HTTP); OTEL_EXPORTER_OTLP_ENDPOINT by default"
)
HEADERS_FILE_HELP = (
    "File with headers of requests to the collector, as NAME=VALUE,... with percent-encoded values; "
    f"it is read again when it changes; {HEADERS_FILE_VARIABLE} by default"
)
MAX_HEADERS_BYTES = 16_384
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\t\x20-\x7e]*")


class TracingUnavailable(ValueError):
    """Tracing is configured, but OpenTelemetry is not installed."""

    def __init__(self, url: str, module: str | None) -> None:
        super().__init__(
            f"tracing to {url.partition('?')[0]} needs OpenTelemetry ({module} is missing): "
            "pip install 'mizzen[tracing]', or unset --otlp-endpoint and OTEL_EXPORTER_OTLP_ENDPOINT"
        )


def check_endpoint(endpoint: str, name: str = "--otlp-endpoint") -> None:
    """Check the base URL of a collector; it may be empty.

    Args:
        endpoint: value of the option or variable `name`.
        name: option or variable, for messages.

    Raises:
        ValueError: it is not an HTTP URL, or contains credentials, which the message does not repeat.
    """
    if not endpoint:
        return
    authority = re.split("[/?#]", endpoint.partition("//")[2] or endpoint, maxsplit=1)[0]
    try:
        parts = urlsplit(endpoint)
        _ = parts.port  # raises ValueError if it is no port
        valid = parts.scheme in ("http", "https") and bool(parts.hostname)
        valid = valid and not re.search(r"[\s?#]", endpoint)
    except ValueError:
        valid = False
    # In a URL with a typing error, credentials may be anywhere before an "@".
    if "@" in (authority if valid else endpoint):
        raise ValueError(
            f"{name} must not contain credentials: write them to the file of --otlp-headers-file, or in "
            "Kubernetes to the Secret of headersSecretRef, as authorization=Basic%20..."
        )
    if not valid:
        raise ValueError(
            f"{name} must be an http:// or https:// URL, such as http://otel-collector:4318, "
            f"not {re.split('[?#]', endpoint, maxsplit=1)[0]!r}"
        )


def traces_endpoint(endpoint: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the URL to which spans are posted, or "" if tracing is off.

    `endpoint` is the base URL of the collector. If it is empty, the variables OTEL_SDK_DISABLED,
    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT and OTEL_EXPORTER_OTLP_ENDPOINT of `environment` decide. An unusable
    value of these turns tracing off, which is logged: variables may be meant for other programs.
    """
    if endpoint:
        return endpoint.rstrip("/") + "/v1/traces"
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return ""
    name = next((name for name in ENDPOINT_VARIABLES if environment.get(name)), "")
    url = environment.get(name, "")
    full = name == ENDPOINT_VARIABLES[0]
    try:
        check_endpoint(url.partition("?")[0] if full else url, name)
    except ValueError as error:
        log.warning("no traces: %s", error)
        return ""
    return url if full or not url else url.rstrip("/") + "/v1/traces"


def parse_headers(text: str) -> dict[str, str]:
    """Return the headers in a text, by lower-case name.

    The text has the format of the variable OTEL_EXPORTER_OTLP_HEADERS: `name=value` pairs that are separated
    by commas, with percent-encoded values.

    Raises:
        ValueError: an entry is malformed. The message gives its number, but not its text, which may be
            secret.
    """
    headers = {}
    for number, entry in enumerate(text.strip().split(","), 1):
        if not entry.strip():
            continue
        name, equals, encoded = entry.partition("=")
        name, value = unquote(name.strip()), unquote(encoded.strip())
        if not equals or not _NAME.fullmatch(name):
            raise ValueError(f"entry {number} is not NAME=VALUE")
        if not _VALUE.fullmatch(value):
            raise ValueError(f"the value of entry {number} is not printable ASCII")
        headers[name.lower()] = value
    return headers


class HeadersFile:
    """Headers in a file that may change or appear later, like the files of a mounted Secret.

    Problems are logged, never raised, because a telemetry setting must not prevent a program from serving.
    """

    def __init__(self, path: str, environment: Mapping[str, str] = os.environ) -> None:
        """Name the file; an empty path means the variable MIZZEN_OTLP_HEADERS_FILE, or no file."""
        self._path = path or environment.get(HEADERS_FILE_VARIABLE, "")
        self._content: bytes | None = None
        self._headers: dict[str, str] = {}
        self._problem = ""

    def read(self) -> Mapping[str, str]:
        """Return the current headers: those of the last version of the file that was readable and valid."""
        if not self._path:
            return self._headers
        try:
            with Path(self._path).open("rb") as file:
                content = file.read(MAX_HEADERS_BYTES + 1)
        except OSError as error:
            self._report(error.strerror or type(error).__name__)
            return self._headers
        if content != self._content:
            self._content = content
            try:
                if len(content) > MAX_HEADERS_BYTES:
                    raise ValueError(f"the file is longer than {MAX_HEADERS_BYTES} bytes")
                self._headers = parse_headers(content.decode(errors="replace"))
                self._problem = ""
            except ValueError as error:
                self._report(str(error))
        return self._headers

    def _report(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            fields = {"option": "--otlp-headers-file", "file": self._path, "reason": problem}
            log.warning("cannot read the headers for the trace collector", extra={"fields": fields})
