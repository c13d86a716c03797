"""One response request, from its body to its last event."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mizzen.gateway.errors import ApiError
from mizzen.gateway.openai.exchange import Exchange
from mizzen.gateway.openai.wish import Wish
from mizzen.gateway.responses.parse import Asked, ResponsesParser, rename
from mizzen.gateway.responses.writer import ResponsesWriter

if TYPE_CHECKING:
    from mizzen.gateway.service import Gateway


class ResponsesExchange(Exchange):
    """Serves one response: a chat whose request and answer have another shape."""

    def __init__(self, gateway: Gateway, parser: ResponsesParser) -> None:
        super().__init__(gateway, self._read, self._write_response)
        self._parser = parser
        self._asked: Asked | None = None
        self._response: ResponsesWriter | None = None

    def _read(self, body: bytes) -> Wish:
        self._asked = self._parser.read(body)
        return self._asked.wish

    def _write_response(self, wish: Wish) -> ResponsesWriter:
        if self._asked is None:
            raise RuntimeError("the request has not been read")
        self._response = ResponsesWriter(self._asked)
        return self._response

    async def _error(self, error: ApiError) -> None:
        """Answer with an error that names the fields of this request."""
        if self._asked is not None:
            rename(error)
        await super()._error(error)

    def _failed(self, error: ApiError) -> bytes:
        """Return what ends a stream that cannot go on: the response, failed."""
        return super()._failed(error) if self._response is None else self._response.failed(error)
