"""Hears from the gateways which groups they route to: one waiting request to each, answered on a change.

A gateway that knows nothing of waiting is asked every few seconds instead.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp

from mizzen_operator.api import labels
from mizzen_operator.api.key import ServiceKey
from mizzen_operator.gateway_client.heartbeat import Heartbeats
from mizzen_operator.gateway_client.routing_table import (
    NO_ANSWER,
    Acknowledgements,
    Answer,
    acknowledged,
    read_answer,
)
from mizzen_operator.metrics import Metrics
from mizzen_operator.pods.observe import GatewayPod

QUERY_SECONDS = 3.0
MAX_ANSWER_BYTES = 4 * 1024 * 1024
WAIT_SECONDS = 300
"""How long a gateway keeps a request of ours while nothing changes."""
POLL_SECONDS = 5.0
"""How often a gateway is asked that does not keep requests."""
FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.1, 5.0
REFUSED_SECONDS = 5.0
"""How soon a token that was refused is tried again."""


class _Source(NamedTuple):
    """Who is heard: a gateway's address, and the token that it takes."""

    address: str
    token: str


@dataclass(slots=True)
class _Ear:
    """One gateway that is listened to for one service."""

    heard: asyncio.Event = field(default_factory=asyncio.Event)
    answer: Answer = NO_ANSWER
    late: bool = False
    """Somebody has gone on without its first answer."""
    task: asyncio.Task[None] | None = None


