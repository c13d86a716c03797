# SPDX-License-Identifier: Apache-2.0
"""A scripted engine that speaks the wire protocol; tests make it behave correctly or fail."""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zmq
from msgspec.structs import replace

from mizzen.core.request import FinishReason
from mizzen.wire.codec import encode, engine_decoder
from mizzen.wire.messages import (
    FILE_PART_BYTES,
    PROTOCOL,
    Abort,
    Blocks,
    Embed,
    Embedding,
    FetchFile,
    File,
    Finish,
    Generate,
    Hello,
    ImageContent,
    Logprobs,
    NeedImages,
    Outputs,
    RefusalCode,
    Refused,
    Stats,
    Welcome,
    WireMessage,
)


@dataclass(slots=True)
class Run:
    """A running request of the scripted engine."""

    peer: bytes
    message: Generate
    tokens: list[int]
    tokens_sent: int = 0


@dataclass(slots=True)
class Behaviour:
    """Behavior of a scripted engine; tests change these fields while the engine runs."""

    reply: list[int] = field(default_factory=lambda: [10, 11, 12])
    end: int | None = None
    """Token that ends a reply with STOP; if None, replies end with LENGTH."""
    step_seconds: float = 0.002
    tokens_a_step: int = 1
    refuse: RefusalCode | None = None
    refuse_hello: RefusalCode | None = None
    draining: bool = False
    cached_tokens: int = 0
    first_token_seconds: float = 0.125
    """Seconds to the first token, as reported when a request finishes."""
    fault: str = ""
    """Fault after `fault_after` tokens of an answer; empty for no fault.

    - gap: one token is skipped
    - garbage: a frame that is not a message
    - short: the Finish message reports more tokens than were sent
    - error: the request fails because of the engine
    - own: the request fails because of the request itself
    - forget: the engine forgets the gateway and refuses it as an unknown peer
    - restart: the engine sends a Welcome as if it were a new process
    - mute: no more tokens
    - silent: no more messages at all, and none are read
    """
    fault_after: int = 2
    cuts: tuple[int, ...] = ()
    """`fault` occurs each time that an answer reaches one of these numbers of tokens.

    If it is empty, `fault_after` applies.
    """
    stats_seconds: float = 0.1
    vector: Callable[[Embed], list[float]] = lambda message: [0.6, 0.8]
    """Function that returns the vector of an embedding request."""
    label_logprob: Callable[[Generate, int], float] | None = None
    """Function that returns the log probability of a requested token; by default all tokens have the same."""
    dies_after_parts: int = 0
    """Number of parts of images after which the engine ends without a message; 0 for never.

    It is then reset, so that another engine with the same behavior goes on."""
    ignored_file_requests: int = 0
    """Number of file requests that are ignored before the next one is answered."""


