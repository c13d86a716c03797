# SPDX-License-Identifier: Apache-2.0
"""Cost of many services for the operator: time until ready, idle writes, CPU and memory, and fail-over.

    python benchmarks/operator_scale.py --services 1000 --json

etcd, kube-apiserver and the operator are real. The operator has the permissions that the chart grants, and a
CPU core of its own. The node, the Deployment controller and the gateways' admin API are simulated: pods run
as soon as they exist (benchmarks/operator_parts/node.py). The phases are:

    burst      all services are created at once. Measures the time from the first request until a client of
               the API server sees the last service become Ready, and the operator's CPU time in between
    apply      more services are created one at a time. Measures the time from the request until the engine
               pod exists
    idle       nothing changes for some time. Measures the operator's writes (from the API server's audit log,
               except for its Lease), its CPU time and its resident memory
    failover   a second operator stands by while the leader is stopped, first by SIGTERM, then by SIGKILL.
               Measures the time from the signal until a pod exists that was requested after the signal
    kills      the operator is killed and restarted at random moments, while groups are scaled, killed and
               replaced. Checks that each service has each of its pods exactly once in the end
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from operator_parts.cluster import SERVICES, Cluster, OperatorProcess, service

PHASES = ("burst", "apply", "idle", "failover", "kills")
GOALS = {
    "all_ready_s": 60.0,
    "apply_to_pods_p99_ms": 300.0,
    "idle_writes_per_minute": 0.0,
    "idle_cpu_percent": 2.0,
    "rss_mb": 250.0,
    "failover_graceful_s": 3.0,
    "failover_killed_s": 14.0,
}
NAMESPACES = 10
AT_ONCE = 32
CHECK_SECONDS = 2.0
"""Interval in seconds at which the benchmark checks that the operator is still running."""
PODS = "mizzen.dev/component=engine"


class Watcher:
    """Watches services and their engine pods, and records when services become ready and pods exist."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._api = cluster, cluster.api
        self.ready: dict[str, float] = {}
        self.pods: dict[str, dict[str, Any]] = {}
        self.created: dict[str, float] = {}
        """Time at which the first engine pod of each service was seen, on the monotonic clock."""
        self._changed = asyncio.Event()
        self._tasks = [asyncio.create_task(self._services()), asyncio.create_task(self._pods())]

    async def close(self) -> None:
        """Stop the watches."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def wait_until(self, condition: Any, seconds: float, description: str) -> None:
        """Wait until a condition on the watched objects holds, for at most `seconds`.

        Raises:
            TimeoutError: the condition does not hold after that time; the message contains its description.
            RuntimeError: the newest operator has ended.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            self._changed.clear()
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"not within {seconds:.0f} s: {description}")
            try:
                await asyncio.wait_for(self._changed.wait(), min(left, CHECK_SECONDS))
            except TimeoutError:
                self._cluster.check()

    def live(self, name: str) -> list[dict[str, Any]]:
        """Return the engine pods of the service `name` that are not being deleted."""
        return [
            pod
            for pod in self.pods.values()
            if pod["metadata"]["labels"]["mizzen.dev/service"] == name
            and "deletionTimestamp" not in pod["metadata"]
        ]

    async def _services(self) -> None:
        async for kind, body in self._api.watch("/apis/mizzen.dev/v1alpha1/inferenceservices"):
            meta, status = body["metadata"], body.get("status", {})
            ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", []))
            current = status.get("observedGeneration") == meta["generation"]
            if kind != "DELETED" and ready and current:
                self.ready.setdefault(meta["name"], time.monotonic())
            else:
                self.ready.pop(meta["name"], None)
            self._changed.set()

    async def _pods(self) -> None:
        async for kind, body in self._api.watch("/api/v1/pods", labelSelector=PODS):
            meta = body["metadata"]
            if kind == "DELETED":
                self.pods.pop(meta["uid"], None)
            else:
                self.pods[meta["uid"]] = body
                self.created.setdefault(meta["labels"]["mizzen.dev/service"], time.monotonic())
            self._changed.set()


