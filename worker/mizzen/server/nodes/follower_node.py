# SPDX-License-Identifier: Apache-2.0
"""A group as nodes 1 and up see it: they join node 0, report to it, and exit when it exits."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from mizzen.server.config import EngineConfig
from mizzen.server.exit_reason import ExitReason
from mizzen.server.metric_catalogue import Phase
from mizzen.server.nodes.group import ROOT_CAUSE_SECONDS, shared_settings, tcp_endpoint
from mizzen.server.ranks.heartbeat import RankHeartbeat
from mizzen.wire.curve_keys import KeyFolder
from mizzen.wire.ranks.node_messages import (
    PROTOCOL,
    GroupState,
    Join,
    NodeClient,
    NodeRefused,
    NodeReport,
    RankReport,
)

KEY_TRY_SECONDS = 3.0
"""Time in seconds after which a node that could not join with one generation of keys tries the other one."""


@dataclass
class FollowerNode:
    """This node's connection to node 0, on nodes 1 and up; implements `NodeGroup`."""

    config: EngineConfig
    keys: KeyFolder | None
    started_at: float
    group: str = ""
    started: bool = False

    def __post_init__(self) -> None:
        """Connect to node 0."""
        config = self.config
        self._life = secrets.token_hex(8)
        self._settings = shared_settings(config)
        self._address = tcp_endpoint(config.leader_address, config.ranks_port)
        self._key_attempts = 0
        self._client = self._connect()
        self._key_tried_at = self.started_at
        self._state: GroupState | None = None
        self._refusal: NodeRefused | None = None
        self._received_at = 0.0
        self._own_exit_since: float | None = None

    def _connect(self) -> NodeClient:
        """Connect to node 0, which may use either of two key generations; each call tries the other one."""
        key_pairs = self.keys.ring.own if self.keys else (None,)
        name = f"node{self.config.node_rank}/{self._life}"
        return NodeClient(self._address, key_pairs[self._key_attempts % len(key_pairs)], name)

    @property
    def key(self) -> str:
        """Public key of the group's connections, which node 0 reports; empty if no keys are configured."""
        return self._state.key if self._state is not None else ""

    @property
    def exit_requested(self) -> bool:
        """Always False: other nodes' requests to exit are handled by node 0."""
        return False

    @property
    def phases(self) -> list[Phase]:
        """Always empty: only node 0 tracks the phases of other nodes' ranks."""
        return []

    def exchange_reports(
        self, ranks: Sequence[RankReport], own_exit: ExitReason | None, exit_requested: bool, now: float
    ) -> None:
        """Receive node 0's messages; send a request to join or, once joined, this node's report."""
        for message in self._client.receive():
            if isinstance(message, NodeRefused):
                self._refusal = message
            elif not self.group or message.group == self.group:
                self.group, self._state, self._received_at = message.group, message, now
                self.started = self.started or message.state == "run"
        if self._state is None:
            self._try_next_key(now)
            join = Join(PROTOCOL, self._life, self.config.node_rank, self._settings)
            self._client.send(join)
        else:
            kind, reason = (own_exit.kind, own_exit.reason) if own_exit is not None else ("", "")
            self._client.send(NodeReport(self._life, list(ranks), exit_requested, kind, reason))

    def _try_next_key(self, now: float) -> None:
        if self.keys is None or now - self._key_tried_at < KEY_TRY_SECONDS:
            return
        self._key_tried_at = now
        if self.keys.refresh() or len(self.keys.ring.own) > 1:
            self._key_attempts += 1
            self._client.close()
            self._client = self._connect()

    def decide_exit(self, own_exit: ExitReason | None, now: float) -> ExitReason | None:
        """Return the reason for which this node must exit now, or None if it must keep running.

        The result contains the reason from node 0's report, or states that node 0 rejects this node or is
        lost. If node 0 does not report an exit in time, the result is `own_exit`.
        """
        state, limit = self._state, self.config.rank_deadline_seconds
        if state is not None and state.state == "done":
            return ExitReason(0)
        if state is not None and state.state == "failed":
            return ExitReason(1, "group_failed", state.reason)
        if self._refusal is not None:
            return ExitReason(
                self._refusal.code, "refused", f"node 0 rejects this node: {self._refusal.reason}"
            )
        if state is not None and now - self._received_at > limit:
            reason = (
                f"node 0 at {self._address} has sent nothing for {now - self._received_at:.1f} s: it is gone"
            )
            return ExitReason(1, "leader_lost", f"{reason}, stopped or cut off")
        if own_exit is None or state is None or own_exit.kind == "signal":
            return own_exit
        if own_exit.code == 0:
            return None  # rank 0 ended the plans, so the ranks exited; node 0 will report the reason
        since = self._own_exit_since = self._own_exit_since if self._own_exit_since is not None else now
        return own_exit if now - since > 2 * ROOT_CAUSE_SECONDS else None

    def read_heartbeats(self, now: float) -> list[RankHeartbeat]:
        """Return no heartbeats: node 0 monitors the ranks of all nodes."""
        return []

    def describe_wait(self) -> str:
        """Return a description of what the startup waits for; empty once the group has started."""
        if self.started:
            return ""
        if self._state is not None:
            return "node 0 waits for other nodes"
        return f"waits for node 0 at {self._address} to answer; both nodes need the same keys"

    def close(self, end: ExitReason) -> None:
        """Disconnect; node 0 has already received this node's report."""
        self._client.close()
