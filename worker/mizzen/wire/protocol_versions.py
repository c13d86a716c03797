# SPDX-License-Identifier: Apache-2.0
"""Negotiates the version of the wire protocol that a connection uses.

A gateway sends the oldest and the newest version that it speaks, and the engine chooses the newest version
that both speak. Gateways and engines of two consecutive releases therefore always have a version in common.
"""

from __future__ import annotations

from mizzen.wire.messages import OLDEST_PROTOCOL, PROTOCOL, Hello, Welcome


class ProtocolMismatch(ValueError):
    """Gateway and engine have no version of the protocol in common; the text says which one to upgrade."""


def choose_version(hello: Hello) -> int:
    """Return the newest version that this engine and a gateway speak.

    Raises:
        ProtocolMismatch: there is no such version.
    """
    oldest, newest = hello.protocol, max(hello.protocol, hello.newest_protocol)
    chosen = min(newest, PROTOCOL)
    if chosen < max(oldest, OLDEST_PROTOCOL):
        outdated = "gateway" if newest < OLDEST_PROTOCOL else "engine"
        raise ProtocolMismatch(
            f"Hello.protocol: the gateway speaks {describe_versions(oldest, newest)} of the wire protocol, "
            f"this engine {describe_versions(OLDEST_PROTOCOL, PROTOCOL)}; upgrade the {outdated}"
        )
    return chosen


def check_version(welcome: Welcome, endpoint: str) -> None:
    """Check that this gateway speaks the version that an engine has chosen.

    Raises:
        ProtocolMismatch: it does not; the text names the engine's endpoint.
    """
    if not OLDEST_PROTOCOL <= welcome.protocol <= PROTOCOL:
        outdated = "engine" if welcome.protocol < OLDEST_PROTOCOL else "gateway"
        raise ProtocolMismatch(
            f"Welcome.protocol: the engine at {endpoint} speaks "
            f"{describe_versions(welcome.protocol, welcome.protocol)} of the wire protocol, "
            f"this gateway {describe_versions(OLDEST_PROTOCOL, PROTOCOL)}; upgrade the {outdated}"
        )


def describe_versions(oldest: int, newest: int) -> str:
    """Return a range of versions in words, such as "versions 2 to 3"."""
    return f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"
