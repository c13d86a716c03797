# SPDX-License-Identifier: Apache-2.0
"""Addresses of hosts, which may be IPv6 addresses without brackets, as Kubernetes writes those of pods."""

from __future__ import annotations

import socket


def join_address(host: str, port: int) -> str:
    """Return a host name or IP address and a port as in URLs; an IPv6 address is put in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_family(host: str) -> socket.AddressFamily:
    """Return the family of the sockets that listen on a host: IPv6 for an IPv6 address, otherwise IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET
