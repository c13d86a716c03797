# SPDX-License-Identifier: Apache-2.0
"""DNS names of pods: a local cluster has no DNS, so addresses replace the names in commands and variables.

The name of a pod with a `subdomain` is HOSTNAME.SUBDOMAIN.NAMESPACE.svc. It resolves as soon as the pod is
bound to the node, even if the pod is not ready. A headless Service with `publishNotReadyAddresses` behaves
likewise.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any

LABEL = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
NAME = re.compile(rf"(?<![-.\w])({LABEL}\.{LABEL}\.{LABEL})\.svc(?:\.cluster\.local)?(?![-.\w])")
WAIT_SECONDS = 60.0


class PodNames:
    """The DNS names of this node's pods, and the IP address for each name."""

    def __init__(self) -> None:
        self._addresses: dict[str, tuple[str, str]] = {}
        """Uid and IP address of each pod, by the pod's DNS name."""
        self._added = asyncio.Condition()

    async def add(self, pod: Mapping[str, Any], address: str) -> None:
        """Add a pod's name, if it has one, and wake up callers of `rewrite` that wait for it."""
        name = pod_dns_name(pod)
        if name:
            async with self._added:
                self._addresses[name] = (pod["metadata"]["uid"], address)
                self._added.notify_all()

    def remove(self, uid: str) -> None:
        """Remove the name of a pod that has ended, given the pod's uid."""
        self._addresses = {name: entry for name, entry in self._addresses.items() if entry[0] != uid}

    async def rewrite(self, text: str, pod: Mapping[str, Any]) -> str:
        """Return a text with the DNS names of pods replaced by the pods' addresses; keep unknown names.

        Other pods of the pod's subdomain may be created later. If the text contains the name of such a pod,
        wait up to `WAIT_SECONDS` for the pod.

        Args:
            text: a variable's value or an argument.
            pod: the pod that the text belongs to.
        """
        sibling_suffix = f".{pod_dns_name(pod).partition('.')[2]}"
        for name in {match[1] for match in NAME.finditer(text)}:
            if pod_dns_name(pod) and name.endswith(sibling_suffix):
                await self._wait_for_name(name)
        return NAME.sub(lambda match: self._addresses.get(match[1], ("", match[0]))[1], text)

    async def _wait_for_name(self, name: str) -> None:
        try:
            async with asyncio.timeout(WAIT_SECONDS), self._added:
                await self._added.wait_for(lambda: name in self._addresses)
        except TimeoutError:
            pass  # the name is kept, and the program will report that it does not resolve


def pod_dns_name(pod: Mapping[str, Any]) -> str:
    """Return a pod's name in the cluster's DNS, without `.svc`; empty if it has no subdomain."""
    spec, metadata = pod["spec"], pod["metadata"]
    if not spec.get("subdomain"):
        return ""
    return ".".join((spec.get("hostname") or metadata["name"], spec["subdomain"], metadata["namespace"]))