class GatewayListener:
    """Follows what all ready gateways say of each service.

    `ask` says what is known. Whenever that becomes another, `on_change` is told the service.
    """

    def __init__(self, metrics: Metrics, on_change: Callable[[ServiceKey], None] = lambda key: None) -> None:
        self.on_change = on_change
        self._metrics = metrics
        self._ears: dict[ServiceKey, dict[_Source, _Ear]] = {}
        self._beats = Heartbeats(labels.ADMIN_PORT, self._answers, self._silence)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=QUERY_SECONDS),
            trust_env=False,
        )

    async def close(self) -> None:
        """Listen to nobody any more."""
        for key in list(self._ears):
            self.forget(key)
        await self._beats.close()
        await self._session.close()

    async def ask(self, pods: Sequence[GatewayPod], token: str, key: ServiceKey) -> Acknowledgements:
        """What the ready gateways among `pods` say of a service.

        One that has not been heard yet is waited for, up to QUERY_SECONDS; one that fails to answer
        acknowledges nothing.
        """
        sources = [_Source(pod.address, token) for pod in pods if pod.ready and pod.address]
        ears = self._listen(key, sources)
        if not all(ear.heard.is_set() for ear in ears):
            try:
                async with asyncio.timeout(QUERY_SECONDS):
                    await asyncio.gather(*(ear.heard.wait() for ear in ears))
            except TimeoutError:
                for ear in ears:
                    ear.late = not ear.heard.is_set()
        silent = frozenset(one.address for one in sources if self._beats.silent(one.address))
        there = self._ears.get(key, {})
        answers = [
            there[source].answer if source in there and source.address not in silent else NO_ANSWER
            for source in sources
        ]
        return acknowledged(answers, silent)

    def waiting(self, key: ServiceKey) -> bool:
        """Whether a gateway holds requests of a service because no engine serves."""
        return any(ear.answer.waiting for ear in self._ears.get(key, {}).values())

    async def look(self, key: ServiceKey) -> list[dict[str, Any]] | None:
        """The routing tables of all gateways that are listened to, as they are now; None when one fails."""
        sources = list(self._ears.get(key, {}))
        tables = await asyncio.gather(*(self._table(key, source) for source in sources))
        return None if None in tables else [table for table in tables if table is not None]

    async def question(
        self, key: ServiceKey, uid: str, prompt: str, max_tokens: int, seconds: float
    ) -> tuple[int, dict[str, Any]]:
        """Have an engine that is not verified yet continue a prompt; returns HTTP status and answer.

        The status is 0 when no gateway could be asked.

        Args:
            key: the service.
            uid: of the engine's pod.
            prompt: what the engine continues.
            max_tokens: length of the continuation at most.
            seconds: time for the whole answer.
        """
        ears = self._ears.get(key, {})
        source = next((source for source, ear in ears.items() if uid in ear.answer.verifying), None)
        if source is None:
            return 0, {}
        body = {"service": key.name, "uid": uid, "prompt": prompt}
        body |= {"maxTokens": max_tokens, "timeoutSeconds": seconds}
        timeout = aiohttp.ClientTimeout(total=seconds + QUERY_SECONDS, sock_connect=QUERY_SECONDS)
        url, headers = _url(source, "/admin/verify"), _headers(source)
        try:
            async with self._session.post(url, json=body, headers=headers, timeout=timeout) as response:
                if (response.content_length or 0) > MAX_ANSWER_BYTES:
                    return 0, {}
                return response.status, dict(await response.json())
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, TypeError):
            return 0, {}

    async def _table(self, key: ServiceKey, source: _Source) -> dict[str, Any] | None:
        try:
            async with self._session.get(_engines_url(key, source), headers=_headers(source)) as response:
                return await response.json() if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None

    def forget(self, key: ServiceKey) -> None:
        """Listen for a service no more."""
        for source, ear in self._ears.pop(key, {}).items():
            self._beats.remove(source.address)
            _end(ear)

    def _listen(self, key: ServiceKey, sources: Sequence[_Source]) -> list[_Ear]:
        """The ears for exactly these gateways."""
        ears = self._ears.setdefault(key, {})
        for source in [source for source in ears if source not in sources]:
            self._beats.remove(source.address)
            _end(ears.pop(source))
        for source in sources:
            if source not in ears:
                ear = ears[source] = _Ear()
                self._beats.add(source.address)
                ear.task = asyncio.create_task(self._hear(key, source, ear))
        if not ears:
            del self._ears[key]
        return list(ears.values())

    def _silence(self, address: str) -> None:
        """Tell of all services whose gateway hangs, or does no longer."""
        for key, ears in list(self._ears.items()):
            if any(source.address == address for source in ears):
                self.on_change(key)

    async def _answers(self, address: str) -> bool:
        """Whether a gateway answers over HTTP."""
        host = f"[{address}]" if ":" in address else address
        try:
            async with self._session.get(f"http://{host}:{labels.ADMIN_PORT}/healthz") as response:
                return response.status < 500
        except (aiohttp.ClientError, OSError):
            return False

    async def _hear(self, key: ServiceKey, source: _Source, ear: _Ear) -> None:
        backoff, version = FIRST_BACKOFF_SECONDS, ""
        while True:
            began = time.monotonic()
            answer, said = await self._ask(key, source, version)
            if answer is not None:
                self._take(key, ear, answer)
            if answer is not None and answer.serving is None:
                version = ""
                await asyncio.sleep(REFUSED_SECONDS if answer.refused else backoff)
                backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)
                continue
            backoff = FIRST_BACKOFF_SECONDS
            if not said:
                await asyncio.sleep(POLL_SECONDS)
            elif said == version and time.monotonic() - began < 1:
                await asyncio.sleep(1)  # it keeps no request just now: it may be ending
            version = said

    def _take(self, key: ServiceKey, ear: _Ear, answer: Answer) -> None:
        news = ear.late or (ear.heard.is_set() and answer != ear.answer)
        ear.answer, ear.late = answer, False
        ear.heard.set()
        if news:
            self.on_change(key)

    async def _ask(self, key: ServiceKey, source: _Source, version: str) -> tuple[Answer | None, str]:
        """The gateway's answer, None when it is as before; and the version that the answer has."""
        url = _engines_url(key, source)
        total = QUERY_SECONDS
        if version:
            url += f"&version={version}&wait={WAIT_SECONDS}"
            total += WAIT_SECONDS
        timeout = aiohttp.ClientTimeout(total=total, sock_connect=QUERY_SECONDS)
        result = "error"
        try:
            async with self._session.get(url, headers=_headers(source), timeout=timeout) as response:
                result = str(response.status) if response.status not in (200, 304) else "ok"
                if response.status == 304:
                    return None, version
                if response.status != 200:
                    return Answer(None, refused=response.status in (401, 403)), ""
                if (response.content_length or 0) > MAX_ANSWER_BYTES:
                    return NO_ANSWER, ""
                body = await response.json()
                return read_answer(body), str(body.get("version", ""))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError):
            return NO_ANSWER, ""
        finally:
            self._metrics.gateway_queries.labels(result).inc()


def _engines_url(key: ServiceKey, source: _Source) -> str:
    return _url(source, f"/admin/engines?service={key.name}")


def _url(source: _Source, path: str) -> str:
    host = f"[{source.address}]" if ":" in source.address else source.address
    return f"http://{host}:{labels.ADMIN_PORT}{path}"


def _headers(source: _Source) -> dict[str, str]:
    return {"Authorization": f"Bearer {source.token}"}


def _end(ear: _Ear) -> None:
    if ear.task is not None:
        ear.task.cancel()
