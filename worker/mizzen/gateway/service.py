"""One gateway: everything that its two servers share."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from collections import Counter
from pathlib import Path

from mizzen.gateway.admit import Admission
from mizzen.gateway.config import GatewayConfig
from mizzen.gateway.discover import discovery
from mizzen.gateway.dispatch import Dispatcher
from mizzen.gateway.engines import EngineTable
from mizzen.gateway.errors import ApiError, unavailable
from mizzen.gateway.metrics import Metrics
from mizzen.gateway.route.router import default_router
from mizzen.wire.keys import load_keys

STATES = ("connecting", "serving", "draining", "broken")


class Gateway:
    """State of a gateway process. `start` and `close` run on its event loop."""

    def __init__(self, config: GatewayConfig) -> None:
        """Read keys and token.

        Raises:
            ValueError: a key file or the token file cannot be read.
        """
        self.config = config
        self.models = tuple(dict.fromkeys((config.served_name, *config.alias)))
        self.metrics = Metrics()
        self.draining = False
        self._token = read_token(config.admin_token_file)
        keys = load_keys(Path(config.keys), "gateway") if config.keys else None
        self._name = f"{socket.gethostname()}-{secrets.token_hex(4)}"
        self._keys = keys
        self._discovery: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to discover engines.

        Raises:
            ValueError: an endpoint is malformed or needs keys, or there is no Kubernetes configuration.
        """
        config = self.config
        self.table = EngineTable(
            gateway=self._name,
            keys=self._keys,
            timeout_seconds=config.engine_timeout_seconds,
            lost_seconds=config.engine_lost_seconds,
            on_change=lambda: self.admission.poke(),
        )
        self.admission = Admission(
            self.table.capacity,
            max_in_flight=config.max_in_flight,
            queue_size=config.queue_size,
            why_closed=self.table.why_closed,
        )
        self.dispatcher = Dispatcher(
            self.table,
            self.admission,
            default_router(config.load_factor_percent),
            self.metrics,
            config.max_attempts,
        )
        find = discovery(config, self._keys, self.table.sync, self.metrics)
        self._discovery = asyncio.create_task(find, name="discovery")

    async def close(self, reason: str = "the gateway is shutting down") -> None:
        """Refuse who waits, and close the connections: what still runs ends with an error."""
        if self._discovery is None:
            return
        self._discovery.cancel()
        await asyncio.gather(self._discovery, return_exceptions=True)
        self._discovery = None
        self.admission.close(reason)
        await self.table.close()

    @property
    def ready(self) -> str:
        """Why this gateway should get no traffic; empty when it should."""
        if self.draining:
            return "draining"
        if self._discovery is None or self._discovery.done():
            return "discovery does not run"
        return "" if self.table.synced else "the engines are not known yet"

    def check_model(self, name: str) -> None:
        """Raise when a model is not served here.

        Raises:
            ApiError: 404.
        """
        if name not in self.models:
            raise ApiError(
                404,
                f"the model {name[:200]!r} does not exist here; there is {', '.join(self.models)}",
                param="model",
                code="model_not_found",
            )

    def check_open(self) -> None:
        """Raise when nothing is served at the moment.

        Raises:
            ApiError: 503.
        """
        if self.config.suspended:
            raise unavailable("the service is suspended", 30.0, code="suspended")

    def is_admin(self, authorization: str) -> bool:
        """Tell whether a header holds the admin API's bearer token."""
        scheme, _, token = authorization.partition(" ")
        return (
            self._token is not None
            and scheme.lower() == "bearer"
            and hmac.compare_digest(token.strip().encode(), self._token)
        )

    @property
    def has_admin(self) -> bool:
        """Whether there is an admin API."""
        return self._token is not None

    def metrics_text(self) -> bytes:
        """Return all metrics, the gauges as of now."""
        metrics = self.metrics
        metrics.in_flight.clear()
        metrics.load_tokens.clear()
        states: Counter[str] = Counter(dict.fromkeys(STATES, 0))
        for engine in self.table:
            states[engine.state] += 1
            metrics.in_flight.labels(engine.name).set(engine.requests)
            metrics.load_tokens.labels(engine.name).set(engine.load)
        for state, count in states.items():
            metrics.engines.labels(state).set(count)
        metrics.queued.set(len(self.admission))
        metrics.synced.set(self.table.synced)
        return metrics.text()


def read_token(path: str | None) -> bytes | None:
    """Return the admin API's bearer token.

    Raises:
        ValueError: the file cannot be read, or is empty.
    """
    if path is None:
        return None
    try:
        token = Path(path).read_bytes().strip()
    except OSError as error:
        raise ValueError(f"--admin-token-file {path} cannot be read: {error.strerror}") from error
    if not token:
        raise ValueError(f"--admin-token-file {path} is empty")
    return token
