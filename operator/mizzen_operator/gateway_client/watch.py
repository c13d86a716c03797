# SPDX-License-Identifier: Apache-2.0
"""Watches the routing tables of gateways, with one long poll per gateway and service.

The gateway answers the poll when the table changes.

A gateway that does not support long polls is polled every few seconds instead. The reconciler, the autoscaler
and the verifier read the results.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp

from mizzen_operator.api import labels
from mizzen_operator.api.addresses import join_address
from mizzen_operator.api.key import ServiceKey
from mizzen_operator.gateway_client.heartbeat import HeartbeatMonitor
from mizzen_operator.gateway_client.routing_table import (
    NO_REPORT,
    GatewayReport,
    RoutingState,
    merge_reports,
    parse_report,
)
from mizzen_operator.metrics import Metrics
from mizzen_operator.pods.observe import GatewayPod

QUERY_SECONDS = 3.0
MAX_ANSWER_BYTES = 4 * 1024 * 1024
WAIT_SECONDS = 300
"""Time for which a gateway keeps a long poll open while nothing changes."""
POLL_SECONDS = 5.0
"""Poll interval for gateways that do not keep requests open."""
FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.1, 5.0
TOKEN_REFUSED_RETRY_SECONDS = 5.0
"""Delay before a request is repeated after the gateway has rejected its token."""


class _Endpoint(NamedTuple):
    """A gateway's address and the admin token for it."""

    address: str
    token: str


@dataclass(slots=True)
class _WatchState:
    """State of the watch of one gateway for one service."""

    synced: asyncio.Event = field(default_factory=asyncio.Event)
    report: GatewayReport = NO_REPORT
    skipped: bool = False
    """Whether a reconcile gave up waiting for the first report.

    If so, the reconcile must be repeated when the report arrives.
    """
    task: asyncio.Task[None] | None = None


