# SPDX-License-Identifier: Apache-2.0
"""Decide to which IP addresses the gateway may connect for images: to public ones (RFC 6890).

Addresses of IPv6 that contain an address of IPv4 are refused, because a gateway of the network may translate
them to private ones.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_REFUSED_V4 = (
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
    "192.0.0.0/24", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.168.0.0/16",
    "192.175.48.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4",
    "168.63.129.16/32",
)  # fmt: skip
"""Networks that are not public; the last one is the host's agent in Azure, which has credentials."""
_PUBLIC_V6 = "2000::/3"
_REFUSED_V6 = ("2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20")
"""Networks within `_PUBLIC_V6` that are not public, or are translated to IPv4 (Teredo, 6to4)."""


class AddressPolicy:
    """Decides which addresses are public, and not in the networks that the gateway's options exclude."""

    def __init__(self, blocked: Iterable[str] = ()) -> None:
        """Create a policy; `blocked` lists more networks in CIDR notation.

        Raises:
            ValueError: a network is invalid.
        """
        self._public_v6 = ipaddress.IPv6Network(_PUBLIC_V6)
        self._refused = [
            *map(ipaddress.ip_network, (*_REFUSED_V4, *_REFUSED_V6)),
            *map(parse_network, blocked),
        ]

    def allows(self, text: str) -> bool:
        """Return whether connections to an address, in text form, are allowed."""
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            return False
        if isinstance(address, ipaddress.IPv6Address) and (
            address.scope_id is not None or address not in self._public_v6
        ):
            return False
        return not any(address in network for network in self._refused if network.version == address.version)


def parse_network(text: str) -> Network:
    """Return a network in CIDR notation.

    Raises:
        ValueError: it is invalid.
    """
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise ValueError(
            f"--image-blocked-network: {text!r} is not a network such as 203.0.113.0/24"
        ) from None
