# SPDX-License-Identifier: Apache-2.0
"""The service `grpc.health.v1.Health` of the gateway, as load balancers and probes of Kubernetes use it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

if TYPE_CHECKING:
    from mizzen.gateway.gateway import Gateway

WATCH_SECONDS = 1.0
"""Interval at which the status is checked for watching clients."""
MAX_WATCHES = 100
"""Maximum number of Watch calls at a time, which need no API key."""


class HealthService(health_pb2_grpc.HealthServicer):
    """Reports SERVING while at least one model serves requests, like `GET /health`."""

    def __init__(self, gateway: Gateway, services: frozenset[str]) -> None:
        """Create the service.

        Args:
            gateway: The gateway whose state is reported.
            services: Names of gRPC services that clients may ask for; the empty name is the whole server.
        """
        self._gateway = gateway
        self._services = services | {""}
        self._watches = 0

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        """Return the status of a service."""
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.service}")
        return self._response()

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Yield the status of a service whenever it changes, until the gateway drains."""
        if self._watches >= MAX_WATCHES:
            text = f"at most {MAX_WATCHES} Watch calls may run: use Check"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        self._watches += 1
        try:
            last: health_pb2.HealthCheckResponse | None = None
            while True:
                draining, current = self._gateway.draining, self._response()
                if request.service not in self._services:
                    current.status = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
                if current != last:
                    yield current
                    last = current
                if draining:
                    return
                await asyncio.sleep(WATCH_SECONDS)
        finally:
            self._watches -= 1

    def _response(self) -> health_pb2.HealthCheckResponse:
        status = health_pb2.HealthCheckResponse
        serving = not self._gateway.not_serving_reason
        return status(status=status.SERVING if serving else status.NOT_SERVING)
