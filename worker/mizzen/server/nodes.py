"""A group of several nodes, as the supervisor of each sees the others.

Node 0 leads: it waits until all are there, has them begin, looks after all ranks, and says how the group
ends. The others begin when it says so, and end with it. Nobody begins twice: a group of which anything is
lost ends whole, and whoever runs its nodes makes a new one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from mizzen import __version__
from mizzen.core.options import flag
from mizzen.engine.config import EngineOptions
from mizzen.server.catalogue import Phase
from mizzen.server.config import EngineConfig
from mizzen.server.ends import End
from mizzen.server.pulse import Pulse
from mizzen.wire.keys import WireKeys
from mizzen.wire.nodes import PROTOCOL, Join, NodeClient, NodeServer, RankReport, Refused, Report, Word

log = logging.getLogger(__name__)

BLAME_SECONDS = 1.5
"""A rank that fails may do so because another one is gone: whose supervisor tells within this time."""
QUIET_SECONDS = 1.0
"""From a node that said nothing for this long, nothing follows about its ranks."""
OWN = frozenset({"model", "threads", "profile", "profile_steps", "check_integrity"})
"""Options in which nodes may differ."""
WEAK = "rank_failed"
"""A failure that another one may be the reason of."""


class Others(Protocol):
    """The other nodes of a group."""

    @property
    def began(self) -> bool:
        """Whether the ranks are to be started; stays so."""
        ...

    @property
    def group(self) -> str:
        """Name of the group; set once it began."""
        ...

    @property
    def asked(self) -> bool:
        """Whether another node was asked to end."""
        ...

    @property
    def phases(self) -> list[Phase]:
        """How far ranks of other nodes are that this one answers for."""
        ...

    def turn(self, ranks: Sequence[RankReport], own: End | None, asked: bool, now: float) -> None:
        """Hear the others, and tell them how this node is."""
        ...

    def verdict(self, own: End | None, now: float) -> End | None:
        """Return how this node ends, if it does; `own` is what it would end with were it alone."""
        ...

    def pulses(self, now: float) -> list[Pulse]:
        """Return how far other nodes' ranks are, in order of ranks."""
        ...

    def waits_for(self) -> str:
        """Say what the start waits for; empty once it began."""
        ...

    def close(self, end: End) -> None:
        """Tell the others how it ended, and leave."""
        ...


def others(config: EngineConfig, keys: WireKeys | None, now: float) -> Others | None:
    """Return the other nodes of a configuration, if there are some.

    Raises:
        ValueError: an endpoint cannot be used, or only with keys.
    """
    if config.nodes == 1:
        return None
    return Leader(config, keys) if config.node_rank == 0 else Follower(config, keys, now)


def endpoint(address: str, port: int) -> str:
    """Return the ZMQ endpoint of a host and port."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def settings(config: EngineConfig) -> dict[str, str]:
    """Return what must be the same on all nodes."""
    names = [one.name for one in dataclasses.fields(EngineOptions) if one.name not in OWN]
    return {
        "the release": __version__,
        "the model's files": _files(Path(config.model)),
        "--revision": config.revision,
        **{flag(name): str(getattr(config, name)) for name in names},
    }


def _files(folder: Path) -> str:
    """Return a hash of the model's configuration and of the sizes of its weights."""
    told = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        told.update(f"{path.name} {path.stat().st_size}\n".encode())
    return told.hexdigest()[:12]


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Return in what they differ, in words."""
    names = [name for name in (*ours, *(set(theirs) - set(ours))) if ours.get(name) != theirs.get(name)]
    return [
        f"{name} ({theirs.get(name, 'nothing')} there, {ours.get(name, 'nothing')} here)" for name in names
    ]


@dataclass
class _Member:
    """A node that was let in."""

    name: bytes
    life: str
    heard: float
    report: Report | None = None
    at: float = 0.0
    """When the report came."""


@dataclass
class Leader:
    """Node 0's view of the others."""

    config: EngineConfig
    keys: WireKeys | None
    group: str = field(default_factory=lambda: secrets.token_hex(8))
    began: bool = False

    def __post_init__(self) -> None:
        """Listen."""
        self._server = NodeServer(endpoint(self.config.ranks_address, self.config.ranks_port), self.keys)
        self._settings = settings(self.config)
        self._members: dict[int, _Member] = {}
        self._refusals: dict[int, str] = {}
        self._weak_since: float | None = None

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
            late = [
                n for n, one in self._members.items() if now - one.heard > self.config.rank_deadline_seconds
            ]
            for node in late:
                del self._members[node]
            self.began = len(self._members) == self.config.nodes - 1
            if self.began:
                log.info("all nodes are there", extra={"fields": {"nodes": self.config.nodes}})
        self._tell(Word(self.group, "run" if self.began else "wait", ""))

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
                return End(1, report.kind, f"node {node}: {report.reason}")
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
            ranks = member.report.ranks if member.report else []
            quiet = now - member.at > QUIET_SECONDS
            for rank in ranks:
                alive = 0.0 if rank.idle < 0 else now if quiet else member.at - rank.idle
                found.append(Pulse(alive, rank.launched, rank.done, rank.process))
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
        self._tell(Word(self.group, "failed" if end.code else "done", end.reason))
        self._server.close()

    def _join(self, name: bytes, join: Join, now: float) -> None:
        reason, code = self._objection(join)
        if reason:
            if self._refusals.get(join.node) != reason:
                log.warning("a node is turned away", extra={"fields": {"node": join.node, "reason": reason}})
            self._refusals[join.node] = reason
            self._server.send(name, Refused(code, reason))
            return
        known = self._members.get(join.node)
        if known is None or known.life != join.life:
            log.info("a node has come", extra={"fields": {"node": join.node}})
            self._members[join.node] = _Member(name, join.life, now)
        else:
            known.heard = now

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
        return "", 0

    def _hear(self, name: bytes, report: Report, now: float) -> None:
        for member in self._members.values():
            if (member.name, member.life) == (name, report.life):
                member.heard, member.at, member.report = now, now, report
                return
        self._server.send(name, Refused(1, "node 0 has started anew: all of the group's nodes have to"))

    def _tell(self, word: Word) -> None:
        for member in self._members.values():
            self._server.send(member.name, word)


