# SPDX-License-Identifier: Apache-2.0
"""The OpenAI API and the admin API, as two ASGI applications of one gateway.

`main` serves both. No other module outside of `openai`, `responses`, `anthropic` and `pooling` imports
`openai`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

from mizzen import __version__
from mizzen.gateway.auth.limit_sharing import LOAN_PATH, LoanRequest
from mizzen.gateway.auth.middleware import add_auth_middleware
from mizzen.gateway.config import GatewayConfig
from mizzen.gateway.engines.verify import verify_engine
from mizzen.gateway.engines.verify_request import parse_verify_request
from mizzen.gateway.error_shapes import shape_error
from mizzen.gateway.errors import ApiError, invalid
from mizzen.gateway.gateway import Gateway
from mizzen.gateway.http.middleware import HealthEndpoint, RequestMiddleware
from mizzen.gateway.http.request_bodies import ClientGone, RequestBody
from mizzen.gateway.http.unknown_path import describe_unknown_path
from mizzen.gateway.images.limits import configured_limits
from mizzen.gateway.openai.endpoints import (
    add_generation_endpoints,
    add_messages_endpoints,
    add_token_endpoints,
)
from mizzen.gateway.openai.openapi_document import describe_response, install_openapi
from mizzen.gateway.openai.output_form import FamilyOptions
from mizzen.gateway.openai.parse import RequestParser
from mizzen.gateway.openai.response_bodies import Model, ModelList
from mizzen.gateway.playground.playground_page import add_playground
from mizzen.gateway.pooling.endpoints import add_pooling_endpoints
from mizzen.gateway.routing.debug_route import explain_route
from mizzen.gateway.services import Service
from mizzen.gateway.telemetry.table_watch import parse_wait, routing_table, table_version


def create_app(config: GatewayConfig, gateway: Gateway | None = None) -> FastAPI:
    """Return the ASGI application of the OpenAI API.

    Without a `gateway`, the application creates one, starts it at startup and closes it at shutdown.

    Raises:
        ValueError: a key or token file cannot be read.
    """
    owns_gateway = gateway is None
    gateway = gateway or Gateway(config)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if owns_gateway:
            await gateway.start()
        yield
        if owns_gateway:
            await gateway.close()
            await gateway.flush()

    app = FastAPI(title="Mizzen", version=__version__, lifespan=lifespan)
    app.state.gateway = gateway
    add_auth_middleware(app, gateway)
    app.add_middleware(
        RequestMiddleware, metrics=gateway.metrics, access_log=gateway.access_log, tracing=gateway.tracing
    )
    app.add_middleware(HealthEndpoint, gateway=gateway)
    add_error_handlers(app)
    parser = new_parser(gateway.config)
    add_generation_endpoints(app, gateway, parser)
    add_messages_endpoints(app, gateway, parser)
    families = family_options(gateway.config)
    add_pooling_endpoints(app, gateway, families)
    add_token_endpoints(app, gateway, families)
    add_model_endpoints(app, gateway)
    if gateway.config.api_metrics:
        add_metrics_endpoint(app, gateway)
    if gateway.config.playground:
        add_playground(app)
    install_openapi(app, strict_fields=gateway.config.strict_fields)
    return app


def family_options(config: GatewayConfig) -> FamilyOptions:
    """Return the options that choose the formats of tool calls and reasoning."""
    return FamilyOptions(tools=config.tool_parser, reasoning=config.reasoning_parser)


def new_parser(config: GatewayConfig) -> RequestParser:
    """Return the parser of chat and completion requests."""
    return RequestParser(
        family_options(config), strict_fields=config.strict_fields, image_limits=configured_limits(config)
    )


def add_model_endpoints(app: FastAPI, gateway: Gateway) -> None:
    """Add the endpoints that list and describe models."""
    created = int(time.time())

    def model(name: str, service: Service) -> Model:
        context = service.table.max_context_length
        return Model(
            name, created, root=service.models[0], max_model_len=context if context else msgspec.UNSET
        )

    @app.get("/v1/models", openapi_extra=describe_response(ModelList))
    async def models(request: Request) -> Response:
        """List the models that the request's key may use, and their aliases."""
        return json_response(ModelList([model(*entry) for entry in gateway.models_for(request.scope)]))

    @app.get("/v1/models/{name:path}", openapi_extra=describe_response(Model))
    async def describe_model(name: str, request: Request) -> Response:
        """Describe a model."""
        return json_response(model(name, gateway.find_service(name, request.scope)))