class GatewayWatch:
    """Watches the routing tables of all ready gateways, for each service.

    `routing_state` returns the merged reports; `on_change` is called with a service when a report changes.
    """

    def __init__(self, metrics: Metrics, on_change: Callable[[ServiceKey], None] = lambda key: None) -> None:
        self.on_change = on_change
        self._metrics = metrics
        self._watches: dict[ServiceKey, dict[_Endpoint, _WatchState]] = {}
        self._heartbeats = HeartbeatMonitor(labels.ADMIN_PORT, self._is_alive, self._on_hung_changed)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=QUERY_SECONDS),
            trust_env=False,
        )

    async def close(self) -> None:
        """Stop all watches."""
        for key in list(self._watches):
            self.forget(key)
        await self._heartbeats.close()
        await self._session.close()

    async def routing_state(self, pods: Sequence[GatewayPod], token: str, key: ServiceKey) -> RoutingState:
        """Return the merged reports of a service's ready gateways.

        The first report of a new gateway is awaited for up to QUERY_SECONDS. A gateway that does not answer
        counts as one that routes to no pod.

        Args:
            pods: the service's gateway pods; pods that are not ready are ignored.
            token: token of the gateways' admin API.
            key: the service.
        """
        endpoints = [_Endpoint(pod.address, token) for pod in pods if pod.ready and pod.address]
        watches = self._sync_watches(key, endpoints)
        if not all(watch.synced.is_set() for watch in watches):
            try:
                async with asyncio.timeout(QUERY_SECONDS):
                    await asyncio.gather(*(watch.synced.wait() for watch in watches))
            except TimeoutError:
                for watch in watches:
                    watch.skipped = not watch.synced.is_set()
        hung = frozenset(each.address for each in endpoints if self._heartbeats.is_hung(each.address))
        current = self._watches.get(key, {})
        reports = [
            current[endpoint].report if endpoint in current and endpoint.address not in hung else NO_REPORT
            for endpoint in endpoints
        ]
        return merge_reports(reports, hung)

    def holds_requests(self, key: ServiceKey) -> bool:
        """Return whether a gateway holds requests of a service because no engine serves."""
        return any(watch.report.holds_requests for watch in self._watches.get(key, {}).values())

    async def fetch_tables(self, key: ServiceKey) -> list[dict[str, Any]] | None:
        """Fetch the routing tables of a service's watched gateways; return None if a request fails."""
        endpoints = list(self._watches.get(key, {}))
        tables = await asyncio.gather(*(self._fetch_table(key, endpoint) for endpoint in endpoints))
        return None if None in tables else [table for table in tables if table is not None]

    async def ask_prompt(
        self, key: ServiceKey, uid: str, prompt: str, max_tokens: int, seconds: float
    ) -> tuple[int, dict[str, Any]]:
        """Send a prompt to an engine that awaits verification; return the HTTP status and the answer.

        The status is 0 if no gateway can reach the engine, or the gateway does not answer.

        Args:
            key: the service.
            uid: uid of the engine's pod.
            prompt: text that the engine continues.
            max_tokens: maximum length of the continuation, in tokens.
            seconds: timeout of the whole answer, in seconds.
        """
        watches = self._watches.get(key, {})
        endpoint = next(
            (endpoint for endpoint, watch in watches.items() if uid in watch.report.verifying), None
        )
        if endpoint is None:
            return 0, {}
        body = {"service": key.name, "uid": uid, "prompt": prompt}
        body |= {"maxTokens": max_tokens, "timeoutSeconds": seconds}
        timeout = aiohttp.ClientTimeout(total=seconds + QUERY_SECONDS, sock_connect=QUERY_SECONDS)
        url, headers = _url(endpoint.address, "/admin/verify"), _headers(endpoint)
        try:
            async with self._session.post(url, json=body, headers=headers, timeout=timeout) as response:
                if (response.content_length or 0) > MAX_ANSWER_BYTES:
                    return 0, {}
                return response.status, dict(await response.json())
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, TypeError):
            return 0, {}

    async def _fetch_table(self, key: ServiceKey, endpoint: _Endpoint) -> dict[str, Any] | None:
        try:
            async with self._session.get(_engines_url(key, endpoint), headers=_headers(endpoint)) as response:
                return await response.json() if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None

    def forget(self, key: ServiceKey) -> None:
        """Stop watching the gateways of a service."""
        for endpoint, watch in self._watches.pop(key, {}).items():
            self._heartbeats.remove(endpoint.address)
            _cancel(watch)

    def _sync_watches(self, key: ServiceKey, endpoints: Sequence[_Endpoint]) -> list[_WatchState]:
        """Make a service's watches cover exactly these gateways, and return the watches."""
        watches = self._watches.setdefault(key, {})
        for endpoint in [endpoint for endpoint in watches if endpoint not in endpoints]:
            self._heartbeats.remove(endpoint.address)
            _cancel(watches.pop(endpoint))
        for endpoint in endpoints:
            if endpoint not in watches:
                watch = watches[endpoint] = _WatchState()
                self._heartbeats.add(endpoint.address)
                watch.task = asyncio.create_task(self._run_watch(key, endpoint, watch))
        if not watches:
            del self._watches[key]
        return list(watches.values())

    def _on_hung_changed(self, address: str) -> None:
        """Call `on_change` for each service of the gateway at `address`, which now hangs or has recovered."""
        for key, watches in list(self._watches.items()):
            if any(endpoint.address == address for endpoint in watches):
                self.on_change(key)

    async def _is_alive(self, address: str) -> bool:
        """Return whether a gateway answers over HTTP."""
        try:
            async with self._session.get(_url(address, "/healthz")) as response:
                return response.status < 500
        except (aiohttp.ClientError, OSError):
            return False

    async def _run_watch(self, key: ServiceKey, endpoint: _Endpoint, watch: _WatchState) -> None:
        backoff, version = FIRST_BACKOFF_SECONDS, ""
        while True:
            began = time.monotonic()
            answer, new_version = await self._fetch_report(key, endpoint, version)
            if answer is not None:
                self._update(key, watch, answer)
            if answer is not None and answer.serving is None:
                version = ""
                await asyncio.sleep(TOKEN_REFUSED_RETRY_SECONDS if answer.token_refused else backoff)
                backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)
                continue
            backoff = FIRST_BACKOFF_SECONDS
            if not new_version:
                await asyncio.sleep(POLL_SECONDS)
            elif new_version == version and time.monotonic() - began < 1:
                await asyncio.sleep(1)  # the gateway did not keep the request open: it may be shutting down
            version = new_version

    def _update(self, key: ServiceKey, watch: _WatchState, answer: GatewayReport) -> None:
        notify = watch.skipped or (watch.synced.is_set() and answer != watch.report)
        watch.report, watch.skipped = answer, False
        watch.synced.set()
        if notify:
            self.on_change(key)

    async def _fetch_report(
        self, key: ServiceKey, endpoint: _Endpoint, version: str
    ) -> tuple[GatewayReport | None, str]:
        """Fetch a gateway's report for a service; wait for a change if `version` is not empty.

        Returns:
            The report, or None if it is unchanged; and its version, which is empty if the request failed or
            the gateway does not support long polls.
        """
        url = _engines_url(key, endpoint)
        total = QUERY_SECONDS
        if version:
            url += f"&version={version}&wait={WAIT_SECONDS}"
            total += WAIT_SECONDS
        timeout = aiohttp.ClientTimeout(total=total, sock_connect=QUERY_SECONDS)
        result = "error"
        try:
            async with self._session.get(url, headers=_headers(endpoint), timeout=timeout) as response:
                result = str(response.status) if response.status not in (200, 304) else "ok"
                if response.status == 304:
                    return None, version
                if response.status != 200:
                    return GatewayReport(None, token_refused=response.status in (401, 403)), ""
                if (response.content_length or 0) > MAX_ANSWER_BYTES:
                    return NO_REPORT, ""
                body = await response.json()
                return parse_report(body), str(body.get("version", ""))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError):
            return NO_REPORT, ""
        finally:
            self._metrics.gateway_queries.labels(result).inc()


def _engines_url(key: ServiceKey, endpoint: _Endpoint) -> str:
    return _url(endpoint.address, f"/admin/engines?service={key.name}")


def _url(address: str, path: str) -> str:
    return f"http://{join_address(address, labels.ADMIN_PORT)}{path}"


def _headers(endpoint: _Endpoint) -> dict[str, str]:
    return {"Authorization": f"Bearer {endpoint.token}"}


def _cancel(watch: _WatchState) -> None:
    if watch.task is not None:
        watch.task.cancel()
