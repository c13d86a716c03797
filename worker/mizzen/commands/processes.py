# SPDX-License-Identifier: Apache-2.0
"""`mizzen engine` and `mizzen gateway`, the main processes of the pods."""

from __future__ import annotations

from typing import Any

import typer

from mizzen.commands.options import build, command, settings
from mizzen.common.extras import require_modules
from mizzen.gateway.config import GatewayConfig
from mizzen.server.config import EngineConfig


def _engine(**values: Any) -> None:
    """Run one engine, which loads a model and serves gateways over ZMQ.

    Clients reach it through a gateway. `mizzen serve` starts both.
    """
    require_modules("torch")  # imported only in the engine's child processes
    config = build(EngineConfig, values)
    from mizzen.server import supervisor

    raise typer.Exit(supervisor.run_engine(config))


def _gateway(**values: Any) -> None:
    """Run one gateway, which serves the OpenAI API and routes requests to engines.

    The engines are given by --engine; without this option, they are the service's engine pods on Kubernetes.
    """
    require_modules("fastapi")
    config = build(GatewayConfig, values)
    from mizzen.gateway import main

    raise typer.Exit(main.run(config))


engine = command(_engine, settings(EngineConfig), extras="worker")
gateway = command(_gateway, settings(GatewayConfig), extras="gateway")