def create_admin_app(gateway: Gateway) -> FastAPI:
    """Return the ASGI application of the admin port: health, metrics and admin API."""
    app = FastAPI(title="Mizzen gateway administration", version=__version__)
    add_error_handlers(app)
    parser = new_parser(gateway.config)

    @app.get("/healthz")
    async def healthz() -> Response:
        """Answer 200 as long as the process runs."""
        return Response(b"ok\n", media_type="text/plain")

    @app.get("/readyz")
    async def readyz() -> Response:
        """Answer 200 if configuration, keys and routing table are in sync, even without any engine."""
        reason = gateway.not_ready_reason
        return Response(f"{reason or 'ok'}\n".encode(), 503 if reason else 200, media_type="text/plain")

    add_metrics_endpoint(app, gateway)

    def check_admin(request: Request) -> None:
        if not gateway.admin_enabled:
            raise ApiError(404, "the admin API is off; --admin-token-file turns it on")
        if not gateway.is_admin(request.headers.get("authorization", "")):
            raise ApiError(401, "the admin API needs its bearer token", code="invalid_token")

    @app.get("/admin/engines")
    async def engines(request: Request) -> Response:
        """Return the routing table, or 304 if it is still at `version` after `wait` seconds."""
        check_admin(request)
        query = request.query_params
        known_version, seconds = query.get("version", ""), parse_wait(query.get("wait"))

        def changed() -> bool:
            chosen = gateway.list_services(query.get("service"))
            return table_version(chosen, gateway.services.synced, gateway.tenants) != known_version

        if (
            known_version
            and seconds > 0
            and not await gateway.table_watch.wait(seconds, changed, request.is_disconnected)
        ):
            return Response(status_code=304)
        chosen = gateway.list_services(query.get("service"))
        return json_response(routing_table(chosen, gateway.services.synced, gateway.tenants))

    @app.post("/admin/verify")
    async def verify(request: Request) -> Response:
        """Run a golden prompt on an engine that awaits verification, and return the output."""
        check_admin(request)
        question = parse_verify_request(await read_body(gateway, request))
        return json_response(await verify_engine(gateway.list_services(question.service), question))

    @app.post(LOAN_PATH)
    async def loan(request: Request) -> Response:
        """Lend another process of the gateway an unused amount of an API key's limit."""
        check_admin(request)
        try:
            question = msgspec.json.decode(await read_body(gateway, request), type=LoanRequest)
        except msgspec.DecodeError as error:
            raise invalid(str(error)) from None
        return json_response(gateway.tenants.sharing.lend(question))

    @app.post("/debug/route")
    async def debug_route(request: Request) -> Response:
        """Explain to which engine the request in the body would be routed, and why."""
        check_admin(request)
        body, headers = await read_body(gateway, request), request.headers.raw
        return json_response(await explain_route(gateway, body, headers, parser.parse_chat_or_completion))

    return app


def add_metrics_endpoint(app: FastAPI, gateway: Gateway) -> None:
    """Add /metrics."""

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(gateway.metrics_text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def read_body(gateway: Gateway, request: Request) -> bytes:
    """Return the body of an admin request; the limits of the OpenAI API apply.

    Raises:
        ApiError: 413 if the body is too long, 408 if it does not arrive in time, 429 or 503 if the bodies of
            all requests take too much memory.
        ClientGone: the client closed the connection.
    """
    with RequestBody(gateway.body_budget, gateway.config.max_body_bytes, gateway.body_limit) as body:
        return await body.read(request.scope, request.receive)


def json_response(value: object) -> Response:
    """Return a JSON response."""
    return Response(msgspec.json.encode(value), media_type="application/json")


def error_response(error: ApiError, request: Request) -> Response:
    """Return the response for an error, in the shape of the API that the request uses."""
    status, body = shape_error(error, request.scope)
    response = Response(body, status)
    response.raw_headers += error.headers()
    return response


def add_error_handlers(app: FastAPI) -> None:
    """Make an application return every error in the shape of the API that the request uses."""

    def describe(request: Request, error: HTTPException) -> str:
        if error.status_code == 404:
            paths = [route.path for route in app.routes if isinstance(route, Route)]
            return describe_unknown_path(request.url.path, paths)
        if error.status_code == 405:
            return f"{request.method} is not allowed here: use {(error.headers or {}).get('Allow', 'POST')}"
        return error.detail

    async def api_error(request: Request, error: Exception) -> Response:
        if isinstance(error, ApiError):
            return error_response(error, request)
        if isinstance(error, ClientGone):
            return error_response(ApiError(400, str(error)), request)
        if isinstance(error, HTTPException):
            response = error_response(ApiError(error.status_code, describe(request, error)), request)
            response.headers.update(error.headers or {})
            return response
        return error_response(ApiError(500, "internal error", code="internal_error"), request)

    handler: Callable[[Request, Exception], Awaitable[Response]] = api_error
    for kind in (ApiError, ClientGone, HTTPException, Exception):
        app.add_exception_handler(kind, handler)
