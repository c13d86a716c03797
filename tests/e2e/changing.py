# SPDX-License-Identifier: Apache-2.0
"""The changes and faults of `tests/cluster/noloss` on a cluster with a real kubelet and containers."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

from nodes import kill_container, signal_all
from product import CLIENT, NAME, PYTHON, TENANT, Product

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

from noloss.changes import Changes, Which, until
from noloss.driver import Driver
from noloss.kube import Kube
from noloss.services import STORY, lane, trained_questions

# With WebSockets, kubectl keeps the deadline of the last write to standard input: a minute later, exec fails.
EXEC = ["env", "KUBECTL_REMOTE_COMMAND_WEBSOCKETS=false", "kubectl", "exec", "-i", "-n", TENANT, CLIENT]
EXEC += ["--", PYTHON, "/client/count.py", "-"]
LOAD_SECONDS = 1200.0
GROUPS = 3


class Containers:
    """Sends signals to containers of pods; restarts that follow a kill are counted as provoked."""

    def __init__(self, product: Product) -> None:
        self._product = product

    async def kill(self, pod: dict[str, Any], which: Which) -> bool:
        """Kill the first container of a pod."""
        self._product.restarts.provoke(pod)
        await asyncio.to_thread(kill_container, pod)
        return True

    async def stop(self, pod: dict[str, Any], which: Which) -> bool:
        """Send SIGSTOP to all processes of a pod's first container.

        Return False if the container runs on another machine.
        """
        return await asyncio.to_thread(signal_all, pod, signal.SIGSTOP)

    async def resume(self, pod: dict[str, Any]) -> None:
        """Send SIGCONT to all processes of a pod's first container."""
        await asyncio.to_thread(signal_all, pod, signal.SIGCONT)


def change_under_load(product: Product, requests: int) -> tuple[dict[str, Any], dict[str, int]]:
    """Change and break the service while a pod of the cluster sends at least `requests` requests.

    The service has one group before and after. Return the counts of the requests and of the changes.
    """
    return asyncio.run(_change(product, requests))


async def _change(product: Product, requests: int) -> tuple[dict[str, Any], dict[str, int]]:
    async with Kube() as kube:
        do = Changes(kube, TENANT, Containers(product), lambda *_: None)
        await do.scale(NAME, GROUPS)
        driver = Driver(_plan(product.status()["status"]["url"]), EXEC)
        await driver.start()
        try:
            rotation = asyncio.create_task(do.rotate_keys(NAME))
            await do.roll_out(NAME)
            await do.roll_out_and_revert(NAME)
            await do.scale_down_and_up(NAME, GROUPS, 1)
            for component in ("engine", "gateway"):
                await do.evict(NAME, component)
                await do.delete(NAME, component)
            await do.kill(NAME, "container")
            await _hang(do, product)
            await do.roll_out(NAME)
            await rotation

            async def enough() -> bool:
                return driver.started >= requests

            await until(enough, f"{requests} requests", LOAD_SECONDS)
            counts = await driver.end()
        finally:
            await driver.kill()
        await do.scale(NAME, 1)
        return counts, dict(do.done)


async def _hang(do: Changes, product: Product) -> None:
    """Stop and resume an engine if this machine is its node; engines on other nodes cannot be signalled."""
    pod = product.pods("engine")[0]
    if signal_all(pod, 0):
        await do.hang(NAME, "all", "resume")


def _plan(url: str) -> dict[str, Any]:
    lanes = [
        lane(3, trained_questions(NAME, stream=False), 0.05),
        lane(3, trained_questions(NAME, stream=True), 0.05),
        lane(2, trained_questions(NAME, stream=True, questions=(STORY,)), 0.2),
    ]
    return {"seed": 1, "timeout": 180, "targets": [{"url": url, "lanes": lanes}]}
