# SPDX-License-Identifier: Apache-2.0
"""A hung gateway gets no more requests after 3 s and is restarted; the second gateway is undisturbed."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from noloss.changes import Changes, until
from noloss.kube import Kube, condition
from noloss.local import Site
from noloss.services import simulated_service
from noloss.truth import HUNG_SECONDS, ObservedStatus
from noloss.watcher import Watcher

NAME, NAMESPACE = "two", "default"
GOOD_PROBES = 50
LATE_SECONDS = 0.5
"""Longest delay, in seconds, between a change and its observation by this test."""
RESTARTED_SECONDS = 120.0
"""Time limit of the restart, in seconds.

It is shorter than the termination grace period, because a hung gateway must not get that period.
"""

pytestmark = [pytest.mark.cluster]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    cluster = Site(tmp_path_factory.mktemp("hung"))
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()


@pytest.fixture
async def kube(site: Site) -> AsyncIterator[Kube]:
    async with Kube(site.kubectl, site.kubeconfig) as client:
        yield client


def name(pod: dict[str, Any]) -> str:
    return pod["metadata"]["name"]


async def test_a_hung_gateway_gets_no_more_requests_while_the_other_serves(site: Site, kube: Kube) -> None:
    do = Changes(kube, NAMESPACE, site, lambda *_: None)
    await do.apply(simulated_service(NAME, 1, 2))
    await do.wait_until_settled(NAME)
    spec = (await kube.call("GET", f"/api/v1/namespaces/{NAMESPACE}/services/{NAME}-gateway"))["spec"]
    url = f"http://{spec['clusterIP']}:{spec['ports'][0]['port']}/v1"
    watcher = Watcher(kube, NAMESPACE, {NAME: url}, every=0.1, deadline=1.0)
    probes = watcher.probes[NAME]

    def good() -> list[bool]:
        return [probe.good for probe in probes[-GOOD_PROBES:]]

    async def reason() -> str:
        conditions = (await do.service(NAME))["status"]["conditions"]
        return next(c["reason"] for c in conditions if c["type"] == "GatewayReady")

    async def gateways() -> dict[str, tuple[bool, int]]:
        """Return whether each gateway is ready, and its number of restarts, by name of the pod."""
        return {
            name(pod): (
                condition(pod, "Ready") is True,
                sum(status["restartCount"] for status in pod["status"].get("containerStatuses", ())),
            )
            for pod in await do.pods(NAME, "gateway")
        }

    async with watcher.running():
        # Only the latest probes: while other tests use the cores, the first probes may be late.
        await until(_asynchronous(lambda: len(good()) == GOOD_PROBES and all(good())), "all probes are good")
        victim, other = sorted(await do.pods(NAME, "gateway"), key=name)
        hung_at, before = time.monotonic(), len(probes)
        assert await site.stop(victim, "all")
        seconds_until: dict[str, float] = {}

        async def unready() -> bool:
            if await reason() == "GatewayHangs":
                seconds_until.setdefault("reported", time.monotonic() - hung_at)
            if not (await gateways())[name(victim)][0]:
                seconds_until.setdefault("unready", time.monotonic() - hung_at)
            return "unready" in seconds_until

        async def restarted() -> bool:
            return (await gateways())[name(victim)][1] > 0

        await until(unready, "the gateway that hangs is not ready")
        await until(restarted, "the gateway that hangs is restarted", RESTARTED_SECONDS)
        seconds_until["restarted"] = time.monotonic() - hung_at
        failed = [probe.sent - hung_at for probe in probes[before:] if not probe.good]
        print(
            f"seconds until: {seconds_until}; {len(failed)} of {len(probes) - before} probes failed, "
            f"the last after {failed[-1:]} s"
        )
        end_of_all = hung_at + max([*failed, *seconds_until.values()])
        limit = watcher.strain.relaxed_limit(HUNG_SECONDS, hung_at, end_of_all) + LATE_SECONDS
        assert failed, "the gateway that hung got probes, too"
        assert max(failed) <= limit
        assert seconds_until["unready"] <= limit

        async def other_undisturbed() -> bool:
            ready, restarts = (await gateways())[name(other)]
            assert restarts == 0
            return ready

        await until(other_undisturbed, "the other gateway is ready")
        await do.wait_until_settled(NAME)
        await until(_asynchronous(lambda: watcher.available(NAME) is True), "Available is True in the watch")
        for begin, end in _unavailable(watcher.observed[NAME]):
            # If processes wait for a core, answers of the other gateway may be late, too.
            added = watcher.strain.relaxed_limit(HUNG_SECONDS, begin - HUNG_SECONDS, end) - HUNG_SECONDS
            assert end - begin <= added, "the other gateway answered requests, but Available was not True"


def _unavailable(observed: Sequence[ObservedStatus]) -> list[tuple[float, float]]:
    """Return the intervals (begin, end) in which Available was not True.

    An interval ends at the next observed status, so Available must be True in the last one.
    """
    return [(status.at, following.at) for status, following in pairwise(observed) if not status.available]


def _asynchronous(check: Callable[[], bool]) -> Callable[[], Awaitable[bool]]:
    async def run_check() -> bool:
        await asyncio.sleep(0)
        return check()

    return run_check
