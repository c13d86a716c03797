# SPDX-License-Identifier: Apache-2.0
"""Addresses of pods and Services, which may be IPv6 addresses; Kubernetes writes them without brackets."""

from __future__ import annotations


def join_address(host: str, port: int) -> str:
    """Return a host name or IP address and a port as in URLs; an IPv6 address is put in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
