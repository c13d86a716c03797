# SPDX-License-Identifier: Apache-2.0
"""A gateway with a simulated engine on an event loop in another thread, for blocking clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mizzen.server.simulate import SimulatedEngine
from mizzen.server.simulate_config import SimulateConfig

MODEL = Path(__file__).parents[2] / "models/demo"
CONTEXT = 96
"""Context length in tokens; short, so that requests without a limit end soon."""


@contextmanager
def simulated_gateway(start: Any) -> Iterator[Any]:
    """Start a simulated engine; `start(endpoint)` then starts a gateway. Both run until the block ends."""
    config = SimulateConfig(
        model=str(MODEL),
        wire_bind="tcp://127.0.0.1:*",
        step_milliseconds=0.0,
        context_length=CONTEXT,
        drain_timeout_seconds=0.2,
    )
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    try:
        with SimulatedEngine(config) as engine:
            gateway = run(start(engine.endpoint))
            yield gateway
            run(gateway.stop())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()
