# SPDX-License-Identifier: Apache-2.0
"""Upgrade a cluster from the previous release to this one under load, and roll it back.

    python tests/upgrade/cluster_upgrade.py --requests 2000

The cluster consists of processes on this machine; its operator, gateways and engines are first those of the
previous release. Three services are under load:

- `engines-first`: its engines are replaced by those of this release before the upgrade.
- `gateways-first`: its engines are pinned to the previous release, and replaced after the upgrade.
- `together`: its engines are neither replaced before nor pinned; the upgrade replaces gateways and engines at
  the same time.

Engines are killed in between, and keys are rotated between gateways of this release and engines of the
previous one. The last line of the output is a JSON object; the exit code is 1 if a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

from noloss.changes import Changes, until
from noloss.driver import Driver
from noloss.kube import Kube
from noloss.local import Site
from noloss.services import hashed_questions, lane, real_service, simulated_service, trained_questions
from previous_release import CURRENT, Release, unpack_previous

from mizzen_local.cluster import NAMESPACE as OPERATOR_NAMESPACE
from mizzen_local.cluster import RELEASE, Cluster, operator_namespace
from mizzen_local.kubectl import Kubectl

NAMESPACE = "default"
ENGINES_FIRST, GATEWAYS_FIRST, TOGETHER = "engines-first", "gateways-first", "together"
ENGINE = "mizzen/engine-simulated"
RENDER = """
import json, sys, yaml, pathlib
from mizzen_operator.chart import operator_manifests
values, namespace, release, chart = json.loads(sys.argv[1])
print(yaml.safe_dump_all(operator_manifests(pathlib.Path(chart), values, namespace, release)))
"""


def render(release: Release) -> str:
    """Return the manifests of a release's CRD and chart, with images of the release."""
    tags = {"tag": release.name}
    values = {
        "operator": {"replicas": 1},
        "images": {
            "registry": "registry.example.com",
            **dict.fromkeys(("operator", "engine", "gateway"), tags),
        },
    }
    arguments = json.dumps([values, OPERATOR_NAMESPACE, RELEASE, str(release.root / "charts" / "mizzen")])
    command = [sys.executable, "-P", "-c", RENDER, arguments]
    chart = subprocess.run(
        command, env=release.environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    crd = (release.root / "crds" / "inferenceservices.yaml").read_text()
    return "\n---\n".join((crd, yaml.safe_dump(operator_namespace()), chart))


class ReleaseCluster(Cluster):
    """A cluster that begins with the previous release, and whose images may be of either release."""

    def __init__(self, folder: Path, previous: Release) -> None:
        super().__init__(folder)
        self._previous = previous

    def node_program(self) -> list[str]:
        """Return the command of a node that runs images of both releases, without options."""
        paths = {"PREVIOUS_PATH": self._previous.python_path, "CURRENT_PATH": CURRENT.python_path}
        program = [sys.executable, "-P", str(Path(__file__).with_name("release_node.py"))]
        return ["/usr/bin/env", *(f"{name}={value}" for name, value in paths.items()), *program]

    def _install(self, kubectl: Kubectl) -> None:
        apply(kubectl, self._previous)


def apply(kubectl: Kubectl, release: Release) -> None:
    """Apply the CRD and the chart of a release, as `helm upgrade` does."""
    kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=render(release))
    kubectl("wait", "--for=condition=Established", "crd/inferenceservices.mizzen.dev", "--timeout=30s")


