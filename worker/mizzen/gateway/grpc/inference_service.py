# SPDX-License-Identifier: Apache-2.0
"""The service `mizzen.inference.v1.Inference`, whose calls run as requests of the HTTP API."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
import grpc.aio
import msgspec
from starlette.types import ASGIApp

from mizzen.gateway.errors import ApiError
from mizzen.gateway.gateway import Gateway
from mizzen.gateway.grpc import inference_pb2 as pb
from mizzen.gateway.grpc.in_process_request import InProcessRequest, ResponseStart
from mizzen.gateway.grpc.request_bodies import (
    completion_body,
    embed_response,
    embedding_body,
    generate_response,
)
from mizzen.gateway.grpc.status_codes import (
    CODES,
    CallError,
    read_error,
    read_stream_error,
    trailing_metadata,
)

log = logging.getLogger(__name__)

PASSED_METADATA = ("authorization", "traceparent", "tracestate", "x-mizzen-session")
"""Metadata of calls that are passed on as headers."""
DONE = b"[DONE]"
OFF_LOOP_TOKENS = 16_384
"""Number of token ids above which a message is converted in a thread."""
TOKEN_BYTES = 2
"""Minimum size of a token id in JSON: a digit and a comma."""

Context = grpc.aio.ServicerContext[Any, Any]
CallKey = tuple[str, str]
"""API key and request id of a call."""


class InferenceService:
    """Handlers of the calls."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway
        self._running: dict[CallKey, InProcessRequest] = {}

    async def generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Generate tokens after a prompt."""
        async with end_with_status(context):
            count = len(request.prompt_token_ids) + len(request.sampling.stop_token_ids)
            body = await self._encode_body(context, count, lambda: completion_body(request))
            call = self._new_request(context, "/v1/completions", body, request.request_id)
            with self._register(context, request.request_id, call):
                async with call:
                    await check_status(call, context)
                    async for event in read_events(call):
                        if "error" in event:
                            raise read_stream_error(event["error"])
                        response = generate_response(event, request.return_text)
                        if response is not None:
                            yield response

    async def embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """Return an embedding of each input."""
        async with end_with_status(context):
            count = sum(1 + len(entry.ids) for entry in request.inputs)
            body = await self._encode_body(context, count, lambda: embedding_body(request))
            call = self._new_request(context, "/v1/embeddings", body, request.request_id)
            with self._register(context, request.request_id, call):
                async with call:
                    await check_status(call, context)
                    answer = await call.read_body()
                    if call.disconnected:
                        raise aborted()
                    return embed_response(msgspec.json.decode(answer))

    async def abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """End a running call of the same API key."""
        call = self._running.get((authorization(context), request.request_id))
        if call is not None:
            call.disconnect()
        return pb.AbortResponse(aborted=call is not None)

    async def get_model_info(self, request: pb.GetModelInfoRequest, context: Context) -> pb.ModelInfo:
        """Describe a model that the API key may use."""
        async with end_with_status(context):
            headers = passed_headers(context)
            async with InProcessRequest(self._app, "GET", f"/v1/models/{request.model}", headers) as call:
                await check_status(call, context)
            service = self._gateway.services.find_by_model(request.model)
            if service is None:
                raise CallError(grpc.StatusCode.NOT_FOUND, f"{request.model} is not served any more")
            serving = [
                (engine.properties, engine.link.welcome)
                for engine in service.table
                if engine.serving and engine.link.welcome is not None
            ]
            if not serving:
                raise CallError(grpc.StatusCode.UNAVAILABLE, f"no engine of {request.model} serves")
            properties, welcome = serving[0]
            return pb.ModelInfo(
                model=request.model,
                context_length=max(each.context_length for _, each in serving),
                vocab_size=welcome.vocab_size,
                end_token_ids=welcome.end_token_ids,
                task=properties.task,
            )

    async def _encode_body(
        self, context: Context, token_count: int, convert: Callable[[], dict[str, Any]]
    ) -> bytes:
        """Return the body of the HTTP request for a message, which `convert` returns as an object.

        A message of many token ids is converted in a thread, and only if its API key is valid.

        Raises:
            CallError: the API key of a long message is not valid, or the body would be too large.
        """
        if token_count <= OFF_LOOP_TOKENS:
            return msgspec.json.encode(convert())
        try:
            self._gateway.tenants.authenticate({"headers": passed_headers(context)})
        except ApiError as error:
            code = CODES.get(error.status, grpc.StatusCode.INTERNAL)
            raise CallError(code, error.message) from error
        limit = self._gateway.config.max_body_bytes
        if token_count * TOKEN_BYTES > limit:
            text = f"{token_count} token ids are too many: as JSON they exceed {limit} bytes"
            raise CallError(grpc.StatusCode.INVALID_ARGUMENT, text)
        return await asyncio.to_thread(lambda: msgspec.json.encode(convert()))

    def _new_request(self, context: Context, path: str, body: bytes, request_id: str) -> InProcessRequest:
        headers = [*passed_headers(context), (b"content-type", b"application/json")]
        if request_id:
            headers.append((b"x-request-id", request_id.encode()))
        return InProcessRequest(self._app, "POST", path, headers, body)

    @contextmanager
    def _register(self, context: Context, request_id: str, call: InProcessRequest) -> Iterator[None]:
        """Let `abort` find a call that has a request id.

        Raises:
            CallError: a call of the same API key with this id is running.
        """
        key = authorization(context), request_id
        if not request_id:
            yield
            return
        if key in self._running:
            raise CallError(grpc.StatusCode.ALREADY_EXISTS, f"a call with request_id {request_id} is running")
        self._running[key] = call
        try:
            yield
        finally:
            del self._running[key]


def authorization(context: Context) -> str:
    """Return the credentials of a call, or an empty text."""
    return next((str(value) for name, value in metadata(context) if name == "authorization"), "")


def metadata(context: Context) -> list[tuple[str, str]]:
    """Return the metadata of a call whose values are text."""
    entries = context.invocation_metadata() or ()
    return [(name, value) for name, value in entries if isinstance(value, str)]


def passed_headers(context: Context) -> list[tuple[bytes, bytes]]:
    """Return the headers of the HTTP request for a call; the deadline becomes the request's timeout."""
    headers = [
        (name.encode(), value.encode()) for name, value in metadata(context) if name in PASSED_METADATA
    ]
    seconds = context.time_remaining()
    if seconds is not None:
        headers.append((b"x-request-timeout", f"{max(seconds, 0.001):.3f}".encode()))
    return headers