class Run:
    """One run of the benchmark."""

    def __init__(self, cluster: Cluster, arguments: argparse.Namespace) -> None:
        self.cluster = cluster
        self.arguments = arguments
        self.namespaces = [f"bench-{number}" for number in range(NAMESPACES)]
        self.results: dict[str, Any] = {"services": arguments.services}

    async def run(self) -> dict[str, Any]:
        """Run the phases that the command line selects; return their figures."""
        await self.cluster.prepare(self.namespaces)
        self.cluster.start_node()
        self.operator = self.start()
        self.watcher = Watcher(self.cluster)
        try:
            for phase in PHASES:
                if phase in self.arguments.phases:
                    before = set(self.results)
                    await getattr(self, phase)()
                    for name in [name for name in self.results if name not in before]:
                        print_figure(name, self.results[name])
        finally:
            await self.watcher.close()
        return self.results

    def start(self, *options: str, identity: str = "") -> OperatorProcess:
        """Start an operator with the options of the command line, and further `options`."""
        rate = str(self.arguments.requests_per_second)
        fixed = ("--requests-per-second", rate, "--request-burst", rate)
        return self.cluster.start_operator(
            *fixed, *self.arguments.operator_option, *options, identity=identity
        )

    async def apply_one(self, name: str, **spec: Any) -> None:
        """Create the service `name` in one of the namespaces; the name determines which."""
        namespace = self.namespaces[hash(name) % NAMESPACES]
        await self.cluster.api.request("POST", SERVICES.format(namespace), service(name, namespace, **spec))

    async def patch(self, name: str, spec: dict[str, Any]) -> None:
        """Apply a merge patch to the spec of the service `name`."""
        path = f"{SERVICES.format(self.namespaces[hash(name) % NAMESPACES])}/{name}"
        await self.cluster.api.request("PATCH", path, {"spec": spec}, "application/merge-patch+json")

    async def burst(self) -> None:
        """Create all services at once, and measure the time until all of them are ready."""
        names = [f"s{number}" for number in range(self.arguments.services)]
        limiter = asyncio.Semaphore(AT_ONCE)

        async def apply(name: str) -> None:
            async with limiter:
                await self.apply_one(name)

        began, cpu = time.monotonic(), self.operator.cpu_seconds()
        load = load_seconds()
        await asyncio.gather(*map(apply, names))
        self.results["applied_s"] = round(time.monotonic() - began, 2)
        wanted = set(names)
        await self.watcher.wait_until(
            lambda: len(self.watcher.ready) >= len(wanted) and wanted <= set(self.watcher.ready),
            self.arguments.limit_seconds,
            "all services are ready",
        )
        self.results["all_ready_s"] = round(max(self.watcher.ready[n] for n in names) - began, 2)
        self.results["burst_cpu_s"] = round(self.operator.cpu_seconds() - cpu, 2)
        self.results["burst_machine_busy_cores"] = busy_cores(load, began)
        writes = Counter(
            f"{event['verb']} {event['objectRef']['resource']}"
            + (f"/{event['objectRef']['subresource']}" if "subresource" in event["objectRef"] else "")
            for event in self.cluster.audited()
        )
        self.results["burst_writes"] = sum(writes.values())
        self.results["burst_writes_by_kind"] = dict(writes.most_common())

    async def apply(self) -> None:
        """Create services one at a time, and measure the time until the engine pod of each exists."""
        took: list[float] = []
        for number in range(self.arguments.applies):
            name = f"one-{number}"
            began = time.monotonic()
            await self.apply_one(name)
            await self.watcher.wait_until(
                lambda name=name: name in self.watcher.created, 60, f"a pod of {name}"
            )
            took.append(1000 * (self.watcher.created[name] - began))
            await self.watcher.wait_until(
                lambda name=name: name in self.watcher.ready, 120, f"{name} is ready"
            )
        took.sort()
        for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):  # nearest rank
            self.results[f"apply_to_pods_{name}_ms"] = round(took[math.ceil(share * len(took)) - 1], 1)

    async def idle(self) -> None:
        """Measure the operator's writes, CPU time and memory while nothing changes."""
        await asyncio.sleep(self.arguments.settle_seconds)
        seconds = self.arguments.idle_seconds
        size, cpu, began = self.cluster.audit_size(), self.operator.cpu_seconds(), time.monotonic()
        await asyncio.sleep(seconds)
        took = time.monotonic() - began
        events = list(self.cluster.audited(size))
        for event in events[:5]:
            print("unexpected write at rest:", event["verb"], event["requestURI"], file=sys.stderr)
        self.results["idle_writes_per_minute"] = round(60 * len(events) / took, 2)
        self.results["idle_cpu_percent"] = round(100 * (self.operator.cpu_seconds() - cpu) / took, 2)
        self.results["rss_mb"] = round(self.operator.rss_mb(), 1)

    async def failover(self) -> None:
        """Stop the leader by SIGTERM, then by SIGKILL; each time, measure how long the fail-over takes."""
        await self.apply_one("failover", replicas=0)
        for number, name in ((signal.SIGTERM, "graceful"), (signal.SIGKILL, "killed")):
            other = self.start()
            await asyncio.sleep(self.arguments.settle_seconds)
            began = time.monotonic()
            self.operator.process.send_signal(number)
            groups = 1 if name == "graceful" else 2
            await self.patch("failover", {"replicas": groups})
            await self.watcher.wait_until(
                lambda groups=groups: len(self.watcher.live("failover")) >= groups, 120, f"a pod after {name}"
            )
            self.results[f"failover_{name}_s"] = round(time.monotonic() - began, 2)
            self.operator.end(number)
            self.operator = other

    async def kills(self) -> None:
        """Kill the operator repeatedly while it has work; then count services without the right pods."""
        rng = random.Random(self.arguments.seed)
        identity = "killed"
        self.operator.end()
        names = [f"kill-{number}" for number in range(8)]
        self.operator = self.start(identity=identity)
        for name in names:
            await self.apply_one(name)
        for _ in range(self.arguments.kills):
            name = rng.choice(names)
            if rng.random() < 0.5:
                await self.patch(name, {"replicas": rng.randint(0, 4)})
            elif rng.random() < 0.5:
                await self.patch(name, {"engine": {"maxRunningRequests": rng.randint(1, 256)}})
            else:
                await self._kill_pod(rng.choice(names), rng)
            await asyncio.sleep(rng.uniform(0.0, 2.5))
            self.operator.end(signal.SIGKILL)
            self.operator = self.start(identity=identity)
        for name in names:
            await self.patch(name, {"replicas": 2})

        def all_correct() -> bool:
            return all(
                name in self.watcher.ready
                and sorted(pod["metadata"]["labels"]["mizzen.dev/group"] for pod in self.watcher.live(name))
                == ["0", "1"]
                for name in names
            )

        try:
            await self.watcher.wait_until(all_correct, 180, "each service has its two groups, each once")
            wrong = 0
        except TimeoutError:
            wrong = sum(len(self.watcher.live(name)) != 2 or name not in self.watcher.ready for name in names)
        self.results["kills"] = self.arguments.kills
        self.results["services_wrong_after_kills"] = wrong

    async def _kill_pod(self, name: str, rng: random.Random) -> None:
        pods = self.watcher.live(name)
        if pods:
            meta = rng.choice(pods)["metadata"]
            path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
            await self.cluster.api.quietly("DELETE", path, {"gracePeriodSeconds": 0})