@dataclass
class Follower:
    """Another node's view of node 0."""

    config: EngineConfig
    keys: WireKeys | None
    started: float
    group: str = ""
    began: bool = False

    def __post_init__(self) -> None:
        """Connect."""
        config = self.config
        self._life = secrets.token_hex(8)
        self._settings = settings(config)
        self._address = endpoint(config.leader_address, config.ranks_port)
        self._client = NodeClient(self._address, self.keys, f"node{config.node_rank}/{self._life}")
        self._word: Word | None = None
        self._refused: Refused | None = None
        self._heard = 0.0
        self._own_since: float | None = None

    @property
    def asked(self) -> bool:
        """Node 0 tells when it has ended, and nothing before."""
        return False

    @property
    def phases(self) -> list[Phase]:
        """Node 0 answers for the others."""
        return []

    def turn(self, ranks: Sequence[RankReport], own: End | None, asked: bool, now: float) -> None:
        """Hear node 0; ask to be let in, or tell how this node is."""
        for message in self._client.receive():
            if isinstance(message, Refused):
                self._refused = message
            elif not self.group or message.group == self.group:
                self.group, self._word, self._heard = message.group, message, now
                self.began = self.began or message.state == "run"
        if self._word is None:
            join = Join(PROTOCOL, self._life, self.config.node_rank, self._settings)
            self._client.send(join)
        else:
            kind, reason = (own.kind, own.reason) if own is not None else ("", "")
            self._client.send(Report(self._life, list(ranks), asked, kind, reason))

    def verdict(self, own: End | None, now: float) -> End | None:
        """Return what node 0 says, if it says it in time; else what happened here."""
        word, limit = self._word, self.config.rank_deadline_seconds
        if word is not None and word.state == "done":
            return End(0)
        if word is not None and word.state == "failed":
            return End(1, "group_failed", word.reason)
        if self._refused is not None:
            return End(self._refused.code, "refused", f"node 0 refuses this one: {self._refused.reason}")
        if word is not None and now - self._heard > limit:
            words = f"node 0 at {self._address} has said nothing for {now - self._heard:.1f} s: it is gone"
            return End(1, "leader_lost", f"{words}, stopped or cut off")
        if own is None or word is None or own.kind == "signal":
            return own
        if own.code == 0:
            return None  # its ranks have ended as rank 0 told them to; node 0 tells why
        since = self._own_since = self._own_since if self._own_since is not None else now
        return own if now - since > 2 * BLAME_SECONDS else None

    def pulses(self, now: float) -> list[Pulse]:
        """Node 0 looks after the others' ranks."""
        return []

    def waits_for(self) -> str:
        """Say that node 0 is not there, or waits for others."""
        if self.began:
            return ""
        if self._word is not None:
            return "node 0 waits for other nodes"
        return f"waits for node 0 at {self._address}, with the keys of this one"

    def close(self, end: End) -> None:
        """Leave; of an end of its own, node 0 was told."""
        self._client.close()
