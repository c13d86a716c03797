# SPDX-License-Identifier: Apache-2.0
"""Finds the other gateway processes of the same service, and asks them over their admin ports.

On Kubernetes, they run in the ready pods with the labels of the service's gateway. A pod with several
processes has one admin port, which forwards a question to the process with the number in the query.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import aiohttp
import msgspec

from mizzen.common.addresses import join_address
from mizzen.gateway.auth.limit_sharing import LOAN_PATH, GatewayPeer, Loan, LoanRequest
from mizzen.gateway.config import GatewayConfig, ProcessNumber
from mizzen.gateway.engines.engine_pods import SERVICE_LABEL, SHARED_SELECTOR, EnginePod
from mizzen.gateway.engines.kube_watch import ResourceWatch, watched_namespace
from mizzen.gateway.telemetry.metrics import Metrics

GATEWAY_SELECTOR = "mizzen.dev/component=gateway"
LOAN_SECONDS = 1.0
"""Maximum time that another gateway process has to answer."""


class MembersObserver(Protocol):
    """Called when gateway processes have started or ended."""

    def __call__(self, name: str, peers: Mapping[str, GatewayPeer], *, joins: bool) -> None:
        """Take the name of this process, the other processes by name, and whether other pods serve."""
        ...


class HttpPeer:
    """Another gateway process, reached over HTTP."""

    def __init__(self, session: aiohttp.ClientSession, url: str, token: Callable[[], str]) -> None:
        """Create a peer; `token` returns the bearer token of the admin API."""
        self._session, self._url, self._token = session, url, token

    async def ask(self, request: LoanRequest) -> Loan:
        """Ask for an amount.

        Raises:
            OSError: the process does not answer, or not with a loan.
        """
        headers = {"Authorization": f"Bearer {self._token()}"}
        try:
            async with self._session.post(
                self._url, data=msgspec.json.encode(request), headers=headers
            ) as response:
                body = await response.read()
                if response.status != 200:
                    raise OSError(f"status {response.status}")
                return msgspec.json.decode(body, type=Loan)
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
            raise OSError(f"{type(error).__name__}: {error}") from error


class GatewayPeers:
    """Keeps the list of the other gateway processes current."""

    def __init__(
        self,
        config: GatewayConfig,
        process: ProcessNumber,
        metrics: Metrics,
        token: Callable[[], str],
        on_members: MembersObserver,
    ) -> None:
        """Create the list; `run` keeps it current and calls `on_members` after each change."""
        self._config, self._process, self._metrics = config, process, metrics
        self._token, self._on_members = token, on_members
        self._pod = os.environ.get("POD_NAME") or socket.gethostname()
        self._session: aiohttp.ClientSession | None = None

    async def run(self) -> None:
        """Follow the gateway's pods until cancelled; outside Kubernetes, there is only this gateway."""
        timeout = aiohttp.ClientTimeout(total=LOAN_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
            self._session = session
            if self._config.engine or self._config.services_file:
                self._report({})
                await asyncio.Event().wait()
            label = f"{SERVICE_LABEL}={self._config.service or self._config.served_name}"
            await ResourceWatch(
                watched_namespace(self._config.namespace),
                "pods",
                EnginePod,
                self._changed,
                self._metrics.watch_errors.inc,
                labelSelector=f"{SHARED_SELECTOR if self._config.shared else label},{GATEWAY_SELECTOR}",
            ).run()

    def _changed(self, pods: Collection[EnginePod]) -> None:
        self._report({pod.metadata.name: admin_address(pod) for pod in pods if is_serving(pod)})

    def _report(self, pods: Mapping[str, str]) -> None:
        """Report all other processes of all pods; `pods` maps pod names to the addresses of admin ports."""
        own = join_address(self._config.admin_host, self._config.admin_port)
        peers: dict[str, GatewayPeer] = {}
        for pod, address in {**pods, self._pod: own}.items():
            for index in range(self._process.count):
                if (pod, index) != (self._pod, self._process.index) and self._session is not None:
                    url = f"http://{address}{LOAN_PATH}?process={index}"
                    peers[f"{pod}/{index}"] = HttpPeer(self._session, url, self._token)
        joins = any(pod != self._pod for pod in pods)
        self._on_members(f"{self._pod}/{self._process.index}", peers, joins=joins)


def is_serving(pod: EnginePod) -> bool:
    """Return whether clients reach a gateway pod: it is ready, and not being deleted."""
    conditions = {condition.type: condition.status for condition in pod.status.conditions or ()}
    ready = conditions.get("Ready") == "True" and pod.metadata.deletion_timestamp is None
    return ready and bool(pod.status.pod_ip)


def admin_address(pod: EnginePod) -> str:
    """Return the host and port of a gateway pod's admin API."""
    ports = {port.name: port.container_port for c in pod.spec.containers or () for port in c.ports or ()}
    return join_address(pod.status.pod_ip or "", ports.get("admin", 8001))
