"""Node 0's view of the other nodes of its group."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from mizzen.server.config import EngineConfig
from mizzen.server.exit_reason import MISCONFIGURED, WRONG_CONFIGURATION, End
from mizzen.server.metric_catalogue import Phase
from mizzen.server.nodes.group import BLAME_SECONDS, WEAK, differences, endpoint, naming_port, settings
from mizzen.server.ranks.heartbeat import Pulse
from mizzen.wire.curve_keys import KeyFolder
from mizzen.wire.ranks.node_messages import PROTOCOL, Join, NodeServer, RankReport, NodeRefused, NodeReport, GroupState

log = logging.getLogger(__name__)

QUIET_SECONDS = 1.0
"""From a node that said nothing for this long, nothing follows about its ranks."""
LOOK_SECONDS = 2.0


@dataclass
class _Member:
    """A node that was let in."""

    name: bytes
    life: str
    heard: float
    report: NodeReport | None = None
    at: float = 0.0
    """When the report came."""
    rival: tuple[str, float] = ("", 0.0)
    """The life of another one that says it is this node, and since when."""


@dataclass
class Leader:
    """Node 0's view of the others."""

    config: EngineConfig
    keys: KeyFolder | None
    group: str = field(default_factory=lambda: secrets.token_hex(8))
    began: bool = False

    def __post_init__(self) -> None:
        """Listen."""
        self._pair = self.keys.ring.own[0] if self.keys else None
        self._server = self._listen()
        self._looked = 0.0
        self._settings = settings(self.config)
        self._members: dict[int, _Member] = {}
        self._refusals: dict[int, str] = {}
        self._weak_since: float | None = None

    def _listen(self) -> NodeServer:
        with naming_port(self.config.ranks_port):
            return NodeServer(endpoint(self.config.ranks_address, self.config.ranks_port), self._pair)

    @property
    def key(self) -> str:
        """Public key of the group's connections; empty without keys."""
        return self._pair.public.decode() if self._pair else ""

    @property
    def asked(self) -> bool:
        """Whether a node was asked to end."""
        return any(member.report is not None and member.report.asked for member in self._members.values())

    @property
    def phases(self) -> list[Phase]:
        """How far all other ranks are; nowhere before they have said."""
        if not self.began:
            return [Phase.SPAWN]
        reports = [member.report for member in self._members.values()]
        return [
            Phase(rank.phase) if rank else Phase.SPAWN
            for report in reports
            for rank in (report.ranks if report else [None])
        ]

    def turn(self, ranks: Sequence[RankReport], own: End | None, asked: bool, now: float) -> None:
        """Hear the others, let them in, and tell them to wait or to run."""
        for name, message in self._server.receive():
            if isinstance(message, Join):
                self._join(name, message, now)
            else:
                self._hear(name, message, now)
        if not self.began:
            self._look(now)
            late = [
                n for n, one in self._members.items() if now - one.heard > self.config.rank_deadline_seconds
            ]
            for node in late:
                del self._members[node]
            self.began = len(self._members) == self.config.nodes - 1
            if self.began:
                log.info("all nodes are there", extra={"fields": {"nodes": self.config.nodes}})
        self._tell("run" if self.began else "wait", "")

    def verdict(self, own: End | None, now: float) -> End | None:
        """Return what ended first: a rank that was killed goes before those that then fail."""
        if own is not None and own.kind != WEAK:
            return own
        if not self.began:
            return own
        members = sorted(self._members.items())
        told = [(node, one.report) for node, one in members if one.report is not None and one.report.kind]
        for node, report in told:
            if report.kind != WEAK:
                code = WRONG_CONFIGURATION if report.kind == MISCONFIGURED else 1
                return End(code, report.kind, f"node {node}: {report.reason}")
        for node, member in members:
            silent = now - member.heard
            if silent > self.config.rank_deadline_seconds:
                words = f"node {node} has said nothing for {silent:.1f} s: it is gone, stopped or cut off"
                return End(1, "node_lost", words)
        reasons = [own.reason] if own is not None else []
        reasons += [f"node {node}: {report.reason}" for node, report in told]
        if not reasons:
            return None
        since = self._weak_since = self._weak_since if self._weak_since is not None else now
        if now - since < BLAME_SECONDS or any(now - member.heard > QUIET_SECONDS for _, member in members):
            return None
        return End(1, WEAK, "; ".join(reasons))

    def pulses(self, now: float) -> list[Pulse]:
        """Return how far the ranks of nodes 1 and up are, by this machine's clock."""
        found: list[Pulse] = []
        for _, member in sorted(self._members.items()):
            if member.report is None or not member.report.ranks:
                found += [Pulse(0.0, 0, 0, 0, serves=False)] * self.config.local_ranks
                continue
            quiet = now - member.at > QUIET_SECONDS
            for rank in member.report.ranks:
                alive = 0.0 if rank.idle < 0 else now if quiet else member.at - rank.idle
                serves = rank.phase >= Phase.SERVING
                found.append(Pulse(alive, rank.launched, rank.done, rank.process, serves))
        return found

    def waits_for(self) -> str:
        """Name the nodes that are not there yet."""
        if self.began:
            return ""
        missing = [node for node in range(1, self.config.nodes) if node not in self._members]
        refused = [self._refusals[node] for node in missing if node in self._refusals]
        return "; ".join([f"waits for nodes {', '.join(map(str, missing))} of {self.config.nodes}", *refused])

    def close(self, end: End) -> None:
        """Tell the others how the group ended."""
        self._tell("failed" if end.code else "done", end.reason)
        self._server.close()

    def _join(self, name: bytes, join: Join, now: float) -> None:
        reason, code = self._objection(join)
        if reason:
            if self._refusals.get(join.node) != reason:
                log.warning("a node is turned away", extra={"fields": {"node": join.node, "reason": reason}})
            self._refusals[join.node] = reason
            self._server.send(name, NodeRefused(code, reason))
            return
        known = self._members.get(join.node)
        if known is not None and known.life != join.life and self._lives(known, join, now):
            return  # it asks again
        if known is None or known.life != join.life:
            log.info("a node has come", extra={"fields": {"node": join.node}})
            self._members[join.node] = _Member(name, join.life, now)
        else:
            known.heard = now

    def _lives(self, known: _Member, join: Join, now: float) -> bool:
        """Tell whether a node is there whose place another one asks for: a pod that was restarted has it.

        One that is still heard some time after the other came is there, and no echo of what has ended.
        """
        if known.rival[0] != join.life:
            known.rival = (join.life, now)
        return now - known.heard <= QUIET_SECONDS

    def _objection(self, join: Join) -> tuple[str, int]:
        if join.protocol != PROTOCOL:
            return f"node {join.node} is of another release: start all nodes of one image", 2
        if not 0 < join.node < self.config.nodes:
            return f"--node-rank {join.node} is not between 1 and {self.config.nodes - 1}, as --nodes says", 2
        differ = differences(self._settings, join.settings)
        if differ:
            return f"node {join.node} differs from node 0 in {', '.join(differ)}: start both alike", 2
        known = self._members.get(join.node)
        if self.began and (known is None or known.life != join.life):
            return f"the group runs with another node {join.node}: all of its nodes have to start anew", 1
        if known is not None and known.rival[0] == join.life and known.heard > known.rival[1] + QUIET_SECONDS:
            return f"another node {join.node} is there already: give each its own --node-rank", 1
        return "", 0

    def _hear(self, name: bytes, report: NodeReport, now: float) -> None:
        for member in self._members.values():
            if (member.name, member.life) == (name, report.life):
                member.heard, member.at, member.report = now, now, report
                return
        self._server.send(name, NodeRefused(1, "node 0 has started anew: all of the group's nodes have to"))

    def _look(self, now: float) -> None:
        """Use the newest keys as long as nothing has begun with others: they may change while one waits."""
        if self.keys is None or now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        if self.keys.refresh() and self.keys.ring.own[0] != self._pair:
            self._pair = self.keys.ring.own[0]
            self._server.close()
            self._server = self._listen()
            self._members.clear()

    def _tell(self, state: str, reason: str) -> None:
        word = GroupState(self.group, state, reason, self.key)
        for member in self._members.values():
            self._server.send(member.name, word)
