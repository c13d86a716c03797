"""Encodes messages as frames and decodes them. Bytes from a peer are never trusted."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from mizzen.wire.messages import MAX_FRAME_BYTES, Message, ToEngine, ToGateway

M = TypeVar("M")


class MalformedFrame(ValueError):
    """A frame is not a message of the protocol; the text gives the reason."""


class Decoder(Generic[M]):
    """Decodes frames of one direction."""

    def __init__(self, kind: object) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)  # pyright: ignore[reportArgumentType, reportCallIssue]

    def __call__(self, frame: bytes | memoryview) -> M:
        """Return the message in a frame.

        Raises:
            MalformedFrame: the frame is too long, is not msgpack, or has an unknown tag or a mistyped field.
        """
        if len(frame) > MAX_FRAME_BYTES:
            raise MalformedFrame(f"frame of {len(frame)} bytes; at most {MAX_FRAME_BYTES} are allowed")
        try:
            return self._decoder.decode(frame)  # pyright: ignore[reportReturnType]
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedFrame(str(error)) from error


_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """Return the frame of a message."""
    return _encoder.encode(message)


def engine_decoder() -> Decoder[ToEngine]:
    """Return a decoder of the messages that engines receive."""
    return Decoder(ToEngine)


def gateway_decoder() -> Decoder[ToGateway]:
    """Return a decoder of the messages that gateways receive."""
    return Decoder(ToGateway)