class Upgrade:
    """The run on a cluster of the previous release."""

    def __init__(self, site: Site, previous: Release, requests: int) -> None:
        self._site, self._previous, self._requests = site, previous, requests
        self._began = time.monotonic()
        self.phases: dict[str, int] = {}
        """Number of requests to the service of each phase in that phase."""
        self.counts: dict[str, Any] = {}
        """Counts of all requests by service."""
        self._drivers: dict[str, Driver] = {}

    async def run(self) -> None:
        """Install, upgrade and roll back under load."""
        async with Kube(self._site.kubectl, self._site.kubeconfig) as kube:
            self._kube = kube
            self._do = Changes(kube, NAMESPACE, self._site, lambda name, kind: None)
            await self._create()
            try:
                await self._upgrade()
                for name, driver in self._drivers.items():
                    self.counts[name] = await driver.end()
            finally:
                for driver in self._drivers.values():
                    await driver.kill()

    async def _create(self) -> None:
        for name in (ENGINES_FIRST, GATEWAYS_FIRST):
            service = simulated_service(name, 2, 2, step_ms=20)
            service["spec"]["engine"]["image"] = f"{ENGINE}:previous"
            await self._do.apply(service)
        await self._do.apply(real_service(TOGETHER, 1, 1))
        lanes: dict[str, list[dict[str, Any]]] = {}
        for name in (ENGINES_FIRST, GATEWAYS_FIRST):
            await self._do.wait_until_settled(name)
            short = hashed_questions(name, (2, 3, 4, 6), stream=False)
            streams = hashed_questions(name, (50, 100, 200, 400), stream=True)
            lanes[name] = [lane(3, short, 0.1), lane(4, streams)]
        await self._do.wait_until_settled(TOGETHER)
        lanes[TOGETHER] = [lane(2, trained_questions(TOGETHER, stream=True), 0.3)]
        for name, parts in lanes.items():
            targets = [{"url": await self._url(name), "lanes": parts}]
            self._drivers[name] = Driver({"seed": 1, "timeout": 180, "targets": targets})
            await self._drivers[name].start()

    async def _url(self, name: str) -> str:
        service = await self._kube.call("GET", f"/api/v1/namespaces/{NAMESPACE}/services/{name}-gateway")
        return f"http://{service['spec']['clusterIP']}:{service['spec']['ports'][0]['port']}/v1"

    async def _upgrade(self) -> None:
        do = self._do
        began = self._started(ENGINES_FIRST)
        await self._set_image(ENGINES_FIRST, "current")
        await do.kill(ENGINES_FIRST, "container")
        await self._end_phase("engines of this release, gateways of the previous one", ENGINES_FIRST, began)

        began = self._started(GATEWAYS_FIRST)
        await self._apply_with_pinned_engines(CURRENT)
        await do.kill(GATEWAYS_FIRST, "container")
        await do.delete(GATEWAYS_FIRST)  # this release's operator creates a pod of the previous engine
        await do.rotate_keys(GATEWAYS_FIRST)
        await self._end_phase("gateways of this release, engines of the previous one", GATEWAYS_FIRST, began)

        began = self._started(GATEWAYS_FIRST)
        await self._set_image(GATEWAYS_FIRST, "current")
        await do.kill(GATEWAYS_FIRST, "container")
        await self._end_phase("the rollout of engines of this release", GATEWAYS_FIRST, began)

        began = self._started(ENGINES_FIRST)
        await self._apply_with_pinned_engines(self._previous)
        await do.kill(ENGINES_FIRST, "container")
        await self._set_image(ENGINES_FIRST, "previous")
        await self._end_phase("the rollback", ENGINES_FIRST, began)

    def _started(self, name: str) -> int:
        return self._drivers[name].started

    async def _end_phase(self, phase: str, name: str, began: int) -> None:
        """Wait until a service has had enough requests in this phase, and print the counts so far."""

        async def reached() -> bool:
            return self._started(name) - began >= self._requests

        await until(reached, f"{self._requests} requests", 1800)
        self.phases[phase] = self._started(name) - began
        counts = {
            name: {key: driver.counts[key] for key in ("ok", "streams", "failed")}
            for name, driver in self._drivers.items()
        }
        seconds = time.monotonic() - self._began
        print(
            f"{seconds:.0f} s: {phase}: {self.phases[phase]} requests; {counts}", file=sys.stderr, flush=True
        )

    async def _apply_with_pinned_engines(self, release: Release) -> None:
        """Install a release, and check that it replaces only the engines without a pinned image."""
        pods = await self._engine_uids(ENGINES_FIRST) | await self._engine_uids(GATEWAYS_FIRST)
        await self._apply(release)
        if pods != await self._engine_uids(ENGINES_FIRST) | await self._engine_uids(GATEWAYS_FIRST):
            raise AssertionError(f"the installation of the {release.name} release replaced pinned engines")

    async def _set_image(self, name: str, tag: str) -> None:
        """Replace the engines of a service by those of a release."""
        spec = {"engine": {"image": f"{ENGINE}:{tag}"}}
        path = f"/apis/mizzen.dev/v1alpha1/namespaces/{NAMESPACE}/inferenceservices/{name}"
        await self._kube.call("PATCH", path, {"spec": spec})
        await self._do.wait_until_settled(name)

    async def _engine_uids(self, name: str) -> set[str]:
        return {pod["metadata"]["uid"] for pod in await self._do.pods(name)}

    async def _apply(self, release: Release) -> None:
        """Install a release; return once all gateways are replaced and all services settled."""
        kubectl = Kubectl(Path(self._site.kubectl).parent, self._site.kubeconfig)
        await asyncio.to_thread(apply, kubectl, release)
        rollout = ("rollout", "status", f"deployment/{RELEASE}-operator", "-n", OPERATOR_NAMESPACE)
        await asyncio.to_thread(kubectl, *rollout, "--timeout=180s", timeout=200.0)
        for name in (ENGINES_FIRST, GATEWAYS_FIRST, TOGETHER):

            async def replaced(name: str = name) -> bool:
                pods = await self._do.pods(name, "gateway")
                images = {pod["spec"]["containers"][0]["image"] for pod in pods}
                return bool(images) and all(image.endswith(f":{release.name}") for image in images)

            await until(replaced, f"the gateways of {name} are of the {release.name} release")
            await self._do.wait_until_settled(name)
        images = {pod["spec"]["containers"][0]["image"] for pod in await self._do.pods(TOGETHER)}
        if any(not image.endswith(f":{release.name}") for image in images):
            raise AssertionError(f"engines without a pinned image: {images}")


def main() -> int:
    """Run the upgrade and the rollback, print the counts, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=2000,
        help="minimum number of requests to the service of each phase",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mizzen-upgrade-") as folder:
        previous = unpack_previous(Path(folder) / "previous")
        site = Site(Path(folder) / "cluster")
        site.cluster = ReleaseCluster(Path(folder) / "cluster", previous)
        try:
            site.up()
            upgrade = Upgrade(site, previous, options.requests)
            asyncio.run(upgrade.run())
        finally:
            site.down()
    print(json.dumps({"phases": upgrade.phases, "load": upgrade.counts}))
    return int(
        any(counts["failed"] or counts["started"] != counts["ok"] for counts in upgrade.counts.values())
    )


if __name__ == "__main__":
    sys.exit(main())
