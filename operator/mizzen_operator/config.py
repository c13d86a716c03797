# SPDX-License-Identifier: Apache-2.0
"""Configuration of the operator: a frozen dataclass, set from options and environment variables."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from mizzen_operator.api.accelerator_profiles import Profiles, parse_profiles


def _version() -> str:
    try:
        return metadata.version("mizzen")
    except metadata.PackageNotFoundError:
        return "latest"


VERSION = _version()
_PORT = "[0-9]{1,4}|[1-5][0-9]{4}|6([0-4][0-9]{3}|5([0-4][0-9]{2}|5([0-2][0-9]|3[0-5])))"
_COLLECTOR = re.compile(rf"https?://([\w.-]+|\[[0-9A-Fa-f:.]+\])(:({_PORT}))?(/[^ ?#]*)?", re.ASCII)


_CHECK = "`mizzen-operator check` tests whether an installed operator works; see its --help."


def _option(default: Any, text: str, choices: tuple[str, ...] = (), low: float | None = None) -> Any:
    return dataclasses.field(default=default, metadata={"help": text, "choices": choices, "low": low})


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorConfig:
    """Options of `mizzen-operator`.

    Each can also be set by an environment variable: for example, `--engine-image` by
    MIZZEN_OPERATOR_ENGINE_IMAGE.
    """

    # A name without a registry would mean a namespace of Docker Hub that is not Mizzen's.
    engine_image: str = _option(
        f"localhost/mizzen/engine:{VERSION}", "Image of engines whose spec does not name one"
    )
    gateway_image: str = _option(f"localhost/mizzen/gateway:{VERSION}", "Image of gateways")
    image_pull_policy: str = _option(
        "IfNotPresent", "Pull policy of both images", choices=("Always", "IfNotPresent", "Never")
    )
    gateway_role: str = _option("mizzen-gateway", "Role to bind gateways to")
    gateway_role_kind: str = _option(
        "ClusterRole",
        "Kind of that role; a Role belongs to the served namespace and needs no cluster-wide permissions",
        choices=("ClusterRole", "Role"),
    )
    namespace: str = _option("", "Namespace whose InferenceServices are served; all namespaces if empty")

    otlp_endpoint: str = _option(
        "", "Base URL of an OpenTelemetry collector for services whose spec does not name one"
    )
    otlp_headers_secret: str = _option(
        "", "Secret in each service's namespace with headers of requests to that collector"
    )
    otlp_headers_key: str = _option("headers", "Key of the headers in that Secret")

    accelerator_profiles: str = _option(
        "{}", "JSON object with the accelerator profiles that services name in spec.accelerator.profile"
    )

    lease_name: str = _option("mizzen-operator", "Name of the Lease held by the leading replica")
    lease_namespace: str = _option("default", "Namespace of the Lease")
    lease_owner: str = _option("", "Deployment in that namespace that owns the Lease; no owner if empty")
    identity: str = _option("", "Name of this replica in the Lease; host name and process id if empty")
    lease_seconds: float = _option(
        10.0, "Time without a renewal after which a leader has lost the Lease", low=1
    )
    renew_seconds: float = _option(
        7.0, "Time without a successful renewal after which a leader exits", low=0.5
    )
    retry_seconds: float = _option(2.0, "Time between attempts to acquire or renew the Lease", low=0.1)

    health_host: str = _option("127.0.0.1", "Address of /healthz, /readyz and /metrics")
    health_port: int = _option(8080, "Port of /healthz, /readyz and /metrics", low=0)
    log_level: str = _option(
        "info", "Lowest severity of log messages", choices=("debug", "info", "warning", "error")
    )
    workers: int = _option(8, "Services of one namespace that are reconciled concurrently", low=1)
    resync_seconds: float = _option(600.0, "Longest time between two reconcile passes over a service", low=1)
    recheck_seconds: float = _option(
        30.0,
        "Longest time between two reconcile passes while a part of a service does not run; also "
        "the interval at which children without a watch, such as policies, are polled",
        low=1,
    )
    rotate_keys_days: float = _option(
        90.0, "Age at which CURVE keys and admin tokens are rotated; 0: only on request", low=0
    )
    requests_per_second: float = _option(50.0, "Average rate of writes to the API server", low=1)
    request_burst: int = _option(100, "Largest burst of writes to the API server", low=1)

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ValueError: a value is invalid; the message names the option and the allowed values.
        """
        for field in dataclasses.fields(self):
            value, flag = getattr(self, field.name), "--" + field.name.replace("_", "-")
            choices, low = field.metadata["choices"], field.metadata["low"]
            if choices and value not in choices:
                raise ValueError(f"{flag} must be one of {', '.join(choices)}, not {value!r}")
            if low is not None and value < low:
                raise ValueError(f"{flag} must be at least {low}, not {value}")
        if self.otlp_endpoint and not _COLLECTOR.fullmatch(self.otlp_endpoint):
            raise ValueError(
                "--otlp-endpoint must be a URL without credentials, such as "
                "http://otel-collector.observability:4318"
            )
        try:
            self.profiles()
        except ValueError as error:
            raise ValueError(f"--accelerator-profiles: {error}") from error
        if self.gateway_role_kind == "Role" and not self.namespace:
            raise ValueError(
                "--gateway-role-kind Role needs --namespace, because a Role is limited to one namespace"
            )
        if not self.lease_seconds > self.renew_seconds > self.retry_seconds:
            raise ValueError("--lease-seconds must exceed --renew-seconds, which must exceed --retry-seconds")

    def profiles(self) -> Profiles:
        """Parse the accelerator profiles.

        Raises:
            ValueError: they are invalid; the message names the profile and the field.
        """
        return parse_profiles(self.accelerator_profiles)

    @property
    def holder(self) -> str:
        """Name of this replica in the Lease."""
        return self.identity or f"{socket.gethostname()}-{os.getpid()}"


def parse_config(arguments: Sequence[str], environment: Mapping[str, str]) -> OperatorConfig:
    """Parse the options; an option overrides its variable, and the variable overrides the default.

    Args:
        arguments: command-line arguments, without the name of the program.
        environment: environment variables.

    Raises:
        ValueError: an option or variable has an invalid value; the message names it.
        SystemExit: the arguments contain an unknown option, `--help` or `--version`.
    """
    parser = argparse.ArgumentParser(
        "mizzen-operator", description="The control plane of Mizzen.", epilog=_CHECK
    )
    parser.add_argument("--version", action="version", version=VERSION)
    kinds = {"str": str, "int": int, "float": float}
    for field in dataclasses.fields(OperatorConfig):
        kind = kinds[str(field.type)]
        variable = f"MIZZEN_OPERATOR_{field.name.upper()}"
        default: Any = field.default
        if variable in environment:
            try:
                default = kind(environment[variable])
            except ValueError as error:
                raise ValueError(f"{variable}: {error}") from error
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            type=kind,
            default=default,
            metavar="|".join(field.metadata["choices"]) or field.name.rpartition("_")[2].upper(),
            help=f"{field.metadata['help']} ({default!r})".replace("%", "%%"),
        )
    return OperatorConfig(**vars(parser.parse_args(list(arguments))))
