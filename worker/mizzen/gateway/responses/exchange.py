"""Serve one request of the Responses API.

`ResponsesExchange` is a `GenerationExchange` whose errors name the fields of the Responses API, and whose
stream ends with a `response.failed` event if it fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mizzen.gateway.errors import ApiError
from mizzen.gateway.requests.exchange import GenerationExchange
from mizzen.gateway.requests.generation_request import GenerationRequest
from mizzen.gateway.responses.parse import ParsedResponsesRequest, ResponsesParser, rename_field
from mizzen.gateway.responses.response_writer import ResponsesWriter

if TYPE_CHECKING:
    from mizzen.gateway.gateway import Gateway


class ResponsesContext:
    """The parsed request and the response writer of one exchange; each is None until it is created."""

    def __init__(self, parser: ResponsesParser) -> None:
        self._parser = parser
        self.parsed: ParsedResponsesRequest | None = None
        self.writer: ResponsesWriter | None = None

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
        self.writer = ResponsesWriter(self.parsed)
        return self.writer


class ResponsesExchange(GenerationExchange):
    """Exchange of one request of the Responses API; the request is served as a chat request."""

    def __init__(self, gateway: Gateway, parser: ResponsesParser) -> None:
        self._context = ResponsesContext(parser)
        super().__init__(gateway, self._context.parse, self._context.new_writer)

    async def _send_error(self, error: ApiError) -> None:
        """Send an error; if it names a chat field, use the field's name in the Responses API instead."""
        if self._context.parsed is not None:
            rename_field(error)
        await super()._send_error(error)

    def _stream_failure(self, error: ApiError) -> bytes:
        """Return the event that ends a failed stream: the response, with status `failed`."""
        writer = self._context.writer
        return super()._stream_failure(error) if writer is None else writer.failure_event(error)
