# SPDX-License-Identifier: Apache-2.0
"""A group as node 0 sees it: node 0 admits the other nodes, starts the group and decides how it exits."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from mizzen.server.config import EngineConfig
from mizzen.server.exit_reason import CONFIGURATION_EXIT_CODE, MISCONFIGURED, ExitReason
from mizzen.server.metric_catalogue import Phase
from mizzen.server.nodes.group import (
    CONSEQUENTIAL_KIND,
    ROOT_CAUSE_SECONDS,
    describe_differences,
    explain_port_errors,
    shared_settings,
    tcp_endpoint,
)
from mizzen.server.ranks.heartbeat import RankHeartbeat
from mizzen.wire.curve_keys import KeyFolder
from mizzen.wire.ranks.node_messages import (
    PROTOCOL,
    GroupState,
    Join,
    NodeRefused,
    NodeReport,
    NodeServer,
    RankReport,
)

log = logging.getLogger(__name__)

QUIET_SECONDS = 1.0
"""A node's last report counts as outdated if no message from the node has arrived for this many seconds."""
KEY_REFRESH_SECONDS = 2.0


@dataclass
class _Member:
    """Node that has joined the group."""

    name: bytes
    life: str
    received_at: float
    report: NodeReport | None = None
    reported_at: float = 0.0
    """Time at which `report` was received."""
    rival: tuple[str, float] = ("", 0.0)
    """`life` of another process that wants to join with this node's number, and time of its first request."""


