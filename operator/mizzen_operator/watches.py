"""Whether the watches live: every answer to one is noted, by the tracing of kopf's own HTTP session."""

from __future__ import annotations

import time
from types import SimpleNamespace

import aiohttp
from kubernetes.aio.client import Configuration
from kubernetes.aio.client.rest import RESTClientObject

from mizzen_operator import labels
from mizzen_operator.kube import USER_AGENT
from mizzen_operator.metrics import Metrics

SERVER_SECONDS = 240
"""A watch ends after this time and starts anew, so an older answer means that nobody watches."""
INACTIVITY_SECONDS = 70
STALE_SECONDS = SERVER_SECONDS + INACTIVITY_SECONDS + 20
FAILING_SECONDS = 60
KINDS = (labels.PLURAL, "pods", "deployments", "services")


class Watches:
    """When each kind's watch was answered last, and since when it fails."""

    def __init__(self, metrics: Metrics) -> None:
        self._answered: dict[str, float] = {}
        self._failing: dict[str, float] = {}
        self._events: dict[str, float] = {}
        for kind in KINDS:
            metrics.watch_age.labels(kind).set_function(lambda kind=kind: self.age(kind))
            metrics.watch_event_age.labels(kind).set_function(lambda kind=kind: self.event_age(kind))

    def begin(self) -> None:
        """Start the clocks; until then nothing is stale."""
        self._answered = dict.fromkeys(KINDS, time.monotonic())

    def age(self, kind: str) -> float:
        """Seconds since a watch of a kind was answered; 0 before the first was sent."""
        at = self._answered.get(kind)
        return 0.0 if at is None else time.monotonic() - at

    def event(self, kind: str) -> None:
        """Note that a watch has brought an event."""
        self._events[kind] = time.monotonic()

    def event_age(self, kind: str) -> float:
        """Seconds since a watch of a kind brought an event, or was answered if that was later."""
        at = self._events.get(kind)
        age = self.age(kind)
        return age if at is None else min(age, time.monotonic() - at)

    def stale(self) -> list[str]:
        """Kinds that nobody watches any more."""
        now = time.monotonic()
        failing = {kind for kind, since in self._failing.items() if now - since > FAILING_SECONDS}
        return sorted(failing | {kind for kind in self._answered if self.age(kind) > STALE_SECONDS})

    def answered(self, kind: str, good: bool) -> None:
        """Note an answer, or its failure."""
        if kind not in KINDS:
            return
        now = time.monotonic()
        if good:
            self._answered[kind] = now
            self._failing.pop(kind, None)
        else:
            self._failing.setdefault(kind, now)

    async def session(self, configuration: Configuration) -> aiohttp.ClientSession:
        """An HTTP session for kopf with this configuration's credentials, traced."""
        header = (await configuration.auth_settings()).get("BearerToken", {}).get("value")
        context = RESTClientObject(configuration).ssl_context
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=context),
            headers={"User-Agent": USER_AGENT, **({"Authorization": header} if header else {})},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            trace_configs=[self._trace()],
        )

    def _trace(self) -> aiohttp.TraceConfig:
        trace = aiohttp.TraceConfig()

        async def end(_: object, __: SimpleNamespace, request: aiohttp.TraceRequestEndParams) -> None:
            self.answered(request.url.path.rpartition("/")[2], request.response.status == 200)

        async def failed(
            _: object, __: SimpleNamespace, request: aiohttp.TraceRequestExceptionParams
        ) -> None:
            self.answered(request.url.path.rpartition("/")[2], False)

        trace.on_request_end.append(end)
        trace.on_request_exception.append(failed)
        return trace
