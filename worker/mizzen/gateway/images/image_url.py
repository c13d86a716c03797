# SPDX-License-Identifier: Apache-2.0
"""Parse the https URLs of images, and match their hosts with the allowed ones.

A URL is parsed once, by a grammar that is narrower than RFC 3986: what other parsers may read differently
(user names, backslashes, control characters, other ports, numbers as hosts, names outside of ASCII) is
refused. The request is made of the parts that this parser returns.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

MAX_URL_CHARACTERS = 8192
MAX_HOST_CHARACTERS = 253
_LABEL = "[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_HOST = re.compile(rf"{_LABEL}(?:\.{_LABEL})+", re.ASCII)
_URL = re.compile(
    r"https://(?P<host>[A-Za-z0-9.-]+)(?::443)?(?P<target>(?:/[!$&-;=@-Z_a-z~%]*)?(?:\?[!$&-;=?@-Z_a-z~%]*)?)"
    r"(?:#[!$&-;=?@-Z_a-z~%]*)?",
    re.ASCII | re.IGNORECASE,
)
"""Groups: the host; the path with the query. Both consist of the characters that RFC 3986 allows there."""
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.ASCII)
"""Last label of hosts that parsers take for an address of IPv4."""


@dataclass(frozen=True, slots=True)
class ParsedImageUrl:
    """Parts of a URL."""

    host: str
    """Host in lower case: a name of several labels, or an address of IPv4."""
    target: str
    """Path and query, as sent in the request line."""


def parse_image_url(text: str) -> ParsedImageUrl:
    """Return the parts of the URL of an image.

    Raises:
        ValueError: the URL is not in the accepted form.
    """
    match = _URL.fullmatch(text) if len(text) <= MAX_URL_CHARACTERS else None
    if match is None:
        raise ValueError("the URL has a form that is not accepted")
    host = check_host(match["host"].lower())
    target = match["target"]
    return ParsedImageUrl(host, target if target.startswith("/") else f"/{target}")


def check_host(host: str) -> str:
    """Return a host in lower case after checking it.

    Raises:
        ValueError: it is neither a name of several labels nor an address of IPv4 with four decimal numbers.
    """
    if len(host) > MAX_HOST_CHARACTERS or not _HOST.fullmatch(host):
        raise ValueError(f"{host[:80]!r} is not a host name in lower case")
    if is_address(host):
        ipaddress.IPv4Address(host)
    return host


def is_address(host: str) -> bool:
    """Return whether a host is an address of IPv4 for parsers, because its last label is a number."""
    return _NUMBER.fullmatch(host.rpartition(".")[2]) is not None


class AllowedHosts:
    """Hosts from which images may be fetched."""

    def __init__(self, patterns: Iterable[str]) -> None:
        """Create the list of hosts; a pattern is a host, or `*.` and a domain for all names below it.

        Raises:
            ValueError: a pattern is invalid.
        """
        self._exact: set[str] = set()
        self._suffixes: list[str] = []
        for pattern in patterns:
            is_domain = pattern.startswith("*.")
            try:
                host = check_host(pattern.removeprefix("*."))
                if is_domain and is_address(host):
                    raise ValueError("an address has no names below it")
            except ValueError as error:
                raise ValueError(f"--image-hosts: {pattern!r}: {error}") from None
            if is_domain:
                self._suffixes.append(f".{host}")
            else:
                self._exact.add(host)

    def __contains__(self, host: str) -> bool:
        return host in self._exact or (
            not is_address(host) and any(host.endswith(suffix) for suffix in self._suffixes)
        )
