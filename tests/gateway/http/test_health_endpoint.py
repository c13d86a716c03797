# SPDX-License-Identifier: Apache-2.0
"""`GET /health` on the API's port: 200 if and only if a request would be served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest


async def health(gateway: Any) -> tuple[int, str]:
    async with httpx.AsyncClient(timeout=60) as http:
        response = await http.get(f"{gateway.url}/health")
        assert (await http.head(f"{gateway.url}/health")).status_code == response.status_code
    return response.status_code, response.text


async def complete(gateway: Any, model: str = "demo") -> None:
    await gateway.client().completions.create(model=model, prompt="a", max_tokens=1)


async def test_health_follows_the_engines(live: Any, scripted: Any, until: Any) -> None:
    """The probes of the gateway's own pod do not depend on the engines."""
    engine = scripted()
    gateway = await live(engine, queue_timeout_seconds=0, engine_timeout_seconds=0.5)
    assert await health(gateway) == (200, "")
    await complete(gateway)
    engine.kill()
    await until(lambda: not gateway.gateway.table.serving)
    assert await health(gateway) == (503, "no engine is ready\n")
    with pytest.raises(openai.InternalServerError, match="no engine is ready"):
        await complete(gateway)
    async with httpx.AsyncClient(timeout=60) as http:
        for path in ("healthz", "readyz"):
            assert (await http.get(f"{gateway.admin}/{path}")).status_code == 200


async def test_health_without_an_engine_or_while_draining(live: Any, scripted: Any) -> None:
    gateway = await live("ipc:///nonexistent/engine", wait=False)
    assert await health(gateway) == (503, "no engine is ready\n")
    serving = await live(scripted())
    serving.gateway.draining = True
    assert await health(serving) == (503, "draining\n")
    suspended = await live(scripted(), suspended=True)
    assert await health(suspended) == (503, "the service is suspended\n")


async def test_service_scaled_to_zero_is_healthy(live: Any, scripted: Any) -> None:
    """A load balancer that sends no requests to an unhealthy gateway would never wake the service."""
    gateway = await live("ipc:///nonexistent/engine", wait=False, wake_timeout_seconds=5)
    assert await health(gateway) == (200, "")


async def test_one_of_several_services_is_enough(live: Any, scripted: Any, tmp_path: Path) -> None:
    path = tmp_path / "services.json"
    entry = '{{"name": "{0}", "models": ["{0}"], "engines": ["{1}"]}}'
    absent = "ipc:///nonexistent/engine"
    path.write_text(f'{{"services": [{entry.format("a", absent)}]}}')
    gateway = await live(served_name="", services_file=str(path), wait=False, engine=())
    assert (await health(gateway))[0] == 503
    path.write_text(
        f'{{"services": [{entry.format("a", absent)}, {entry.format("b", scripted().endpoint)}]}}'
    )
    await gateway.serving(1)
    assert await health(gateway) == (200, "")
    await complete(gateway, "b")
