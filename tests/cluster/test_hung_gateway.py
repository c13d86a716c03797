"""One of two gateways hangs: it is left within 3 s, nobody else is troubled, and it is started again."""

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
from noloss.services import slow
from noloss.truth import HUNG_SECONDS, Shown
from noloss.watcher import Watcher

NAME, NAMESPACE = "two", "default"
GOOD_PROBES = 50
LATE_SECONDS = 0.5
"""By which what is seen of it here comes late at most."""
RESTARTED_SECONDS = 120.0
"""Its grace period is longer; whoever does not answer has none."""

pytestmark = [pytest.mark.cluster]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    one = Site(tmp_path_factory.mktemp("hung"))
    try:
        one.up()
        yield one
    finally:
        one.down()


@pytest.fixture
async def kube(site: Site) -> AsyncIterator[Kube]:
    async with Kube(site.kubectl, site.kubeconfig) as one:
        yield one


def name(pod: dict[str, Any]) -> str:
    return pod["metadata"]["name"]


async def test_a_hung_gateway_leaves_the_service_while_the_other_serves(site: Site, kube: Kube) -> None:
    do = Changes(kube, NAMESPACE, site, lambda *_: None)
    await do.apply(slow(NAME, 1, 2))
    await do.settled(NAME)
    spec = (await kube.call("GET", f"/api/v1/namespaces/{NAMESPACE}/services/{NAME}-gateway"))["spec"]
    url = f"http://{spec['clusterIP']}:{spec['ports'][0]['port']}/v1"
    watcher = Watcher(kube, NAMESPACE, {NAME: url}, every=0.1, deadline=1.0)
    probes = watcher.probes[NAME]

    def good() -> list[bool]:
        return [probe.good for probe in probes[-GOOD_PROBES:]]

    async def reason() -> str:
        found = (await do.service(NAME))["status"]["conditions"]
        return next(one["reason"] for one in found if one["type"] == "GatewayReady")

    async def gateways() -> dict[str, tuple[bool, int]]:
        """Whether each gateway is ready, and how often it was started again."""
        return {
            name(pod): (
                condition(pod, "Ready") is True,
                sum(one["restartCount"] for one in pod["status"].get("containerStatuses", ())),
            )
            for pod in await do.pods(NAME, "gateway")
        }

    async with watcher.running():
        # Not all of them from the start: where other tests have the cores, the first may come late.
        await until(_sometime(lambda: len(good()) == GOOD_PROBES and all(good())), "all probes are good")
        victim, other = sorted(await do.pods(NAME, "gateway"), key=name)
        hung_at, before = time.monotonic(), len(probes)
        assert await site.stop(victim, "all")
        seen: dict[str, float] = {}

        async def left() -> bool:
            if await reason() == "GatewayHangs":
                seen.setdefault("said", time.monotonic() - hung_at)
            if not (await gateways())[name(victim)][0]:
                seen.setdefault("left", time.monotonic() - hung_at)
            return "left" in seen

        async def restarted() -> bool:
            return (await gateways())[name(victim)][1] > 0

        await until(left, "the gateway that hangs is not ready")
        await until(restarted, "it is killed and started again", RESTARTED_SECONDS)
        seen["restarted"] = time.monotonic() - hung_at
        failed = [probe.sent - hung_at for probe in probes[before:] if not probe.good]
        print(
            f"{seen}, {len(failed)} of {len(probes) - before} probes failed, the last after {failed[-1:]} s"
        )
        until_all = hung_at + max([*failed, *seen.values()])
        most = watcher.strain.stretched(HUNG_SECONDS, hung_at, until_all) + LATE_SECONDS
        assert failed, "the gateway that hung was asked, too"
        assert max(failed) <= most
        assert seen["left"] <= most

        async def spared() -> bool:
            ready, restarts = (await gateways())[name(other)]
            assert restarts == 0
            return ready

        await until(spared, "the other gateway is ready")
        await do.settled(NAME)
        await until(_sometime(lambda: watcher.available(NAME) is True), "the watch says so, too")
        for begin, end in _unavailable(watcher.shown[NAME]):
            # Where processes wait for their turn, the other gateway may be late with its answers, too.
            added = watcher.strain.stretched(HUNG_SECONDS, begin - HUNG_SECONDS, end) - HUNG_SECONDS
            assert end - begin <= added, "a request was answered by the other one"


def _unavailable(shown: Sequence[Shown]) -> list[tuple[float, float]]:
    """When a service that is available now was not said to be."""
    return [(one.at, after.at) for one, after in pairwise(shown) if not one.available]


def _sometime(check: Callable[[], bool]) -> Callable[[], Awaitable[bool]]:
    async def later() -> bool:
        await asyncio.sleep(0)
        return check()

    return later
