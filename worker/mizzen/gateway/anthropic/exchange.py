# SPDX-License-Identifier: Apache-2.0
"""Serve requests of the Messages API: answers, and counts of prompt tokens.

`MessagesExchange` is a `GenerationExchange` whose errors name the fields of the Messages API, and whose
stream ends with an `error` event if it fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.types import Scope

from mizzen.gateway.anthropic.parse import MessagesParser, ParsedMessagesRequest, rename_field
from mizzen.gateway.anthropic.response_bodies import CountTokensResponse
from mizzen.gateway.anthropic.response_writer import MessagesWriter
from mizzen.gateway.error_shapes import messages_error_body
from mizzen.gateway.errors import ApiError
from mizzen.gateway.images.hold import hold_images
from mizzen.gateway.openai.tokenize import find_text_model
from mizzen.gateway.requests.engine_request import tokenize_prompt
from mizzen.gateway.requests.exchange import GenerationExchange
from mizzen.gateway.requests.generation_request import GenerationRequest
from mizzen.gateway.telemetry.request_record import get_record

if TYPE_CHECKING:
    from mizzen.gateway.gateway import Gateway


class MessagesContext:
    """The parsed request of one exchange; None until it is parsed."""

    def __init__(self, parser: MessagesParser) -> None:
        self._parser = parser
        self.parsed: ParsedMessagesRequest | None = None

    def parse(self, body: bytes) -> GenerationRequest:
        """Parse a request body, and keep the parsed request.

        Raises:
            ApiError: 400 if a field is invalid or not supported; the error names it.
        """
        self.parsed = self._parser.parse(body)
        return self.parsed.generation


class MessagesExchange(GenerationExchange):
    """Exchange of one request of the Messages API; the request is served as a chat request."""

    def __init__(self, gateway: Gateway, parser: MessagesParser) -> None:
        self._context = MessagesContext(parser)
        super().__init__(gateway, self._context.parse, MessagesWriter)

    async def _send_error(self, error: ApiError) -> None:
        """Send an error; if it names a chat field, use the field's name in the Messages API instead."""
        if self._context.parsed is not None:
            rename_field(error, self._context.parsed.tools)
        await super()._send_error(error)

    def _stream_failure(self, error: ApiError) -> bytes:
        """Return the event that ends a failed stream. No `message_stop` follows it."""
        return b"event: error\ndata: %b\n\n" % messages_error_body(error, self._scope)


class CountTokensHandler:
    """Handler of POST /v1/messages/count_tokens, which needs a model's tokenizer but no engine."""

    def __init__(self, gateway: Gateway, parser: MessagesParser) -> None:
        self._gateway = gateway
        self._parser = parser

    async def count_tokens(self, body: bytes, scope: Scope) -> CountTokensResponse:
        """Return the number of prompt tokens that a request for an answer would have.

        Raises:
            ApiError: the request is invalid, or no engine has announced the model's tokenizer.
        """
        parsed = await self._gateway.body_reader.parse_body(body, self._parser.parse_count, scope)
        generation = parsed.generation
        get_record(scope).ignored_fields = generation.ignored_fields
        _, text = find_text_model(self._gateway, generation.model, scope)
        try:
            with hold_images(self._gateway, generation, scope):
                prompt = await tokenize_prompt(generation, text)
        except ApiError as error:
            rename_field(error, parsed.tools)
            raise
        return CountTokensResponse(len(prompt.ids))
