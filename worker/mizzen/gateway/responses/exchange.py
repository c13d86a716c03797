"""One response request, from its body to its last event."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mizzen.gateway.errors import ApiError
from mizzen.gateway.openai.exchange import Exchange
from mizzen.gateway.requests.generation_request import GenerationRequest
from mizzen.gateway.responses.parse import Asked, ResponsesParser, rename
from mizzen.gateway.responses.response_writer import ResponsesWriter

if TYPE_CHECKING:
    from mizzen.gateway.gateway import Gateway


class Reading:
    """What a request asks for, and who writes its answer, once they are known."""

    def __init__(self, parser: ResponsesParser) -> None:
        self._parser = parser
        self.asked: Asked | None = None
        self.response: ResponsesWriter | None = None

    def read(self, body: bytes) -> GenerationRequest:
        """Return what a body asks for.

        Raises:
            ApiError: it cannot be served.
        """
        self.asked = self._parser.read(body)
        return self.asked.generation

    def write(self, generation: GenerationRequest) -> ResponsesWriter:
        """Return who writes the answer."""
        if self.asked is None:
            raise RuntimeError("the request has not been read")
        self.response = ResponsesWriter(self.asked)
        return self.response


class ResponsesExchange(Exchange):
    """Serves one response: a chat whose request and answer have another shape."""

    def __init__(self, gateway: Gateway, parser: ResponsesParser) -> None:
        self._reading = Reading(parser)
        super().__init__(gateway, self._reading.read, self._reading.write)

    async def _error(self, error: ApiError) -> None:
        """Answer with an error that names the fields of this request."""
        if self._reading.asked is not None:
            rename(error)
        await super()._error(error)

    def _failed(self, error: ApiError) -> bytes:
        """Return what ends a stream that cannot go on: the response, failed."""
        response = self._reading.response
        return super()._failed(error) if response is None else response.failed(error)
