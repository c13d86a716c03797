# SPDX-License-Identifier: Apache-2.0
"""Encodes messages as frames and decodes frames; every received byte is validated."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from mizzen.wire.messages import MAX_FRAME_BYTES, ToEngine, ToGateway, WireMessage

M = TypeVar("M")


class MalformedFrame(ValueError):
    """A frame is not a valid message of the wire protocol; the text gives the reason."""


class Decoder(Generic[M]):
    """Decodes the frames of one direction: to engines, or to gateways."""

    def __init__(self, kind: object) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)  # pyright: ignore[reportArgumentType, reportCallIssue]

    def __call__(self, frame: bytes | memoryview) -> M:
        """Return the message that a frame encodes.

        Raises:
            MalformedFrame: the frame is longer than `MAX_FRAME_BYTES`, is not msgpack, or has an unknown tag
                or a field of the wrong type.
        """
        if len(frame) > MAX_FRAME_BYTES:
            raise MalformedFrame(f"frame of {len(frame)} bytes; at most {MAX_FRAME_BYTES} are allowed")
        try:
            return self._decoder.decode(frame)  # pyright: ignore[reportReturnType]
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedFrame(str(error)) from error


_encoder = msgspec.msgpack.Encoder()


def encode(message: WireMessage) -> bytes:
    """Return the frame that encodes a message."""
    return _encoder.encode(message)


def engine_decoder() -> Decoder[ToEngine]:
    """Return a decoder of the messages that engines receive."""
    return Decoder(ToEngine)


def gateway_decoder() -> Decoder[ToGateway]:
    """Return a decoder of the messages that gateways receive."""
    return Decoder(ToGateway)
