# SPDX-License-Identifier: Apache-2.0
"""Serve one request of the Responses API.

`ResponsesExchange` is a `GenerationExchange` whose errors name the fields of the Responses API, and whose
stream ends with a `response.failed` event if it fails. If the gateway stores responses, the exchange
completes the request's input from them, and stores its response.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from starlette.types import Scope

from mizzen.gateway.auth.authentication import get_tenant_name
from mizzen.gateway.errors import ApiError
from mizzen.gateway.requests.exchange import GenerationExchange
from mizzen.gateway.requests.generation_request import GenerationRequest
from mizzen.gateway.responses.input_items import NOT_STORED
from mizzen.gateway.responses.parse import ParsedResponsesRequest, ResponsesParser, rename_field
from mizzen.gateway.responses.response_store import ResponseStore, StoredResponse
from mizzen.gateway.responses.response_writer import ResponsesWriter
from mizzen.gateway.responses.stored_input import NewTurn, complete_input, describe_store, read_input

if TYPE_CHECKING:
    from mizzen.gateway.gateway import Gateway

_INPUT_PATH = re.compile(r"input\[(\d+)\]")


class ResponsesContext:
    """The parsed request and the response writer of one exchange; each is None until it is created."""

    def __init__(self, parser: ResponsesParser) -> None:
        self._parser = parser
        self.parsed: ParsedResponsesRequest | None = None
        self.writer: ResponsesWriter | None = None
        self.turn: NewTurn | None = None
        """Turn that the request adds to its conversation; None if the gateway stores no responses."""

    def parse(self, body: bytes) -> GenerationRequest:
        """Parse a request body, and keep the parsed request.

        Raises:
            ApiError: 400 if a field is invalid or not supported; the error names it.
        """
        self.parsed = self._parser.parse(body)
        return self.parsed.generation

    def new_writer(self, generation: GenerationRequest) -> ResponsesWriter:
        """Create and keep the response writer; `parse` must have been called."""
        if self.parsed is None:
            raise RuntimeError("the request has not been parsed")
        self.writer = ResponsesWriter(self.parsed, self.turn)
        return self.writer


class ResponsesExchange(GenerationExchange):
    """Exchange of one request of the Responses API; the request is served as a chat request."""

    def __init__(self, gateway: Gateway, parser: ResponsesParser) -> None:
        self._context = ResponsesContext(parser)
        super().__init__(gateway, self._context.parse, self._context.new_writer)

    async def _serve(self, body: bytes) -> None:
        store = self._gateway.response_store
        if store is None:
            await super()._serve(body)
            return
        budget, owner = self._gateway.body_budget, owner_of(self._scope)
        completed = await self._complete_input(body, store, owner)
        budget.reserve(len(completed), owner)
        try:
            await super()._serve(completed)
        finally:
            budget.release(len(completed), owner)

    async def _complete_input(self, body: bytes, store: ResponseStore, owner: str) -> bytes:
        """Return the request's body with its whole conversation, or `body` itself if it is malformed."""
        request = await self._gateway.body_reader.parse_body(body, read_input, self._scope)
        if request is None:
            return body
        limit = self._gateway.body_limit()
        completed, self._context.turn = complete_input(request, store, owner, limit)
        return completed

    async def _send_error(self, error: ApiError) -> None:
        """Send an error; if it names a chat field, use the field's name in the Responses API instead.

        The indices of input items do not count the items of earlier turns.
        """
        if self._context.parsed is not None:
            rename_field(error, self._context.parsed.tools)
        if self._context.turn is not None and self._context.turn.earlier_count:
            shift_indices(error, self._context.turn.earlier_count)
        await super()._send_error(error)

    def _stream_failure(self, error: ApiError) -> bytes:
        """Return the event that ends a failed stream: the response, with status `failed`."""
        writer = self._context.writer
        return super()._stream_failure(error) if writer is None else writer.failure_event(error)


def shift_indices(error: ApiError, count: int) -> None:
    """If an error names an input item, subtract `count`, the number of earlier items, from its index.

    If the item is part of an earlier turn, the error names `previous_response_id` instead.
    """
    name = error.param or ""
    path = _INPUT_PATH.match(name)
    if path is None:
        return
    index = int(path[1]) - count
    error.param = f"input[{index}]{name[path.end() :]}" if index >= 0 else "previous_response_id"
    error.message = error.message.replace(name, error.param, 1)


def owner_of(scope: Scope) -> str:
    """Return the owner of the responses of a request: the name of its API key, empty if there are no keys."""
    return get_tenant_name(scope)


def find_response(gateway: Gateway, scope: Scope, response_id: str) -> StoredResponse:
    """Return a stored response of the request's owner.

    Raises:
        ApiError: 404 if it is not stored.
    """
    store = gateway.response_store
    found = None if store is None else store.find(owner_of(scope), response_id)
    if found is None:
        raise response_not_found(store, response_id)
    return found


def remove_response(gateway: Gateway, scope: Scope, response_id: str) -> None:
    """Remove a stored response of the request's owner.

    Raises:
        ApiError: 404 if it is not stored.
    """
    store = gateway.response_store
    if store is None or not store.remove(owner_of(scope), response_id):
        raise response_not_found(store, response_id)


def response_not_found(store: ResponseStore | None, response_id: str) -> ApiError:
    """Return the 404 error for a response that is not stored."""
    reason = NOT_STORED if store is None else describe_store(store)
    text = f"there is no stored response {response_id[:80]!r}: {reason}"
    return ApiError(404, text, param="response_id", code="response_not_found")
