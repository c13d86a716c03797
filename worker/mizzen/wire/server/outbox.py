# SPDX-License-Identifier: Apache-2.0
"""Sends step outputs, load, cache events and rejections to all connected gateways.

No method blocks: a frame enters the bounded ZMQ queue of its peer (a gateway), or, if the queue is full, the
peer is dropped and its requests are aborted.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from mizzen.core.outputs import CacheEvents, Load, RequestLogprobs, RequestVector, StepOutput
from mizzen.core.request import Finished, FinishReason
from mizzen.wire.codec import encode
from mizzen.wire.columns import PackedColumns, pack_by_peer
from mizzen.wire.limits import WireLimits
from mizzen.wire.messages import (
    Blocks,
    Embedding,
    Finish,
    Logprobs,
    Outputs,
    RefusalCode,
    Refused,
    Stats,
    WireMessage,
)
from mizzen.wire.server.listeners import KeyedListeners
from mizzen.wire.server.peers import Peer, Peers, WireCounters
from mizzen.wire.server.request_table import RequestTable

log = logging.getLogger(__name__)

NO_COLUMNS = PackedColumns()
NO_WAITS: NDArray[np.float64] = np.empty(0)
LONG_AGO = -1e9


class Outbox:
    """The sending half of `WireServer`; owns the tables of peers and requests. For use from the server's
    thread."""

    def __init__(self, socket: KeyedListeners, limits: WireLimits) -> None:
        self._socket = socket
        self._limits = limits
        self.peers = Peers(limits.peers)
        self.table = RequestTable()
        self.counters = WireCounters()
        self.draining = False
        self.last_stats: Stats | None = None
        self._stats_at = LONG_AGO
        self._aborts: dict[int, None] = {}
        self._cached_blocks: set[int] = set()
        self._answered: set[int] = set()
        """Ids of requests whose embedding was sent in the current step; they need no `Finish`."""
        self._dropped: deque[bytes] = deque(maxlen=limits.peers)
        """Identities of connections that were dropped because of a full queue, and must still be notified."""

    # ── a step ────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, output: StepOutput, now: float) -> NDArray[np.float64]:
        """Send the outputs of a step.

        Return the seconds from arrival to first token of the requests that got their first token in the step,
        float64 [requests].
        """
        waits = self._start(output, now) if self.table.unstarted else NO_WAITS
        parts = list(pack_by_peer(output, self.table))  # before `_end` frees the handles
        logprobs = self._logprobs(output.side_outputs.logprobs) if output.side_outputs.logprobs else {}
        if output.side_outputs.vectors:
            self._embeddings(output.side_outputs.vectors)
        ends = self._end(output.finished) if output.finished else {}
        for owner, columns in parts:
            self._outputs(owner, output.step, columns, ends.pop(owner, ()), logprobs.pop(owner, ()))
        for owner in {*ends, *logprobs}:  # results and prompt log probabilities of peers without tokens
            self._outputs(owner, output.step, NO_COLUMNS, ends.get(owner, ()), logprobs.get(owner, ()))
        return waits

    def finish(self, ended: Iterable[Finished], step: int) -> None:
        """Send the results of requests that ended outside a step, e.g. by an abort while still waiting."""
        for owner, finishes in self._end(ended).items():
            self._outputs(owner, step, NO_COLUMNS, finishes)

    def end_all(self, step: int, message: str) -> None:
        """End every live request with an error, because the engine exits; `message` gives the reason."""
        for peer in self.peers:
            ends = tuple(
                Finish(handle, int(FinishReason.ERROR), 0, 0, 0, None, message) for handle in peer.handles
            )
            if not ends or self._outputs(peer.index, step, NO_COLUMNS, ends):
                self.forget(peer)

    def _start(self, output: StepOutput, now: float) -> NDArray[np.float64]:
        rids = output.rids
        if output.side_outputs.vectors:  # the embedding counts as the first token of an embedding request
            rids = np.concatenate((rids, [vector.rid for vector in output.side_outputs.vectors]))
        first = rids[~self.table.started[rids]]
        if not len(first):
            return NO_WAITS
        for owner in self.table.owner[first].tolist():
            peer = self.peers.at(owner)
            if peer:
                peer.unstarted -= 1
        self.table.start(first)
        waits = self.table.wait[first] = now - self.table.arrival[first]
        return waits

    def _end(self, ended: Iterable[Finished]) -> dict[int, list[Finish]]:
        """Free the ids and handles of finished requests; return the results to send, by index of the peer.

        Rejections are sent immediately, and requests whose embedding was sent have no further result.
        """
        table = self.table
        by_owner: dict[int, list[Finish]] = {}
        for end in ended:
            rid = end.rid
            owner = int(table.owner[rid])
            peer = self.peers.at(owner)
            if peer:
                handle = int(table.handle[rid])
                del peer.handles[handle]
                if not table.started[rid]:
                    peer.unstarted -= 1
                if end.refused or end.busy:
                    code = RefusalCode.BUSY if end.busy else RefusalCode.INVALID
                    self.refuse(peer.identity, handle, code, end.message)
                elif rid not in self._answered:
                    by_owner.setdefault(owner, []).append(_finish(end, handle, float(table.wait[rid])))
            table.release(rid)
            self._answered.discard(rid)
            self._aborts.pop(rid, None)  # the id may be reused before `take_aborts` returns the abort
        return by_owner

    def _logprobs(self, reports: Iterable[RequestLogprobs]) -> dict[int, list[Logprobs]]:
        """Return messages with the log probabilities of requests, by index of the peer that owns them."""
        by_owner: dict[int, list[Logprobs]] = {}
        for report in reports:
            part = Logprobs(
                int(self.table.handle[report.rid]),
                report.ids.shape[1],
                report.ids.astype("<i4", copy=False).tobytes(),
                report.values.astype("<f4", copy=False).tobytes(),
                report.prompt,
            )
            by_owner.setdefault(int(self.table.owner[report.rid]), []).append(part)
        return by_owner

    def _embeddings(self, vectors: Iterable[RequestVector]) -> None:
        """Send embeddings; `_end` frees their requests, which finish in the same step."""
        for vector in vectors:
            peer = self.peers.at(int(self.table.owner[vector.rid]))
            if peer is None:
                continue
            packed = vector.vector.astype("<f4", copy=False).tobytes()
            handle = int(self.table.handle[vector.rid])
            self._answered.add(vector.rid)
            self.send_to(peer, encode(Embedding(handle, packed, vector.prompt_tokens, vector.cached_tokens)))

    def _outputs(
        self,
        owner: int,
        step: int,
        columns: PackedColumns,
        ends: Sequence[Finish],
        logprobs: Sequence[Logprobs] = (),
    ) -> bool:
        peer = self.peers.at(owner)
        if peer is None:
            return False
        frame = Outputs(
            step,
            columns.rids,
            columns.offsets,
            columns.tokens,
            columns.counts,
            tuple(ends),
            tuple(logprobs),
        )
        return self.send_to(peer, encode(frame))

    # ── the engine's state ────────────────────────────────────────────────────────────────────────────────

    def stats(self, load: Load, steps: int, now: float, patience: float = 0.0) -> bool:
        """Send the load to all peers if it has changed, or if the last message was sent at least
        `WireLimits.stats_seconds` ago.

        Return False if the load has changed within `WireLimits.stats_change_seconds` of the last message; the
        caller must call again later.

        Args:
            load: current load of the engine.
            steps: number of steps so far; a change of this number alone causes no message.
            now: current time.
            patience: seconds without a completed step after which the engine counts as hung; 0 if unknown. A
                change of this value alone causes no message.
        """
        age = now - self._stats_at
        stats = Stats(
            load.running,
            load.waiting,
            load.waiting_tokens,
            load.pages_total,
            load.pages_used,
            load.pages_cached,
            self.draining,
            steps,
            patience,
        )
        last = self.last_stats
        same = (
            last is not None
            and msgspec.structs.replace(last, steps=steps, patience_seconds=patience) == stats
        )
        if same and age < self._limits.stats_seconds:
            return True
        if age < self._limits.stats_change_seconds:
            return False
        self.last_stats, self._stats_at = stats, now
        self._broadcast(stats)
        self._notify_dropped()
        return True

    def withdraw_silence_limit(self) -> None:
        """Announce that `Stats.patience_seconds` is unknown, before a step that may take unusually long."""
        if self.last_stats is not None and self.last_stats.patience_seconds:
            self.last_stats = msgspec.structs.replace(self.last_stats, patience_seconds=0.0)
            self._broadcast(self.last_stats)

    def blocks(self, events: CacheEvents) -> None:
        """Send changes of the prefix cache to all peers."""
        if not events.stored and not events.evicted:
            return
        self._cached_blocks.difference_update(events.evicted)
        self._cached_blocks.update(events.stored)
        stored = np.array(events.stored, dtype="<u8").tobytes()
        evicted = np.array(events.evicted, dtype="<u8").tobytes()
        for peer in self.peers:
            self.send_to(peer, encode(Blocks(peer.next_sequence(), stored, evicted)))

    def all_blocks(self, peer: Peer) -> Blocks:
        """Return the message that gives a peer the complete contents of the prefix cache."""
        stored = np.fromiter(self._cached_blocks, dtype="<u8", count=len(self._cached_blocks)).tobytes()
        return Blocks(peer.next_sequence(), stored, b"", reset=True)

    def drain(self) -> None:
        """Announce with the next `stats` that the engine accepts no new requests."""
        self.draining = True
        self._stats_at = LONG_AGO

    # ── peers ─────────────────────────────────────────────────────────────────────────────────────────────

    def send_to(self, peer: Peer, frame: bytes | zmq.Frame) -> bool:
        """Send a frame to a peer; return False if the peer was dropped because it does not accept frames."""
        try:
            self._socket.send_multipart((peer.identity, frame), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._drop(peer, error)
            return False
        return True

    def refuse(self, identity: bytes, rid: int | None, code: RefusalCode, message: str) -> None:
        """Reject a request, or a frame that belongs to no request.

        Args:
            identity: identity of the connection, which need not belong to a peer.
            rid: the gateway's handle of the request; None for a frame that belongs to no request.
            code: reason of the rejection.
            message: description of the reason.
        """
        self.counters.refused[code] += 1
        is_temporary = code in (RefusalCode.QUEUE_FULL, RefusalCode.BUSY)
        retry = self._limits.retry_after_seconds if is_temporary else 0.0
        frame = encode(Refused(rid, int(code), message, retry))
        peer = self.peers.get(identity)
        if peer:
            self.send_to(peer, frame)
        else:
            self._try_send(identity, frame)

    def forget(self, peer: Peer) -> None:
        """Drop a peer and abort its requests."""
        for rid in peer.handles.values():
            self.abort(rid)
            self.table.disown(rid)
        self.peers.remove(peer)

    def disown(self, peer: Peer, rid: int, handle: int) -> None:
        """Abort a request, and free its handle; send no result."""
        del peer.handles[handle]
        if not self.table.started[rid]:
            peer.unstarted -= 1
        self.table.disown(rid)
        self.abort(rid)

    def fail(self, rid: int, message: str, *, at_fault: bool) -> None:
        """End a live request of a peer with an error, and abort it in the engine.

        `at_fault` says whether the request would fail in any engine.
        """
        peer = self.peers.at(int(self.table.owner[rid]))
        if peer is not None:
            handle = int(self.table.handle[rid])
            self.disown(peer, rid, handle)
            finish = Finish(handle, int(FinishReason.ERROR), 0, 0, 0, None, message, at_fault=at_fault)
            self._outputs(peer.index, 0, NO_COLUMNS, (finish,))

    def abort(self, rid: int) -> None:
        """Add a live request to the aborts that `take_aborts` returns."""
        self._aborts[rid] = None

    def take_aborts(self) -> list[int]:
        """Return the ids of live requests that the engine must abort, each id once."""
        aborts, self._aborts = list(self._aborts), {}
        return aborts

    def _broadcast(self, message: WireMessage) -> None:
        frame = encode(message)
        for peer in self.peers:
            self.send_to(peer, frame)

    def _drop(self, peer: Peer, error: zmq.ZMQError) -> None:
        """Drop a peer because sending failed: it is gone (EHOSTUNREACH) or its queue is full (EAGAIN)."""
        gone = error.errno == zmq.EHOSTUNREACH
        if not gone and error.errno != zmq.EAGAIN:
            raise error
        self.counters.lost_peers += 1
        fields = {
            "gateway": peer.name,
            "reason": "disconnected" if gone else "did not accept its frames",
            "aborted_requests": len(peer.handles),
        }
        level = logging.WARNING if peer.handles or not gone else logging.INFO
        log.log(level, "gateway lost", extra={"fields": fields})
        self.forget(peer)
        if not gone:
            self._dropped.append(peer.identity)

    def _notify_dropped(self) -> None:
        for _ in range(len(self._dropped)):
            identity = self._dropped.popleft()
            if self.peers.get(identity):
                continue
            text = "this connection did not accept its frames and was dropped; send Hello again"
            if not self._try_send(identity, encode(Refused(None, int(RefusalCode.UNKNOWN_PEER), text))):
                self._dropped.append(identity)

    def _try_send(self, identity: bytes, frame: bytes) -> bool:
        """Send a frame to a connection; return False if its queue is full. Ignore a connection that is
        gone."""
        try:
            self._socket.send_multipart((identity, frame), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return error.errno == zmq.EHOSTUNREACH
        return True


def _finish(end: Finished, handle: int, wait: float) -> Finish:
    return Finish(
        handle,
        int(end.reason),
        end.prompt_tokens,
        end.cached_tokens,
        end.output_tokens,
        end.stop_token,
        end.message,
        wait,
        end.at_fault,
    )
