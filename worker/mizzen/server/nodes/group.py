# SPDX-License-Identifier: Apache-2.0
"""Interface between a supervisor and the other nodes of its group, and the settings that nodes compare.

A group is one engine whose ranks run on several nodes. Node 0 leads: it waits until all nodes have joined,
starts them, monitors all ranks and decides how the group exits. The other nodes start and exit with it. A
group never restarts: if any part of it is lost, the whole group exits, and the operator creates a new one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from mizzen import __version__
from mizzen.common.addresses import join_address
from mizzen.common.options import flag
from mizzen.engine.config import EngineOptions
from mizzen.server.config import EngineConfig
from mizzen.server.exit_reason import ExitReason
from mizzen.server.metric_catalogue import Phase
from mizzen.server.ranks.heartbeat import RankHeartbeat
from mizzen.wire.endpoint import UnsafeEndpoint
from mizzen.wire.ranks.node_messages import RankReport

ROOT_CAUSE_SECONDS = 1.5
"""Time in seconds by which a group delays its exit after a failure, so that the root cause can be reported.
If a rank fails because another rank is gone, the other rank's supervisor reports that within this time."""
PER_NODE_OPTIONS = frozenset({"model", "threads", "profile", "profile_steps", "check_integrity"})
"""Engine options that may differ between the nodes of a group."""
CONSEQUENTIAL_KIND = "rank_failed"
"""`ExitReason.kind` of a failure that may be the consequence of another rank's failure."""


class NodeGroup(Protocol):
    """Interface to the other nodes of a group, for the supervisor of one node."""

    @property
    def started(self) -> bool:
        """Whether all nodes have joined, so that the ranks may start; never reverts to False."""
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
        """Whether another node has received SIGTERM or SIGINT."""
        ...

    @property
    def phases(self) -> list[Phase]:
        """On node 0, the phases of all other nodes' ranks; on other nodes, empty."""
        ...

    def exchange_reports(
        self, ranks: Sequence[RankReport], own_exit: ExitReason | None, exit_requested: bool, now: float
    ) -> None:
        """Receive the messages of other nodes, and send them this node's state.

        Args:
            ranks: Progress of this node's ranks.
            own_exit: Reason for which this node alone would exit; None if it would continue.
            exit_requested: Whether this node has received SIGTERM or SIGINT.
            now: Current monotonic time in seconds.
        """
        ...

    def decide_exit(self, own_exit: ExitReason | None, now: float) -> ExitReason | None:
        """Return the reason for which this node must exit now, or None.

        `own_exit` is the reason for which this node would exit if it were alone.
        """
        ...

    def read_heartbeats(self, now: float) -> list[RankHeartbeat]:
        """On node 0, return the heartbeats of all other nodes' ranks, in rank order; on other nodes,
        return an empty list."""
        ...

    def describe_wait(self) -> str:
        """Return a description of the nodes that the startup waits for; empty once the group has started."""
        ...

    def close(self, end: ExitReason) -> None:
        """Report the exit reason to the other nodes and disconnect."""
        ...


def tcp_endpoint(address: str, port: int) -> str:
    """Return the ZMQ endpoint of a host name or IP address and a port."""
    return f"tcp://{join_address(address, port)}"


@contextlib.contextmanager
def explain_port_errors(port: int) -> Iterator[None]:
    """Add the option --ranks-port to the message of a ValueError about an endpoint that cannot be bound."""
    try:
        yield
    except UnsafeEndpoint:
        raise
    except ValueError as error:
        raise type(error)(f"{error} (--ranks-port {port} takes that port and the next two)") from error


def shared_settings(config: EngineConfig) -> dict[str, str]:
    """Return the values of the settings that must be equal on all nodes.

    Keys are options such as `--page-size`, or descriptions such as "the release".
    """
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
    """Return a description of each setting that differs between this node and another node."""
    names = [name for name in (*ours, *(set(theirs) - set(ours))) if ours.get(name) != theirs.get(name)]
    return [
        f"{name} ({theirs.get(name, 'nothing')} there, {ours.get(name, 'nothing')} here)" for name in names
    ]
