"""Protocol between a supervisor and the other nodes of its group, and the settings that nodes compare.

Node 0 leads: it waits until all nodes have joined, starts them, monitors all ranks and decides how the group
exits. The other nodes start and exit with it. A group never restarts: if any part of it is lost, the whole
group exits, and its operator creates a new one.
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
"""Time to wait for a root cause: a rank may fail because another rank is gone, whose supervisor reports it
within this time."""
PER_NODE_OPTIONS = frozenset({"model", "threads", "profile", "profile_steps", "check_integrity"})
"""Options that may differ between nodes."""
CONSEQUENTIAL_KIND = "rank_failed"
"""Kind of failure that may be the consequence of another rank's failure."""


class NodeGroup(Protocol):
    """Other nodes of a group, as the supervisor sees them."""

    @property
    def started(self) -> bool:
        """Whether the ranks may be started; never reverts to False."""
        ...

    @property
    def group(self) -> str:
        """Id of the group; set once it has started."""
        ...

    @property
    def key(self) -> str:
        """Public key of the group's connections; empty if no keys are configured."""
        ...

    @property
    def exit_requested(self) -> bool:
        """Whether another node was asked to exit."""
        ...

    @property
    def phases(self) -> list[Phase]:
        """Phases of the ranks of other nodes that this node accounts for."""
        ...

    def exchange_reports(
        self, ranks: Sequence[RankReport], own_exit: ExitReason | None, exit_requested: bool, now: float
    ) -> None:
        """Receive the other nodes' messages and send them this node's state."""
        ...

    def decide_exit(self, own_exit: ExitReason | None, now: float) -> ExitReason | None:
        """Return this node's exit reason, if any; `own_exit` is the one it would have without a group."""
        ...

    def read_heartbeats(self, now: float) -> list[RankHeartbeat]:
        """Return the heartbeats of other nodes' ranks, in rank order."""
        ...

    def describe_wait(self) -> str:
        """Describe what the startup waits for; empty once the group has started."""
        ...

    def close(self, end: ExitReason) -> None:
        """Report the exit reason to the other nodes and disconnect."""
        ...


def tcp_endpoint(address: str, port: int) -> str:
    """Return the ZMQ endpoint of a host and a port."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


@contextlib.contextmanager
def explain_port_errors(port: int) -> Iterator[None]:
    """Add the option --ranks-port to the message of a ValueError about an unusable endpoint."""
    try:
        yield
    except UnsafeEndpoint:
        raise
    except ValueError as error:
        raise type(error)(f"{error} (--ranks-port {port} takes that port and the next two)") from error


def shared_settings(config: EngineConfig) -> dict[str, str]:
    """Return the settings that must be equal on all nodes, by option name."""
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
    """Return a hash of the model's configuration and of the sizes of its weight files."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()[:12]


def describe_differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Return a description of each setting that differs."""
    names = [name for name in (*ours, *(set(theirs) - set(ours))) if ours.get(name) != theirs.get(name)]
    return [
        f"{name} ({theirs.get(name, 'nothing')} there, {ours.get(name, 'nothing')} here)" for name in names
    ]
