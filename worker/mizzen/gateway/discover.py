"""How a gateway finds its engines: a list of endpoints, or the pods of its service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from mizzen.gateway.config import GatewayConfig
from mizzen.gateway.engines import Found
from mizzen.gateway.metrics import Metrics
from mizzen.wire.endpoint import require_safe
from mizzen.wire.keys import WireKeys

Sync = Callable[[Iterable[Found]], None]


def discovery(
    config: GatewayConfig, keys: WireKeys | None, sync: Sync, metrics: Metrics
) -> Coroutine[Any, Any, None]:
    """Return the work that keeps the routing table in sync, until it is cancelled.

    Raises:
        ValueError: an endpoint is malformed or needs keys, or there is no Kubernetes configuration.
    """
    if config.engine:
        for endpoint in config.engine:
            require_safe(endpoint, keys)
        return static(config.engine, sync)
    from mizzen.gateway.pods import PodWatch

    return PodWatch(config, sync, metrics).run()


async def static(endpoints: tuple[str, ...], sync: Sync) -> None:
    """Report a fixed list of endpoints."""
    sync(Found(name=endpoint, uid="", endpoint=endpoint) for endpoint in dict.fromkeys(endpoints))
    await asyncio.Event().wait()
