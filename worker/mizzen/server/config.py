# SPDX-License-Identifier: Apache-2.0
"""Configuration of an engine, as one frozen dataclass."""

from __future__ import annotations

from dataclasses import dataclass

from mizzen.common.options import option
from mizzen.common.otlp import ENDPOINT_HELP, HEADERS_FILE_HELP, check_endpoint
from mizzen.engine.config import EngineOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(EngineOptions):
    """Options of `mizzen engine`; each field is the option of the same name."""

    served_name: str = option("", "Name under which the model is served; the folder's name by default")
    revision: str = option("", "Opaque revision name of this deployment, reported to gateways")
    engine_id: str = option("", "Name of this engine; host name and process id by default")

    wire_bind: str = option("tcp://127.0.0.1:5557", "ZMQ endpoint that gateways connect to")
    node_rank: int = option(
        0, "Index of this node among --nodes; node 0 leads and serves the gateways", low=0
    )
    leader_address: str = option("", "Host name or address of node 0, required on the other --nodes")
    ranks_address: str = option("127.0.0.1", "Address at which the other --nodes reach this node")
    ranks_port: int = option(
        5560, "Port of node 0 for the other --nodes, which also use the next two ports", low=1, high=65533
    )
    keys: str | None = option(None, "Folder with CURVE keys; required for tcp:// endpoints beyond loopback")
    http_host: str = option("127.0.0.1", "Address of /healthz, /readyz and /metrics")
    http_port: int = option(8081, "Port of /healthz, /readyz and /metrics", low=0, high=65535)
    startup_timeout_seconds: float = option(1800.0, "Time after which an unfinished startup fails", low=1)
    drain_timeout_seconds: float = option(
        120.0, "Time that running requests get to finish after SIGTERM", low=0
    )
    watchdog_seconds: float = option(60.0, "Time after which an unfinished step ends the engine", low=1)
    rank_deadline_seconds: float = option(
        8.0,
        "Only with several ranks: time after which the engine ends because a rank has "
        "stopped, lags behind, or has not finished a step on cuda",
        low=1,
    )
    otlp_endpoint: str = option("", ENDPOINT_HELP)
    otlp_headers_file: str = option("", HEADERS_FILE_HELP)
    termination_message: str = option(
        "/dev/termination-log", "File to which the reason of a failure is written, if its folder exists"
    )

    def __post_init__(self) -> None:
        """Check the values of all fields.

        Raises:
            ValueError: a value is invalid; the message names the option and the allowed values.
        """
        super(EngineConfig, self).__post_init__()
        check_endpoint(self.otlp_endpoint)
        if self.node_rank >= self.nodes:
            raise ValueError(f"--node-rank {self.node_rank} must be below --nodes {self.nodes}")
        if self.node_rank and not self.leader_address:
            raise ValueError(f"--node-rank {self.node_rank} needs --leader-address, the address of node 0")
