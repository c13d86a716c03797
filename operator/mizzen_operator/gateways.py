"""Asks a service's gateways which groups they route to (`GET /admin/engines`)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from mizzen_operator import labels
from mizzen_operator.metrics import Metrics
from mizzen_operator.observe import GatewayPod

QUERY_SECONDS = 3.0
MAX_ANSWER_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Acknowledgements:
    """What the ready gateways say.

    Attributes:
        asked: ready gateway pods.
        answered: those that gave a usable answer.
        by_all: uids of pods that every ready gateway routes to.
        by_some: uids of pods that at least one routes to.
        refused: a gateway did not accept the token.
    """

    asked: int = 0
    answered: int = 0
    by_all: frozenset[str] = frozenset()
    by_some: frozenset[str] = frozenset()
    refused: bool = False


class GatewayClient:
    """HTTP client of the gateways' admin API."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=QUERY_SECONDS), trust_env=False
        )

    async def close(self) -> None:
        """Close its connections."""
        await self._session.close()

    async def ask(self, pods: Sequence[GatewayPod], token: str, service: str) -> Acknowledgements:
        """Ask every ready gateway of a service at the same time.

        One that fails to answer acknowledges nothing.
        """
        ready = [pod for pod in pods if pod.ready and pod.address]
        answers = await asyncio.gather(*(self._ask(pod, token, service) for pod in ready))
        usable = [serving for serving, _ in answers if serving is not None]
        everyone = len(usable) == len(ready) and ready
        return Acknowledgements(
            asked=len(ready),
            answered=len(usable),
            by_all=frozenset.intersection(*usable) if everyone else frozenset(),
            by_some=frozenset().union(*usable),
            refused=any(refused for _, refused in answers),
        )

    async def _ask(self, pod: GatewayPod, token: str, service: str) -> tuple[frozenset[str] | None, bool]:
        """The uids that a gateway routes to, or None; and whether it refused the token."""
        host = f"[{pod.address}]" if ":" in pod.address else pod.address
        url = f"http://{host}:{labels.ADMIN_PORT}/admin/engines?service={service}"
        result = "error"
        try:
            async with self._session.get(url, headers={"Authorization": f"Bearer {token}"}) as answer:
                if answer.status != 200:
                    result = str(answer.status)
                    return None, answer.status in (401, 403)
                if (answer.content_length or 0) > MAX_ANSWER_BYTES:
                    return None, False
                serving = _serving(await answer.json())
                result = "ok"
                return serving, False
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError):
            return None, False
        finally:
            self._metrics.gateway_queries.labels(result).inc()


def _serving(answer: Any) -> frozenset[str]:
    return frozenset(engine["uid"] for engine in answer["engines"] if engine["state"] == "serving")