@dataclass
class LeaderNode:
    """Connections of node 0 to the other nodes; implements `NodeGroup`."""

    config: EngineConfig
    keys: KeyFolder | None
    group: str = field(default_factory=lambda: secrets.token_hex(8))
    started: bool = False

    def __post_init__(self) -> None:
        """Listen for the other nodes."""
        self._key_pair = self.keys.ring.own[0] if self.keys else None
        self._server = self._listen()
        self._keys_checked_at = 0.0
        self._settings = shared_settings(self.config)
        self._members: dict[int, _Member] = {}
        self._refusals: dict[int, str] = {}
        self._failure_since: float | None = None

    def _listen(self) -> NodeServer:
        with explain_port_errors(self.config.ranks_port):
            return NodeServer(tcp_endpoint(self.config.ranks_address, self.config.ranks_port), self._key_pair)

    @property
    def key(self) -> str:
        """Public key of the group's connections; empty if no keys are configured."""
        return self._key_pair.public.decode() if self._key_pair else ""

    @property
    def exit_requested(self) -> bool:
        """Whether another node has received SIGTERM or SIGINT."""
        return any(member.report is not None and member.report.asked for member in self._members.values())

    @property
    def phases(self) -> list[Phase]:
        """Phases of all other nodes' ranks, with one SPAWN for each node that has not reported yet.

        Before the group starts, the list contains only one SPAWN.
        """
        if not self.started:
            return [Phase.SPAWN]
        reports = [member.report for member in self._members.values()]
        return [
            Phase(rank.phase) if rank else Phase.SPAWN
            for report in reports
            for rank in (report.ranks if report else [None])
        ]

    def exchange_reports(
        self, ranks: Sequence[RankReport], own_exit: ExitReason | None, exit_requested: bool, now: float
    ) -> None:
        """Receive the messages of other nodes, admit nodes that want to join, and send the group's state."""
        for name, message in self._server.receive():
            if isinstance(message, Join):
                self._handle_join(name, message, now)
            else:
                self._handle_report(name, message, now)
        if not self.started:
            self._refresh_keys(now)
            silent_nodes = [
                n
                for n, member in self._members.items()
                if now - member.received_at > self.config.rank_deadline_seconds
            ]
            for node in silent_nodes:
                del self._members[node]
            self.started = len(self._members) == self.config.nodes - 1
            if self.started:
                log.info("all nodes have joined", extra={"fields": {"nodes": self.config.nodes}})
        self._broadcast("run" if self.started else "wait", "")

    def decide_exit(self, own_exit: ExitReason | None, now: float) -> ExitReason | None:
        """Return the reason for which the group must exit now, or None.

        If a failure may be a consequence of another one (`CONSEQUENTIAL_KIND`), the group exits only after
        `ROOT_CAUSE_SECONDS`, because another node may still report the root cause.
        """
        if own_exit is not None and own_exit.kind != CONSEQUENTIAL_KIND:
            return own_exit
        if not self.started:
            return own_exit
        members = sorted(self._members.items())
        failures = [
            (node, member.report)
            for node, member in members
            if member.report is not None and member.report.kind
        ]
        for node, report in failures:
            if report.kind != CONSEQUENTIAL_KIND:
                code = CONFIGURATION_EXIT_CODE if report.kind == MISCONFIGURED else 1
                return ExitReason(code, report.kind, f"node {node}: {report.reason}")
        for node, member in members:
            silence = now - member.received_at
            if silence > self.config.rank_deadline_seconds:
                reason = f"node {node} has sent nothing for {silence:.1f} s: it is gone, stopped or cut off"
                return ExitReason(1, "node_lost", reason)
        reasons = [own_exit.reason] if own_exit is not None else []
        reasons += [f"node {node}: {report.reason}" for node, report in failures]
        if not reasons:
            return None
        since = self._failure_since = self._failure_since if self._failure_since is not None else now
        if now - since < ROOT_CAUSE_SECONDS or any(
            now - member.received_at > QUIET_SECONDS for _, member in members
        ):
            return None
        return ExitReason(1, CONSEQUENTIAL_KIND, "; ".join(reasons))

    def read_heartbeats(self, now: float) -> list[RankHeartbeat]:
        """Return the heartbeats of all other nodes' ranks, with times converted to this machine's clock."""
        heartbeats: list[RankHeartbeat] = []
        for _, member in sorted(self._members.items()):
            if member.report is None or not member.report.ranks:
                heartbeats += [RankHeartbeat(0.0, 0, 0, 0, serving=False)] * self.config.local_ranks
                continue
            is_quiet = now - member.reported_at > QUIET_SECONDS
            for rank in member.report.ranks:
                alive = 0.0 if rank.idle < 0 else now if is_quiet else member.reported_at - rank.idle
                serving = rank.phase >= Phase.SERVING
                heartbeats.append(RankHeartbeat(alive, rank.launched, rank.done, rank.process, serving))
        return heartbeats

    def describe_wait(self) -> str:
        """Return a description of the nodes that have not joined yet; empty once the group has started."""
        if self.started:
            return ""
        missing = [node for node in range(1, self.config.nodes) if node not in self._members]
        refused = [self._refusals[node] for node in missing if node in self._refusals]
        return "; ".join([f"waits for nodes {', '.join(map(str, missing))} of {self.config.nodes}", *refused])

    def close(self, end: ExitReason) -> None:
        """Send the reason of the group's exit to the other nodes, and close the socket."""
        self._broadcast("failed" if end.code else "done", end.reason)
        self._server.close()

    def _handle_join(self, name: bytes, join: Join, now: float) -> None:
        reason, code = self._rejection(join)
        if reason:
            if self._refusals.get(join.node) != reason:
                log.warning("rejected a node", extra={"fields": {"node": join.node, "reason": reason}})
            self._refusals[join.node] = reason
            self._server.send(name, NodeRefused(code, reason))
            return
        member = self._members.get(join.node)
        if member is not None and member.life != join.life and self._is_alive(member, join, now):
            return  # the new process retries its join
        if member is None or member.life != join.life:
            log.info("a node has joined", extra={"fields": {"node": join.node}})
            self._members[join.node] = _Member(name, join.life, now)
        else:
            member.received_at = now

    def _is_alive(self, member: _Member, join: Join, now: float) -> bool:
        """Return whether a member may still be running although another process wants to join in its place.

        A restarted pod joins with its predecessor's number, and must wait until the predecessor has been
        silent for `QUIET_SECONDS`. If messages of the member keep arriving, both processes run: `_rejection`
        then rejects the new one.
        """
        if member.rival[0] != join.life:
            member.rival = (join.life, now)
        return now - member.received_at <= QUIET_SECONDS

    def _rejection(self, join: Join) -> tuple[str, int]:
        if join.protocol != PROTOCOL:
            return f"node {join.node} runs another release: start all nodes from the same image", 2
        if not 0 < join.node < self.config.nodes:
            return f"--node-rank {join.node} is not between 1 and {self.config.nodes - 1}, as --nodes says", 2
        differing = describe_differences(self._settings, join.settings)
        if differing:
            text = f"node {join.node} differs from node 0 in {', '.join(differing)}"
            return f"{text}: start both with the same settings", 2
        member = self._members.get(join.node)
        if self.started and (member is None or member.life != join.life):
            return f"the group runs with another node {join.node}: all its nodes have to restart", 1
        if (
            member is not None
            and member.rival[0] == join.life
            and member.received_at > member.rival[1] + QUIET_SECONDS
        ):
            return f"another node {join.node} has already joined: give each node its own --node-rank", 1
        return "", 0

    def _handle_report(self, name: bytes, report: NodeReport, now: float) -> None:
        for member in self._members.values():
            if (member.name, member.life) == (name, report.life):
                member.received_at, member.reported_at, member.report = now, now, report
                return
        self._server.send(
            name, NodeRefused(1, "node 0 has restarted: all nodes of the group have to restart")
        )

    def _refresh_keys(self, now: float) -> None:
        """Switch to the newest keys, which may change while node 0 waits for other nodes."""
        if self.keys is None or now - self._keys_checked_at < KEY_REFRESH_SECONDS:
            return
        self._keys_checked_at = now
        if self.keys.refresh() and self.keys.ring.own[0] != self._key_pair:
            self._key_pair = self.keys.ring.own[0]
            self._server.close()
            self._server = self._listen()
            self._members.clear()

    def _broadcast(self, state: str, reason: str) -> None:
        message = GroupState(self.group, state, reason, self.key)
        for member in self._members.values():
            self._server.send(member.name, message)
