"""Everything that the operator can be told, in one frozen object; each field is an option and a variable."""

from __future__ import annotations

import argparse
import dataclasses
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any


def _version() -> str:
    try:
        return metadata.version("mizzen")
    except metadata.PackageNotFoundError:
        return "latest"


VERSION = _version()


_CHECK = "`mizzen-operator check` looks whether an installed one works; it has a --help of its own."


def _option(default: Any, text: str, choices: tuple[str, ...] = (), low: float | None = None) -> Any:
    return dataclasses.field(default=default, metadata={"help": text, "choices": choices, "low": low})


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorConfig:
    """Options of `mizzen-operator`; `--engine-image` is also the variable MIZZEN_OPERATOR_ENGINE_IMAGE."""

    engine_image: str = _option(f"mizzen/engine:{VERSION}", "Image of engines whose spec names none")
    gateway_image: str = _option(f"mizzen/gateway:{VERSION}", "Image of the gateways")
    image_pull_policy: str = _option(
        "IfNotPresent", "Pull policy of both images", choices=("Always", "IfNotPresent", "Never")
    )
    gateway_role: str = _option("mizzen-gateway", "Role that gateways are bound to")
    gateway_role_kind: str = _option(
        "ClusterRole",
        "Its kind; a Role is in the namespace that is served, and nothing cluster-wide is needed then",
        choices=("ClusterRole", "Role"),
    )
    namespace: str = _option("", "Serve the InferenceServices of this namespace; of all when empty")

    lease_name: str = _option("mizzen-operator", "Name of the Lease that the leading replica holds")
    lease_namespace: str = _option("default", "Namespace of the Lease")
    lease_owner: str = _option("", "Deployment in that namespace that the Lease goes with; none when empty")
    identity: str = _option("", "Name of this replica in the Lease; the host's name and process when empty")
    lease_seconds: float = _option(10.0, "A leader that is silent this long has lost the Lease", low=1)
    renew_seconds: float = _option(7.0, "A leader that cannot renew for this long ends", low=0.5)
    retry_seconds: float = _option(2.0, "Time between tries to take or renew the Lease", low=0.1)

    health_host: str = _option("127.0.0.1", "Address of /healthz, /readyz and /metrics")
    health_port: int = _option(8080, "Port of /healthz, /readyz and /metrics", low=0)
    log_level: str = _option(
        "info", "Least severe messages that are logged", choices=("debug", "info", "warning", "error")
    )
    workers: int = _option(8, "Services of one namespace that are reconciled at once", low=1)
    resync_seconds: float = _option(600.0, "Every service is looked at once in this time at least", low=1)
    recheck_seconds: float = _option(
        30.0,
        "The same for a service of which something does not run; and for children that no watch tells of, "
        "such as policies",
        low=1,
    )
    rotate_keys_days: float = _option(
        90.0, "CURVE keys and admin tokens that are older are rotated; 0 is only when asked to", low=0
    )
    requests_per_second: float = _option(50.0, "Writes to the API server, on average", low=1)
    request_burst: int = _option(100, "Writes to the API server at once", low=1)

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ValueError: names the option and what would be right.
        """
        for field in dataclasses.fields(self):
            value, flag = getattr(self, field.name), "--" + field.name.replace("_", "-")
            choices, low = field.metadata["choices"], field.metadata["low"]
            if choices and value not in choices:
                raise ValueError(f"{flag} must be one of {', '.join(choices)}, not {value!r}")
            if low is not None and value < low:
                raise ValueError(f"{flag} must be at least {low}, not {value}")
        if self.gateway_role_kind == "Role" and not self.namespace:
            raise ValueError("--gateway-role-kind Role needs --namespace: a Role is of one namespace")
        if not self.lease_seconds > self.renew_seconds > self.retry_seconds:
            raise ValueError("--lease-seconds must exceed --renew-seconds, and that --retry-seconds")

    @property
    def holder(self) -> str:
        """This replica's name in the Lease."""
        return self.identity or f"{socket.gethostname()}-{os.getpid()}"


def parse_config(arguments: Sequence[str], environment: Mapping[str, str]) -> OperatorConfig:
    """Read options; an option wins over its variable, and that over the default.

    Raises:
        ValueError: an option or variable has a value that is not right; names it.
        SystemExit: an unknown option, `--help` or `--version`.
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