async def check_status(call: InProcessRequest, context: Context) -> ResponseStart:
    """Read the status of a response, and pass its headers on.

    Raises:
        CallError: the status is not 200, or the call was aborted.
        RuntimeError: the application ended without a response.
    """
    try:
        start = await call.read_start()
    except RuntimeError as error:
        if call.disconnected:
            raise aborted() from error
        raise
    context.set_trailing_metadata(trailing_metadata(start))
    if start.status != 200:
        raise read_error(start, await call.read_body())
    return start


async def read_events(call: InProcessRequest) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a stream.

    Raises:
        CallError: the stream ended before its last event, because the call was aborted.
        RuntimeError: the stream ended before its last event for another reason.
    """
    rest = b""
    async for part in call.iterate_body():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            if data == DONE:
                return
            if data:
                yield msgspec.json.decode(data)
    if call.disconnected:
        raise aborted()
    raise RuntimeError("the response ended before its last event")


def aborted() -> CallError:
    """Return the error of a call that `abort` ended."""
    return CallError(grpc.StatusCode.CANCELLED, "the call was aborted")


@asynccontextmanager
async def end_with_status(context: Context) -> AsyncIterator[None]:
    """End a call with the status of the `CallError` that the block raises.

    Clients do not see the text of other errors.
    """
    try:
        yield
    except CallError as error:
        await context.abort(error.code, str(error))
    except Exception:
        log.exception("a gRPC call failed")
        await context.abort(grpc.StatusCode.INTERNAL, "internal error")
