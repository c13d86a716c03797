"""Everything that an engine process can be told, in one frozen object."""

from __future__ import annotations

from dataclasses import dataclass

from mizzen.core.options import option
from mizzen.engine.config import EngineOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(EngineOptions):
    """Options of `mizzen engine`; each field is an option of the same name."""

    served_name: str = option("", "Name that the model is served under; the folder's name when empty")
    revision: str = option("", "Opaque name of this deployment's revision, shown to gateways")
    engine_id: str = option("", "Name of this engine; host name and process when empty")

    wire_bind: str = option("tcp://127.0.0.1:5557", "ZMQ endpoint for gateways")
    node_rank: int = option(0, "Which of the --nodes this is; 0 leads, and serves gateways", low=0)
    leader_address: str = option("", "Host name or address of node 0, for the other --nodes")
    ranks_address: str = option("127.0.0.1", "This node's own address, where the other --nodes reach it")
    ranks_port: int = option(
        5560, "Port of node 0 for the other --nodes, which use the two after it, too", low=1, high=65533
    )
    keys: str | None = option(None, "Folder with CURVE keys; required for tcp:// beyond loopback")
    http_host: str = option("127.0.0.1", "Address of /healthz, /readyz, /metrics")
    http_port: int = option(8081, "Port of /healthz, /readyz, /metrics", low=0, high=65535)
    startup_timeout_seconds: float = option(1800.0, "The start fails after this long", low=1)
    drain_timeout_seconds: float = option(120.0, "On SIGTERM, running requests get this long", low=0)
    watchdog_seconds: float = option(60.0, "A step that takes longer ends the engine", low=1)
    rank_deadline_seconds: float = option(
        8.0,
        "With several ranks: one that does not run, or falls behind the others, for longer ends the engine, "
        "and so does a step on cuda",
        low=1,
    )
    termination_message: str = option(
        "/dev/termination-log", "File that gets the reason of a failed end, where its folder exists"
    )

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ValueError: names the option and what would be right.
        """
        super(EngineConfig, self).__post_init__()
        if self.node_rank >= self.nodes:
            raise ValueError(f"--node-rank {self.node_rank} must be below --nodes {self.nodes}")
        if self.node_rank and not self.leader_address:
            raise ValueError(f"--node-rank {self.node_rank} needs --leader-address, that of node 0")