class ScriptedEngine:
    """An engine with a ROUTER socket that runs in a thread; a context manager."""

    def __init__(self, files: dict[str, bytes], endpoint: str = "tcp://127.0.0.1:*", **welcome: Any) -> None:
        self.files = files
        self.does = Behaviour()
        self.requests: list[Generate] = []
        self.steps = 0
        self.embeds: list[Embed] = []
        self.aborts: list[int] = []
        self.hellos = 0
        self.fetches = 0
        self.parts: list[ImageContent] = []
        """Parts of images that have arrived."""
        self.images: list[bytes] = []
        """Contents of images that have arrived completely."""
        self._lacking: dict[tuple[bytes, int], dict[bytes, int]] = {}
        """Bytes of images that requests still need, by digest."""
        self._runs: dict[tuple[bytes, int], Run] = {}
        self._peers: set[bytes] = set()
        self._welcome = {
            "protocol": PROTOCOL,
            "engine": "scripted",
            "incarnation": secrets.token_hex(4),
            "revision": "r1",
            "model": "demo",
            "tokenizer_hash": hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest(),
            "files": {name: len(content) for name, content in files.items()},
            "context_length": 2048,
            "vocab_size": 512,
            "end_token_ids": (),
            "page_size": 16,
            "max_running_requests": 32,
            **welcome,
        }
        self._endpoint = endpoint
        self._context = zmq.Context()
        self._ready = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> ScriptedEngine:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def endpoint(self) -> str:
        return self._endpoint

    @property
    def running(self) -> int:
        return len(self._runs)

    def kill(self) -> None:
        """Stop without sending a message, as after SIGKILL."""
        self._stop.set()
        self._thread.join(60)

    def _run(self) -> None:
        socket = self._context.socket(zmq.ROUTER)
        socket.linger = 0
        socket.bind(self._endpoint)
        self._endpoint = socket.get_string(zmq.LAST_ENDPOINT)
        self._socket, decode, stats_at = socket, engine_decoder(), 0.0
        self._ready.set()
        while not self._stop.is_set():
            if self.does.fault == "silent" and self.does.fault_after == 0:  # does not even read messages
                time.sleep(0.01)
                continue
            if socket.poll(max(1, int(self.does.step_seconds * 1000)) if self._runs else 10):
                peer, frame = socket.recv_multipart()
                self._take(peer, decode(frame))
                continue
            if self._runs:
                self._step()
            if time.monotonic() > stats_at:
                stats_at = time.monotonic() + self.does.stats_seconds
                for peer in self._peers:
                    self._send(peer, Stats(len(self._runs), 0, 0, 100, 0, 0, self.does.draining, self.steps))
        socket.close()
        self._context.term()

    def _send(self, peer: bytes, message: WireMessage | bytes) -> None:
        self._socket.send_multipart((peer, message if isinstance(message, bytes) else encode(message)))

    def _take(self, peer: bytes, message: WireMessage) -> None:
        if isinstance(message, Hello):
            self.hellos += 1
            if self.does.refuse_hello is not None:
                self._send(peer, Refused(None, self.does.refuse_hello, "refused"))
                return
            self._peers.add(peer)
            self._send(peer, Welcome(**self._welcome, draining=self.does.draining))
            self._send(peer, Blocks(0, b"", b"", reset=True))
        elif isinstance(message, FetchFile) and self.does.ignored_file_requests:
            self.does.ignored_file_requests -= 1
        elif isinstance(message, FetchFile):
            self.fetches += 1
            content = self.files[message.name]
            file_part = content[message.offset : message.offset + FILE_PART_BYTES]
            self._send(peer, File(message.name, message.offset, len(content), file_part))
        elif isinstance(message, Generate):
            self._generate(peer, message)
        elif isinstance(message, Embed):
            self._embed(peer, message)
        elif isinstance(message, ImageContent):
            self._take_part(peer, message)
        elif isinstance(message, Abort):
            self.aborts.append(message.rid)
            run = self._runs.pop((peer, message.rid), None)
            if run:
                self._send(peer, Outputs(0, b"", b"", b"", b"", (self._finish(run, FinishReason.ABORT),)))

    def _generate(self, peer: bytes, message: Generate) -> None:
        self.requests.append(message)
        if self.does.refuse is not None:
            self._send(peer, Refused(message.rid, int(self.does.refuse), "max_tokens is refused", 0.2))
            return
        capacity = self._welcome["context_length"] - len(message.prompt) // 4 + message.generated
        limit = min(message.sampling.max_tokens or capacity, capacity)
        reply = self.does.reply
        tokens = reply[:limit] if self.does.end is not None else (reply * (limit // len(reply) + 1))[:limit]
        self._runs[peer, message.rid] = Run(peer, message, tokens, message.generated)
        if message.images:
            self._lacking[peer, message.rid] = {image.digest: image.size for image in message.images}
            self._send(peer, NeedImages(message.rid, tuple(self._lacking[peer, message.rid])))

    def _take_part(self, peer: bytes, part: ImageContent) -> None:
        self.parts.append(part)
        if len(self.parts) == self.does.dies_after_parts:
            self.does.dies_after_parts = 0
            self._stop.set()
        lacking = self._lacking.get((peer, part.rid), {})
        lacking[part.digest] -= len(part.content)
        if not lacking[part.digest]:
            same = [one.content for one in self.parts if (one.rid, one.digest) == (part.rid, part.digest)]
            self.images.append(b"".join(same))
            del lacking[part.digest]

    def _embed(self, peer: bytes, message: Embed) -> None:
        self.embeds.append(message)
        count = len(message.prompt) // 4
        if self.does.refuse is not None:
            self._send(peer, Refused(message.rid, int(self.does.refuse), "refused", 0.2))
        elif self.does.fault == "error":
            end = Finish(message.rid, int(FinishReason.ERROR), count, 0, 0, None, "out of memory")
            self._send(peer, Outputs(1, b"", b"", b"", b"", (end,)))
        else:
            vector = np.array(self.does.vector(message), dtype="<f4").tobytes()
            self._send(peer, Embedding(message.rid, vector, count, self.does.cached_tokens))

    def _finish(self, run: Run, reason: FinishReason, stop: int | None = None) -> Finish:
        prompt = len(run.message.prompt) // 4 - run.message.generated
        wait = self.does.first_token_seconds
        return Finish(
            run.message.rid, int(reason), prompt, self.does.cached_tokens, run.tokens_sent, stop, "", wait
        )

    def _step(self) -> None:
        for key, run in list(self._runs.items()):
            if self._lacking.get(key):
                continue
            if self._strikes(run) and self._fail(run):
                continue
            tokens = run.tokens[run.tokens_sent : self._step_end(run)]
            self.steps += 1
            offset, run.tokens_sent = run.tokens_sent, run.tokens_sent + len(tokens)
            ends: tuple[Finish, ...] = ()
            if run.tokens_sent == len(run.tokens):
                del self._runs[key]
                stops = tokens[-1] == self.does.end
                reason = FinishReason.STOP if stops else FinishReason.LENGTH
                ends = (self._finish(run, reason, self.does.end if stops else None),)
            self._send(run.peer, self._outputs(run, offset, tokens, ends))

    def _strikes(self, run: Run) -> bool:
        if self.does.cuts:
            return run.tokens_sent in self.does.cuts and run.tokens_sent > run.message.generated
        return bool(self.does.fault) and run.tokens_sent >= self.does.fault_after

    def _step_end(self, run: Run) -> int:
        return min(
            [
                run.tokens_sent + self.does.tokens_a_step,
                *(cut for cut in self.does.cuts if cut > run.tokens_sent),
            ]
        )

    def _outputs(self, run: Run, offset: int, tokens: list[int], ends: tuple[Finish, ...]) -> Outputs:
        def packed(form: str, *values: int) -> bytes:
            return np.array(values, dtype=form).tobytes()

        rid, sampling = run.message.rid, run.message.sampling
        counts = packed("<u2", len(tokens)) if len(tokens) != 1 else b""
        reports: tuple[Logprobs, ...] = ()
        if sampling.logprobs is not None:
            beside = (*range(sampling.logprobs), *sampling.logprob_token_ids)
            ids = [entry for token in tokens for entry in (token, *beside)]
            values = np.repeat(-0.01 * np.arange(offset + 1, offset + 1 + len(tokens)), 1 + len(beside))
            if self.does.label_logprob is not None:
                labels = sampling.logprob_token_ids
                values[-len(labels) :] = [self.does.label_logprob(run.message, label) for label in labels]
            reports = (Logprobs(rid, 1 + len(beside), packed("<i4", *ids), values.astype("<f4").tobytes()),)
        return Outputs(
            1, packed("<u4", rid), packed("<u4", offset), packed("<i4", *tokens), counts, ends, reports
        )

    def _fail(self, run: Run) -> bool:
        """Cause `Behaviour.fault`; return whether the fault replaces the tokens of this step."""
        fault, key = self.does.fault, (run.peer, run.message.rid)
        if fault == "gap":
            run.tokens_sent += 1
            return False
        if fault == "short":
            run.tokens_sent += 3
            del self._runs[key]
            end = self._finish(run, FinishReason.LENGTH)
            self._send(run.peer, Outputs(1, b"", b"", b"", b"", (end,)))
        elif fault == "garbage":
            self._send(run.peer, b"\xc1 no message")
        elif fault == "error":
            del self._runs[key]
            end = Finish(
                run.message.rid, int(FinishReason.ERROR), 1, 0, run.tokens_sent, None, "out of memory"
            )
            self._send(run.peer, Outputs(1, b"", b"", b"", b"", (end,)))
        elif fault == "own":
            del self._runs[key]
            text = "grammar: a mask took 150 ms"
            ends = (replace(self._finish(run, FinishReason.ERROR), message=text, at_fault=True),)
            self._send(run.peer, Outputs(1, b"", b"", b"", b"", ends))
        elif fault == "forget":
            self._peers.discard(run.peer)
            self._runs.pop(key)
            self._send(run.peer, Refused(None, int(RefusalCode.UNKNOWN_PEER), "forgotten"))
        elif fault == "restart":
            self._welcome["incarnation"] = secrets.token_hex(4)
            self._runs.pop(key)
            self._send(run.peer, Welcome(**self._welcome, draining=False))
        elif fault == "silent":
            self.does.fault_after = 0
        return True
