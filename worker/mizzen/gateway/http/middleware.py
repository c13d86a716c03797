# SPDX-License-Identifier: Apache-2.0
"""Outermost middleware of the OpenAI API: request ids, metrics, access log, traces, and `GET /health`."""

from __future__ import annotations

import logging
import secrets
import time
from typing import Protocol

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mizzen.gateway.auth.authentication import get_tenant, send_error
from mizzen.gateway.error_shapes import request_id_headers
from mizzen.gateway.errors import ApiError
from mizzen.gateway.telemetry.access_log import AccessLog
from mizzen.gateway.telemetry.fast_metrics import OTHER_LABEL
from mizzen.gateway.telemetry.metrics import Metrics
from mizzen.gateway.telemetry.request_record import NO_STATUS, RECORD_KEY, RequestRecord
from mizzen.gateway.telemetry.tracing import Tracing

log = logging.getLogger(__name__)

MAX_REQUEST_ID = 128
INTERNAL_ERROR = "internal_error"


class ServingCheck(Protocol):
    """Tells whether the gateway serves requests; see `mizzen.gateway.gateway.Gateway`."""

    @property
    def not_serving_reason(self) -> str:
        """Reason why no request would be served now; empty if requests would be served."""
        ...


class RequestMiddleware:
    """Middleware that gives each request an id and a record.

    When the request ends, its record is reported to metrics, access log and traces.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        access_log: AccessLog | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._access_log = access_log
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with an id: its header x-request-id if that is valid, else a new id."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["path"] = scope["path"].rstrip("/") or "/"  # a redirect would lose the API key and the body
        headers = dict(scope["headers"])
        request_id = (
            valid_request_id(headers.get(b"x-request-id", b"")) or b"req-" + secrets.token_hex(12).encode()
        )
        id_headers = [(name, request_id) for name in request_id_headers(scope)]
        record = RequestRecord(request_id=request_id.decode(), method=scope["method"], path=scope["path"])
        record.keeps_prompt = self._access_log is not None and self._access_log.prompts
        scope[RECORD_KEY] = record
        root = self._tracing.begin(record, headers) if self._tracing else None

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *id_headers]
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception:
            record.error = INTERNAL_ERROR
            if record.status != NO_STATUS:  # the response has begun: the server closes the connection
                raise
            log.exception("a request failed", extra={"fields": {"id": record.request_id}})
            await send_error(scope, sending, ApiError(500, "internal error", code=INTERNAL_ERROR))
        finally:
            record.ended = time.monotonic()
            self._publish(record, scope)
            if self._tracing:
                self._tracing.end(record, root, endpoint_path(scope))

    def _publish(self, record: RequestRecord, scope: Scope) -> None:
        tenant = get_tenant(scope)
        if tenant is not None:
            record.key = tenant.name
        self._metrics.count_request(record, endpoint_path(scope))
        if self._access_log is not None:
            self._access_log.write(record)


class HealthEndpoint:
    """Middleware that answers `GET /health` on the API's port, as vLLM and SGLang do.

    Load balancers that can reach no other port, and programs that wait until they can send requests, use it.
    It is not for probes of the gateway's pod: these use /healthz and /readyz on the admin port, which do not
    depend on the engines.
    """

    def __init__(self, app: ASGIApp, gateway: ServingCheck) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer `GET /health` with 200 if requests would be served, else 503; pass other requests on."""
        if scope["type"] != "http" or scope["path"] != "/health" or scope["method"] not in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        reason = self._gateway.not_serving_reason
        content = f"{reason}\n" if reason else None
        await Response(content, 503 if reason else 200, media_type="text/plain")(scope, receive, send)


def valid_request_id(request_id: bytes) -> bytes:
    """Return a client's request id, or b"" if it is too long, or not safe in headers and logs."""
    valid = 0 < len(request_id) <= MAX_REQUEST_ID and all(0x21 <= byte < 0x7F for byte in request_id)
    return request_id if valid else b""


def endpoint_path(scope: Scope) -> str:
    """Return the path template of the route that a request matched, or `other`."""
    return getattr(scope.get("route"), "path", OTHER_LABEL)
