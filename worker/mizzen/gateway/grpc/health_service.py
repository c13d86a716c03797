# SPDX-License-Identifier: Apache-2.0
"""The service `grpc.health.v1.Health` of the gateway, as load balancers and probes of Kubernetes use it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mizzen.gateway.http.middleware import ServingCheck

WATCH_SECONDS = 1.0
"""Interval at which the status is checked for watching clients."""


class HealthService(health_pb2_grpc.HealthServicer):
    """Reports SERVING while at least one model serves requests, like `GET /health`."""

    def __init__(self, gateway: ServingCheck, services: frozenset[str]) -> None:
        """Create the service.

        Args:
            gateway: The gateway whose state is reported.
            services: Names of gRPC services that clients may ask for; the empty name is the whole server.
        """
        self._gateway = gateway
        self._services = services | {""}

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
        """Yield the status of a service whenever it changes."""
        last: health_pb2.HealthCheckResponse | None = None
        while True:
            current = self._response()
            if request.service not in self._services:
                current.status = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            if current != last:
                yield current
                last = current
            await asyncio.sleep(WATCH_SECONDS)

    def _response(self) -> health_pb2.HealthCheckResponse:
        status = health_pb2.HealthCheckResponse
        serving = not self._gateway.not_serving_reason
        return status(status=status.SERVING if serving else status.NOT_SERVING)
