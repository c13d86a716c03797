"""A group of several nodes, as the supervisor of each sees the others.

Node 0 leads: it waits until all are there, has them begin, looks after all ranks, and says how the group
ends. The others begin when it says so, and end with it. Nobody begins twice: a group of which anything is
lost ends whole, and whoever runs its nodes makes a new one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from mizzen import __version__
from mizzen.common.options import flag
from mizzen.engine.config import EngineOptions
from mizzen.server.config import EngineConfig
from mizzen.server.exit_reason import ExitReason
from mizzen.server.metric_catalogue import Phase
from mizzen.server.ranks.heartbeat import RankHeartbeat
from mizzen.wire.endpoint import UnsafeEndpoint
from mizzen.wire.ranks.node_messages import RankReport

ROOT_CAUSE_SECONDS = 1.5
"""A rank that fails may do so because another one is gone: whose supervisor tells within this time."""
PER_NODE_OPTIONS = frozenset({"model", "threads", "profile", "profile_steps", "check_integrity"})
"""Options in which nodes may differ."""
CONSEQUENTIAL_KIND = "rank_failed"
"""A failure that another one may be the reason of."""


class NodeGroup(Protocol):
    """The other nodes of a group."""

    @property
    def started(self) -> bool:
        """Whether the ranks are to be started; stays so."""
        ...

    @property
    def group(self) -> str:
        """Name of the group; set once it began."""
        ...

    @property
    def key(self) -> str:
        """Public key of the group's connections; empty without keys."""
        ...

    @property
    def exit_requested(self) -> bool:
        """Whether another node was asked to end."""
        ...

    @property
    def phases(self) -> list[Phase]:
        """How far ranks of other nodes are that this one answers for."""
        ...

    def exchange_reports(
        self, ranks: Sequence[RankReport], own_exit: ExitReason | None, exit_requested: bool, now: float
    ) -> None:
        """Hear the others, and tell them how this node is."""
        ...

    def decide_exit(self, own_exit: ExitReason | None, now: float) -> ExitReason | None:
        """Return how this node ends, if it does; `own` is what it would end with were it alone."""
        ...

    def read_heartbeats(self, now: float) -> list[RankHeartbeat]:
        """Return how far other nodes' ranks are, in order of ranks."""
        ...

    def describe_wait(self) -> str:
        """Say what the start waits for; empty once it began."""
        ...

    def close(self, end: ExitReason) -> None:
        """Tell the others how it ended, and leave."""
        ...


def tcp_endpoint(address: str, port: int) -> str:
    """Return the ZMQ endpoint of a host and port."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


@contextlib.contextmanager
def explain_port_errors(port: int) -> Iterator[None]:
    """Say of an endpoint that cannot be used which option chooses another."""
    try:
        yield
    except UnsafeEndpoint:
        raise
    except ValueError as error:
        raise type(error)(f"{error} (--ranks-port {port} takes that port and the next two)") from error


def shared_settings(config: EngineConfig) -> dict[str, str]:
    """Return what must be the same on all nodes."""
    names = [
        option.name for option in dataclasses.fields(EngineOptions) if option.name not in PER_NODE_OPTIONS
    ]
    return {
        "the release": __version__,
        "the model's files": _hash_model_files(Path(config.model)),
        "--revision": config.revision,
        **{flag(name): str(getattr(config, name)) for name in names},
    }


def _hash_model_files(folder: Path) -> str:
    """Return a hash of the model's configuration and of the sizes of its weights."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()[:12]


def describe_differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Return in what they differ, in words."""
    names = [name for name in (*ours, *(set(theirs) - set(ours))) if ours.get(name) != theirs.get(name)]
    return [
        f"{name} ({theirs.get(name, 'nothing')} there, {ours.get(name, 'nothing')} here)" for name in names
    ]
