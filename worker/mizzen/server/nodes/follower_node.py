"""Another node's view of node 0 of its group."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from mizzen.server.config import EngineConfig
from mizzen.server.exit_reason import End
from mizzen.server.metric_catalogue import Phase
from mizzen.server.nodes.group import BLAME_SECONDS, endpoint, settings
from mizzen.server.ranks.heartbeat import Pulse
from mizzen.wire.curve_keys import KeyFolder
from mizzen.wire.ranks.node_messages import PROTOCOL, Join, NodeClient, RankReport, NodeRefused, NodeReport, GroupState

TRY_SECONDS = 3.0
"""For so long one generation of keys is tried."""


@dataclass
class Follower:
    """Another node's view of node 0."""

    config: EngineConfig
    keys: KeyFolder | None
    started: float
    group: str = ""
    began: bool = False

    def __post_init__(self) -> None:
        """Connect."""
        config = self.config
        self._life = secrets.token_hex(8)
        self._settings = settings(config)
        self._address = endpoint(config.leader_address, config.ranks_port)
        self._tries = 0
        self._client = self._connect()
        self._tried = self.started
        self._word: GroupState | None = None
        self._refused: NodeRefused | None = None
        self._heard = 0.0
        self._own_since: float | None = None

    def _connect(self) -> NodeClient:
        """Try with the keys of one generation, then with the other's: node 0 may have either."""
        own = self.keys.ring.own if self.keys else (None,)
        name = f"node{self.config.node_rank}/{self._life}"
        return NodeClient(self._address, own[self._tries % len(own)], name)

    @property
    def key(self) -> str:
        """Public key of the group's connections, as node 0 says; empty without keys."""
        return self._word.key if self._word is not None else ""

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
            if isinstance(message, NodeRefused):
                self._refused = message
            elif not self.group or message.group == self.group:
                self.group, self._word, self._heard = message.group, message, now
                self.began = self.began or message.state == "run"
        if self._word is None:
            self._look(now)
            join = Join(PROTOCOL, self._life, self.config.node_rank, self._settings)
            self._client.send(join)
        else:
            kind, reason = (own.kind, own.reason) if own is not None else ("", "")
            self._client.send(NodeReport(self._life, list(ranks), asked, kind, reason))

    def _look(self, now: float) -> None:
        if self.keys is None or now - self._tried < TRY_SECONDS:
            return
        self._tried = now
        if self.keys.refresh() or len(self.keys.ring.own) > 1:
            self._tries += 1
            self._client.close()
            self._client = self._connect()

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
