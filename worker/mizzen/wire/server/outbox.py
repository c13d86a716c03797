"""Sends step outputs, load, cache events and rejections to all connected gateways.

Nothing blocks: a frame enters the bounded ZMQ queue of its peer, or the peer is dropped and its requests are
aborted.
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
    Message,
    Outputs,
    RefusalCode,
    Refused,
    Stats,
)
from mizzen.wire.server.listeners import KeyedListeners
from mizzen.wire.server.peers import Peer, Peers, WireCounters
from mizzen.wire.server.request_table import RequestTable

log = logging.getLogger(__name__)

NO_COLUMNS = PackedColumns()
NO_WAITS: NDArray[np.float64] = np.empty(0)
LONG_AGO = -1e9


class Outbox:
    """The sending half of `WireServer`, with its peers and requests. Used from the same thread."""

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
        self._held: set[int] = set()
        self._answered: set[int] = set()
        """Requests that received their embedding in the step that finishes them."""
        self._behind: deque[bytes] = deque(maxlen=limits.peers)
        """Connections that were dropped with a full queue and not notified yet."""

    # ── a step ────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, output: StepOutput, now: float) -> NDArray[np.float64]:
        """Send a step's outputs; return the seconds from arrival to first token, [requests with a first
        token]."""
        waits = self._start(output, now) if self.table.unstarted else NO_WAITS
        parts = list(pack_by_peer(output, self.table))  # before ends free the handles
        logprobs = self._logprobs(output.side_outputs.logprobs) if output.side_outputs.logprobs else {}
        if output.side_outputs.vectors:
            self._embeddings(output.side_outputs.vectors)
        ends = self._end(output.finished) if output.finished else {}
        for owner, columns in parts:
            self._outputs(owner, output.step, columns, ends.pop(owner, ()), logprobs.pop(owner, ()))
        for owner in {*ends, *logprobs}:  # prompt log probabilities and finishes without a token
            self._outputs(owner, output.step, NO_COLUMNS, ends.get(owner, ()), logprobs.get(owner, ()))
        return waits

    def finish(self, ended: Iterable[Finished], step: int) -> None:
        """Send the results of requests that finished outside a step (e.g. aborted while waiting)."""
        for owner, finishes in self._end(ended).items():
            self._outputs(owner, step, NO_COLUMNS, finishes)

    def end_all(self, step: int, message: str) -> None:
        """Finish every live request with an error, for an engine that goes down with requests running."""
        for peer in self.peers:
            ends = tuple(
                Finish(handle, int(FinishReason.ERROR), 0, 0, 0, None, message) for handle in peer.handles
            )
            if not ends or self._outputs(peer.index, step, NO_COLUMNS, ends):
                self.forget(peer)

    def _start(self, output: StepOutput, now: float) -> NDArray[np.float64]:
        rids = output.rids
        if output.side_outputs.vectors:  # for an embedding request, the embedding counts as first token
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
        """Free finished requests; return their results by owner."""
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
            self._aborts.pop(rid, None)  # the id may be reused before the abort is drained
        return by_owner

    def _logprobs(self, reports: Iterable[RequestLogprobs]) -> dict[int, list[Logprobs]]:
        """Return the log probabilities by owner."""
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
        """Send embeddings; their requests are freed when they finish, in the same step."""
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
        """Send the load to all peers if it has changed or `stats_seconds` have passed.

        `patience` is `Stats.patience_seconds`; a change of it alone does not cause a message.

        Returns False if the load has changed too soon after the last message; then call again.
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
        self._tell_forgotten()
        return True

    def withdraw_silence_limit(self) -> None:
        """Withdraw `patience_seconds` before an operation that may take long."""
        if self.last_stats is not None and self.last_stats.patience_seconds:
            self.last_stats = msgspec.structs.replace(self.last_stats, patience_seconds=0.0)
            self._broadcast(self.last_stats)

    def blocks(self, events: CacheEvents) -> None:
        """Send changes of the prefix cache to all peers."""
        if not events.stored and not events.evicted:
            return
        self._held.difference_update(events.evicted)
        self._held.update(events.stored)
        stored = np.array(events.stored, dtype="<u8").tobytes()
        evicted = np.array(events.evicted, dtype="<u8").tobytes()
        for peer in self.peers:
            self.send_to(peer, encode(Blocks(peer.next_sequence(), stored, evicted)))

    def all_blocks(self, peer: Peer) -> Blocks:
        """Return the frame that resets a peer's view of the prefix cache to its complete contents."""
        stored = np.fromiter(self._held, dtype="<u8", count=len(self._held)).tobytes()
        return Blocks(peer.next_sequence(), stored, b"", reset=True)

    def drain(self) -> None:
        """Announce with the next `stats` that the engine accepts no new requests."""
        self.draining = True
        self._stats_at = LONG_AGO

    # ── peers ─────────────────────────────────────────────────────────────────────────────────────────────

    def send_to(self, peer: Peer, frame: bytes | zmq.Frame) -> bool:
        """Send a frame; return False if the peer was dropped instead."""
        try:
            self._socket.send_multipart((peer.identity, frame), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._lose(peer, error)
            return False
        return True

    def refuse(self, identity: bytes, rid: int | None, code: RefusalCode, message: str) -> None:
        """Refuse a request or a frame, of a peer or of a connection that is none."""
        self.counters.refused[code] += 1
        passing = code in (RefusalCode.QUEUE_FULL, RefusalCode.BUSY)
        retry = self._limits.retry_after_seconds if passing else 0.0
        frame = encode(Refused(rid, int(code), message, retry))
        peer = self.peers.get(identity)
        if peer:
            self.send_to(peer, frame)
        else:
            self._try(identity, frame)

    def forget(self, peer: Peer) -> None:
        """Drop a peer and abort its requests."""
        for rid in peer.handles.values():
            self.abort(rid)
            self.table.disown(rid)
        self.peers.remove(peer)

    def disown(self, peer: Peer, rid: int, handle: int) -> None:
        """Free the handle of an unstarted request now; the engine's end of it will reach nobody."""
        del peer.handles[handle]
        peer.unstarted -= 1
        self.table.disown(rid)
        self.abort(rid)

    def abort(self, rid: int) -> None:
        """Have the engine abort a live request."""
        self._aborts[rid] = None

    def take_aborts(self) -> list[int]:
        """Return and clear the live requests to abort."""
        aborts, self._aborts = list(self._aborts), {}
        return aborts

    def _broadcast(self, message: Message) -> None:
        frame = encode(message)
        for peer in self.peers:
            self.send_to(peer, frame)

    def _lose(self, peer: Peer, error: zmq.ZMQError) -> None:
        """Drop a peer that is gone (EHOSTUNREACH) or whose queue is full (EAGAIN)."""
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
            self._behind.append(peer.identity)

    def _tell_forgotten(self) -> None:
        for _ in range(len(self._behind)):
            identity = self._behind.popleft()
            if self.peers.get(identity):
                continue
            text = "this connection did not accept its frames and was dropped; send Hello again"
            if not self._try(identity, encode(Refused(None, int(RefusalCode.UNKNOWN_PEER), text))):
                self._behind.append(identity)

    def _try(self, identity: bytes, frame: bytes) -> bool:
        """Send if the queue has room; return False if the caller should retry."""
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