def load_seconds() -> float:
    """Return the CPU seconds that all processes of the machine have used since it started."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def busy_cores(load: float, began: float) -> float:
    """Return the mean number of busy cores since the time `began`, when `load_seconds` was `load`."""
    return round((load_seconds() - load) / (time.monotonic() - began), 2)


def print_figure(name: str, value: Any) -> None:
    """Print a figure, with its goal if it has one."""
    goal = f"   (goal: at most {GOALS[name]:g})" if name in GOALS else ""
    print(f"{name:28} {value}{goal}", flush=True)


async def main(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark in a temporary folder."""
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with tempfile.TemporaryDirectory(prefix="operator-scale-", ignore_cleanup_errors=True) as folder:
        cluster = Cluster(Path(folder), max(os.sched_getaffinity(0)))
        try:
            return await Run(cluster, arguments).run()
        finally:
            if arguments.keep_logs:
                for operator in cluster.operators:
                    (arguments.keep_logs / operator.log.name).write_bytes(operator.log.read_bytes())
            await cluster.close()


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--services", type=int, default=100)
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=["burst", "apply", "idle"])
    parser.add_argument("--applies", type=int, default=100, help="services created one at a time in apply")
    parser.add_argument("--settle-seconds", type=float, default=10.0, help="pause before idle and failover")
    parser.add_argument("--idle-seconds", type=float, default=120.0)
    parser.add_argument("--limit-seconds", type=float, default=900.0, help="maximum duration of burst")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="random seed of kills")
    parser.add_argument(
        "--requests-per-second", type=int, default=400, help="rate of the operator's token bucket"
    )
    parser.add_argument(
        "--operator-option",
        action="append",
        default=[],
        help="further option for the operator's command line; repeatable",
    )
    parser.add_argument("--keep-logs", type=Path, help="existing folder to copy the operators' logs to")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    return parser.parse_args()


if __name__ == "__main__":
    options = parse()
    result = asyncio.run(main(options))
    if options.json:
        print(json.dumps({**result, "goals": GOALS}))
