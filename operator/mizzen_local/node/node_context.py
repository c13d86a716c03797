# SPDX-License-Identifier: Apache-2.0
"""Resources that the kubelet passes to all pods of its node."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from mizzen_local.api import ApiClient
from mizzen_local.events import Recorder
from mizzen_local.node.names import PodNames


@dataclass(frozen=True, slots=True)
class NodeContext:
    """Resources that all pods of a node share.

    Attributes:
        api: client of the API server, with the node's identity.
        session: HTTP client for probes and hooks.
        recorder: recorder of Events.
        folder: the cluster's folder.
        address: IP address of the node.
        server: URL at which pods reach the API server.
        authority: path of the CA certificate of the API server, PEM.
        names: DNS names of the node's pods.
    """

    api: ApiClient
    session: aiohttp.ClientSession
    recorder: Recorder
    folder: Path
    address: str
    server: str
    authority: Path
    names: PodNames = field(default_factory=PodNames)

    def mark(self, *names: str) -> str:
        """Return the MIZZEN_LOCAL_MARK prefix that selects certain processes of the node's pods.

        Args:
            names: without names, the prefix selects the processes of all pods. A pod's uid selects the
                processes of that pod. A pod's uid, a container's name and the number of a run select the
                processes of that run.
        """
        return "/".join([str(self.folder), "pods", *names, ""])
