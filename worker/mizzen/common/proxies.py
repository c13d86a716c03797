# SPDX-License-Identifier: Apache-2.0
"""Chooses the proxy for a URL from the environment, by the rules of Go's HTTP clients, such as kubectl.

Python's own rules differ: they ignore networks in NO_PROXY. Clusters that give all pods a proxy list their
networks there, so that pods reach the API server directly.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

DEFAULT_PORTS = {"http": 80, "https": 443}


def proxy_for(url: str, environment: Mapping[str, str]) -> str | None:
    """Return the URL of the proxy to use for a URL; None to connect directly.

    Args:
        url: absolute URL with the scheme http or https.
        environment: variables; HTTPS_PROXY, HTTP_PROXY and NO_PROXY are read, in capitals or not. NO_PROXY
            lists names (with all names below them), names that begin with a dot (only names below them), IP
            addresses, networks such as 10.0.0.0/8, each possibly with a port, or `*` for everything.

    Raises:
        ValueError: the URL has an invalid port.
    """
    parts = urlsplit(url)
    proxy = _variable(environment, f"{parts.scheme}_proxy")
    host = (parts.hostname or "").rstrip(".")
    port = parts.port or DEFAULT_PORTS.get(parts.scheme, 0)
    if not proxy or not host or _is_direct(host, port, _variable(environment, "no_proxy")):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _variable(environment: Mapping[str, str], name: str) -> str:
    return environment.get(name.upper(), "") or environment.get(name, "")


def _is_direct(host: str, port: int, exceptions: str) -> bool:
    address = _ip_address(host)
    if host == "localhost" or (address is not None and address.is_loopback):
        return True
    return any(
        _matches(host, address, port, entry.strip().lower())
        for entry in exceptions.split(",")
        if entry.strip()
    )


def _matches(
    host: str, address: ipaddress.IPv4Address | ipaddress.IPv6Address | None, port: int, entry: str
) -> bool:
    if entry == "*":
        return True
    if "/" in entry:
        try:
            return address is not None and address in ipaddress.ip_network(entry, strict=False)
        except ValueError:
            return False
    name, wanted_port = _split_port(entry)
    if wanted_port and wanted_port != str(port):
        return False
    if (wanted := _ip_address(name)) is not None:
        return address == wanted
    name = name.removeprefix("*")
    if name.startswith("."):
        return host.endswith(name)
    return host == name or host.endswith(f".{name}")


def _split_port(entry: str) -> tuple[str, str]:
    """Return name and port of an entry; the port is empty if it is missing."""
    if _ip_address(entry) is not None:
        return entry, ""
    name, separator, port = entry.rpartition(":")
    return (name, port) if separator and port.isdecimal() else (entry, "")


def _ip_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
