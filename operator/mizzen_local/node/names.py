"""DNS names of pods: what a cluster's DNS would answer is put in where a command or a variable names a pod.

A pod with `hostname` and `subdomain` is HOSTNAME.SUBDOMAIN.NAMESPACE.svc from its start on, ready or not, as
with a headless Service that publishes addresses that are not ready.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any

LABEL = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
NAME = re.compile(rf"(?<![-.\w])({LABEL}\.{LABEL}\.{LABEL})\.svc(?:\.cluster\.local)?(?![-.\w])")
WAIT_SECONDS = 60.0


class Names:
    """The names of this node's pods."""

    def __init__(self) -> None:
        self._addresses: dict[str, tuple[str, str]] = {}
        """Of each name: whose it is, and the address."""
        self._news = asyncio.Condition()

    async def add(self, pod: Mapping[str, Any], address: str) -> None:
        """Give a pod its name, if it has one."""
        name = name_of(pod)
        if name:
            async with self._news:
                self._addresses[name] = (pod["metadata"]["uid"], address)
                self._news.notify_all()

    def remove(self, uid: str) -> None:
        """Forget the name of a pod that has ended."""
        self._addresses = {name: one for name, one in self._addresses.items() if one[0] != uid}

    async def rewrite(self, text: str, pod: Mapping[str, Any]) -> str:
        """Put addresses in for names; waits a while for pods of the same subdomain, which may come later."""
        beside = f".{name_of(pod).partition('.')[2]}"
        for name in {found[1] for found in NAME.finditer(text)}:
            if name_of(pod) and name.endswith(beside):
                await self._wait(name)
        return NAME.sub(lambda found: self._addresses.get(found[1], ("", found[0]))[1], text)

    async def _wait(self, name: str) -> None:
        try:
            async with asyncio.timeout(WAIT_SECONDS), self._news:
                await self._news.wait_for(lambda: name in self._addresses)
        except TimeoutError:
            pass  # whoever is given the name as it is says that it does not resolve


def name_of(pod: Mapping[str, Any]) -> str:
    """A pod's name in its cluster's DNS, without `.svc`; empty when it has none."""
    spec, metadata = pod["spec"], pod["metadata"]
    if not spec.get("subdomain"):
        return ""
    return ".".join((spec.get("hostname") or metadata["name"], spec["subdomain"], metadata["namespace"]))
