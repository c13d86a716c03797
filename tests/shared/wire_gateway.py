# SPDX-License-Identifier: Apache-2.0
"""A gateway's end of the wire protocol, controlled by a test."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import zmq

from mizzen.wire.codec import encode, gateway_decoder
from mizzen.wire.messages import PROTOCOL, Finish, Generate, Hello, Outputs, Sampling, WireMessage

M = TypeVar("M", bound=WireMessage)


class Gateway:
    """A fake gateway that tracks its streams by token offsets, as a real gateway does."""

    def __init__(self, endpoint: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(endpoint)
        self._decode = gateway_decoder()
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, Finish] = {}
        self.others: list[WireMessage] = []
        self.send(Hello(PROTOCOL, "test"))

    def send(self, message: WireMessage) -> None:
        self.socket.send(encode(message))

    def generate(self, rid: int, prompt: list[int] | None = None, **fields: Any) -> None:
        sampling = {key: fields.pop(key) for key in list(fields) if key in Sampling.__struct_fields__}
        self.tokens[rid] = []
        packed = np.array(prompt or [5, 6, 7], dtype="<i4").tobytes()
        self.send(Generate(rid, packed, Sampling(**sampling), **fields))

    def read(self, seconds: float) -> bool:
        if not self.socket.poll(int(seconds * 1000)):
            return False
        message = self._decode(self.socket.recv())
        if isinstance(message, Outputs):
            rids = np.frombuffer(message.rids, "<u4").tolist()
            offsets = np.frombuffer(message.offsets, "<u4").tolist()
            tokens = np.frombuffer(message.tokens, "<i4").tolist()
            for rid, offset, token in zip(rids, offsets, tokens, strict=True):
                assert offset == len(self.tokens[rid]), "a gap, or a token twice"
                self.tokens[rid].append(token)
            for end in message.finished:
                assert end.rid not in self.ends
                self.ends[end.rid] = end
        else:
            self.others.append(message)
        return True

    def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true"
            self.read(0.05)

    def expect(self, kind: type[M], seconds: float = 60.0) -> M:
        self.until(lambda: any(isinstance(message, kind) for message in self.others), seconds)
        message = next(message for message in self.others if isinstance(message, kind))
        self.others.remove(message)
        return message

    def close(self) -> None:
        self.context.destroy(linger=0)
