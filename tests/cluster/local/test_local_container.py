# SPDX-License-Identifier: Apache-2.0
"""A container on the node of a local cluster does not start if it is stopped before its command runs."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from mizzen_local.node.container import Command, ContainerState, PodContainer, PodContext


async def test_a_container_stopped_while_its_command_is_prepared_does_not_start(tmp_path: Path) -> None:
    preparing, prepared = asyncio.Event(), asyncio.Event()
    events: list[str] = []

    async def prepare(spec: Any, run: int) -> Command:
        preparing.set()
        await prepared.wait()
        sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
        return Command(sleep, {}, tmp_path, tmp_path / "log", tmp_path / "message", "mark")

    pod = PodContext(
        prepare=prepare,
        address="127.0.0.1",
        grace=1.0,
        session=None,  # type: ignore[arg-type]
        changed=lambda: None,
        event=lambda reason, message, kind: events.append(reason),
    )
    container = PodContainer(
        {"name": "main"}, pod, restart="Always", initial=ContainerState({"waiting": {"reason": "Creating"}})
    )
    supervision = asyncio.create_task(container.supervise())
    await preparing.wait()
    await container.stop(1.0)
    prepared.set()
    await asyncio.wait_for(supervision, 10)
    assert "Started" not in events
    assert not container.running
