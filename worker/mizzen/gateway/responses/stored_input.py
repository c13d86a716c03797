# SPDX-License-Identifier: Apache-2.0
"""Complete the input of a request from stored responses, and store the response that ends its turn.

A request may continue a response (`previous_response_id`) and refer to earlier output items by their ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Raw

from mizzen.gateway.errors import ApiError, invalid
from mizzen.gateway.responses.response_bodies import ResponsesResponse
from mizzen.gateway.responses.response_store import ResponseStore, StoredResponse, Turn

REFERENCE = "item_reference"
REPLACED_FIELDS = ("input", "store", "previous_response_id")
"""Fields of a request that its completed body lacks, except for the new `input`."""
_decode_object = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_items = msgspec.json.Decoder(list[Raw]).decode


class ItemHead(msgspec.Struct):
    """Fields of an input item that tell whether it is a reference."""

    type: Any = None
    id: Any = None
    role: Any = None

    @property
    def is_reference(self) -> bool:
        """True for a reference; like OpenAI's API, this includes an item that has only an id."""
        return self.type == REFERENCE or (self.type is None and self.role is None and self.id is not None)


_decode_head = msgspec.json.Decoder(ItemHead).decode


@dataclass(slots=True)
class RequestInput:
    """Input of a request as it was sent, with its references to stored responses."""

    fields: dict[str, Raw]
    """Members of the request body."""
    items: list[bytes]
    """JSON of the input items; a text counts as a user message."""
    previous_id: str | None
    stored: bool
    """True unless the request sets `store` to false."""
    references: dict[int, str] = field(default_factory=dict)
    """Item id of each reference, by its index in `items`."""


@dataclass(frozen=True, slots=True)
class NewTurn:
    """The turn of a conversation that a request adds; its response ends it."""

    responses: ResponseStore
    owner: str
    items: list[bytes]
    """JSON of the request's own input items, after references have been replaced."""
    previous_id: str | None
    earlier: Turn | None
    """Last turn of the conversation that the request continues, if any."""
    stored: bool
    """True if the response is to be stored."""

    @property
    def earlier_count(self) -> int:
        """Number of items in earlier turns, which precede the request's own items."""
        return 0 if self.earlier is None else sum(turn.count for turn in self.earlier.conversation())

    def store(self, response: ResponsesResponse) -> None:
        """Store a complete response."""
        output = {item.id: msgspec.json.encode(item) for item in response.output}
        items = [*self.items, *output.values()]
        turn = Turn(b",".join(items), len(items), self.earlier)
        stored = StoredResponse(response.id, msgspec.json.encode(response), turn, output)
        self.responses.add(self.owner, stored)


def read_input(body: bytes) -> RequestInput | None:
    """Read the input of a request body; return None if the body or its input is malformed.

    Raises:
        ApiError: 400 if `previous_response_id` or the id of a reference is not a string, or `store` is not a
            boolean.
    """
    try:
        fields = _decode_object(body)
        previous_id = msgspec.json.decode(fields.get("previous_response_id", b"null"))
        store = msgspec.json.decode(fields.get("store", b"null"))
        items = split_items(bytes(fields["input"]))
        heads = [_decode_head(item) for item in items]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError):
        return None  # parsing the body for its request reports the fault
    if not isinstance(previous_id, str | None):
        raise invalid("previous_response_id must be a string", "previous_response_id", "invalid_type")
    if not isinstance(store, bool | None):
        raise invalid("store must be a boolean", "store", "invalid_type")
    references: dict[int, str] = {}
    for index, head in enumerate(heads):
        if head.is_reference:
            if not isinstance(head.id, str):
                raise invalid(f"input[{index}].id must be a string", f"input[{index}].id", "invalid_type")
            references[index] = head.id
    return RequestInput(fields, items, previous_id, store is not False, references)


def split_items(request_input: bytes) -> list[bytes]:
    """Return the JSON of each item of a request's input; a text becomes a user message.

    Raises:
        msgspec.DecodeError: the input is neither a text nor a list.
    """
    if request_input.startswith(b'"'):
        return [b'{"type":"message","role":"user","content":%b}' % request_input]
    return [bytes(item) for item in _decode_items(request_input)]


def complete_input(
    request: RequestInput, store: ResponseStore, owner: str, limit: int
) -> tuple[bytes, NewTurn]:
    """Return the body of a request with all items of its conversation, and the turn that the request adds.

    The body has no fields that refer to the store. Its size is at most `limit` bytes.

    Raises:
        ApiError: 400 or 404 if a response or an item is not stored, 413 if the conversation is too long.
    """
    items = list(request.items)
    for index, item_id in request.references.items():
        stored = store.find_item(owner, item_id)
        if stored is None:
            text = f"input[{index}]: there is no stored item {item_id[:80]!r} ({describe_store(store)})"
            raise ApiError(404, text, param=f"input[{index}].id", code="item_not_found")
        items[index] = stored
    previous_id = request.previous_id
    previous = None if previous_id is None else store.find(owner, previous_id)
    if previous is None and previous_id is not None:
        text = f"there is no stored response {previous_id[:80]!r} ({describe_store(store)})"
        field_name = "previous_response_id"
        raise invalid(f"{field_name}: {text}", field_name, "previous_response_not_found")
    earlier = None if previous is None else previous.turn
    history = [] if earlier is None else [turn.items for turn in earlier.conversation() if turn.count]
    body = join_body(request.fields, history + items, limit)
    return body, NewTurn(store, owner, items, previous_id, earlier, request.stored)


def join_body(fields: dict[str, Raw], items: list[bytes], limit: int) -> bytes:
    """Return a request body with these members, except `REPLACED_FIELDS`, and with these items as its input.

    Raises:
        ApiError: 413 if the body is longer than `limit` bytes.
    """
    rest = msgspec.json.encode({name: value for name, value in fields.items() if name not in REPLACED_FIELDS})
    size = len(rest) + sum(map(len, items)) + len(items) + len('"input":[],')
    if size > limit:
        text = f"the conversation with its stored items has {size} bytes; at most {limit} are allowed"
        raise ApiError(413, f"{text} (--max-body-bytes)", param="input", code="body_too_large")
    return b'{"input":[%b]%b%b' % (b",".join(items), b"," if len(rest) > 2 else b"", rest[1:])


def describe_store(store: ResponseStore) -> str:
    """Return which responses are stored, and what clients can do about others, for error messages."""
    return (
        f"responses are kept for {store.limits.seconds:g} s after their last use, if there is room, by the"
        " gateway that gave them, for the same API key; send the earlier items themselves in input"
    )
