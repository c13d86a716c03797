"""The outermost layer of the OpenAI API: each request's id, and what is counted, logged and traced of it."""

from __future__ import annotations

import logging
import secrets
import time
from typing import Protocol

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mizzen.gateway.auth.authentication import get_tenant, send_error
from mizzen.gateway.errors import ApiError
from mizzen.gateway.telemetry.access_log import AccessLog
from mizzen.gateway.telemetry.fast_metrics import OTHER_LABEL
from mizzen.gateway.telemetry.metrics import Metrics
from mizzen.gateway.telemetry.request_record import NO_STATUS, SCOPE_KEY, RequestRecord
from mizzen.gateway.telemetry.tracing import Tracing

log = logging.getLogger(__name__)

MAX_REQUEST_ID = 128
INTERNAL_ERROR = "internal_error"


class ReadinessCheck(Protocol):
    """Knows whether requests are served; see `mizzen.gateway.gateway.Gateway`."""

    @property
    def not_ready_reason(self) -> str:
        """Why not; empty when they are."""
        ...


class RequestMiddleware:
    """Outermost layer: request ids, records, and whoever reads them."""

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
        """Pass a request on; its id is the client's x-request-id, or a new one."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["path"] = scope["path"].rstrip("/") or "/"  # a redirect would lose keys and bodies
        headers = dict(scope["headers"])
        request_id = valid_request_id(headers.get(b"x-request-id", b"")) or b"req-" + secrets.token_hex(12).encode()
        record = RequestRecord(request_id=request_id.decode(), method=scope["method"], path=scope["path"])
        record.keeps_prompt = self._access_log is not None and self._access_log.prompts
        scope[SCOPE_KEY] = record
        root = self._tracing.begin(record, headers) if self._tracing else None

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception:
            record.error = INTERNAL_ERROR
            if record.status != NO_STATUS:  # it has begun: the server closes the connection
                raise
            log.exception("a request failed", extra={"fields": {"id": record.request_id}})
            await send_error(sending, ApiError(500, "internal error", code=INTERNAL_ERROR))
        finally:
            record.ended = time.monotonic()
            self._publish(record, scope)
            if self._tracing:
                self._tracing.end(record, root, endpoint_path(scope))

    def _publish(self, record: RequestRecord, scope: Scope) -> None:
        tenant = get_tenant(scope)
        if tenant is not None:
            record.key = tenant.name
        self._metrics.ended(record, endpoint_path(scope))
        if self._access_log is not None:
            self._access_log.write(record)


class HealthEndpoint:
    """Answers `GET /health` of the API's port, as vLLM and SGLang do: for those that have no other to ask."""

    def __init__(self, app: ASGIApp, gateway: ReadinessCheck) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 200 where a request may be sent, 503 where none should be; pass on all other requests."""
        if scope["type"] != "http" or scope["path"] != "/health" or scope["method"] not in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        response = Response(status_code=503 if self._gateway.not_ready_reason else 200)
        await response(scope, receive, send)


def valid_request_id(given: bytes) -> bytes:
    """Return a client's request id, or nothing when it is none that may be repeated in headers and logs."""
    fits = 0 < len(given) <= MAX_REQUEST_ID and all(0x21 <= byte < 0x7F for byte in given)
    return given if fits else b""


def endpoint_path(scope: Scope) -> str:
    """Return the path of the API's that a request has matched, without what clients fill in; or `other`."""
    return getattr(scope.get("route"), "path", OTHER_LABEL)
