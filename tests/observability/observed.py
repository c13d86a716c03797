# SPDX-License-Identifier: Apache-2.0
"""A real cluster with a service under load and faults, for the queries of dashboards and alerts."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import zmq
from manifests import BROKEN, KEYS, NAME, SPACE, fetching_service, key_secret, secret, service
from prometheus_server import Prometheus
from waiting import eventually

from mizzen_local.cluster import Cluster
from mizzen_local.urls import NoUrlError, service_url

ANSWER = {"type": "object", "properties": {"ship": {"type": "string", "maxLength": 5}}, "required": ["ship"]}
SYSTEM = "You are the mate of a ship and answer the crew's questions in plain words. " * 3


class ObservedCluster:
    """A cluster with the operator, a service of two groups, and a service whose gateway cannot be created."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cluster = Cluster(folder)
        self.cluster.up(gpus=0, operator=True, report=lambda line: print(line, file=sys.stderr))
        self.kubectl = self.cluster.kubectl()

    def close(self) -> None:
        self.cluster.down()

    def apply(self, *objects: dict[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", stdin="\n---\n".join(map(json.dumps, objects)))

    def deploy(self) -> None:
        """Create a Service with the name of the broken service's gateway, and then create both services."""
        name = f"{BROKEN}-gateway"
        foreign = {"ports": [{"port": 1}], "selector": {"nothing": "here"}}
        self.apply(
            {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": foreign},
            secret("demo-tls"),
            key_secret(),
            service(NAME, 1),
            fetching_service(str(self.folder / "model-cache")),
        )
        eventually(self.settled, "the autoscaler has raised the replicas, and the service is ready")
        self.apply(service(BROKEN, 1))
        eventually(lambda: self.serving() == 2 and self.settled(), "two groups serve")

    def exceed_autoscaler(self) -> None:
        """Set more replicas than the autoscaler allows, and wait until it has reduced them again."""
        self.kubectl("scale", "infsvc", NAME, "--replicas=3")
        eventually(
            lambda: self.kubectl.json("get", "infsvc", NAME)["spec"]["replicas"] == 2,
            "the autoscaler enforces its maximum",
        )

    def url(self) -> str:
        with suppress(NoUrlError):
            return service_url(self.kubectl, NAME, SPACE)
        return ""

    def conditions(self, name: str) -> dict[str, bool]:
        conditions = self.kubectl.json("get", "infsvc", name).get("status", {}).get("conditions", ())
        return {condition["type"]: condition["status"] == "True" for condition in conditions}

    def settled(self) -> bool:
        """Return whether the service is Ready at its newest generation."""
        body = self.kubectl.json("get", "infsvc", NAME)
        current = body.get("status", {}).get("observedGeneration") == body["metadata"]["generation"]
        return current and self.conditions(NAME).get("Ready", False)

    def pods(self, component: str) -> list[dict[str, Any]]:
        selector = f"mizzen.dev/service={NAME},mizzen.dev/component={component}"
        pods = self.kubectl.json("get", "pods", "-l", selector)["items"]
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def processes(self, pod: dict[str, Any], word: str = "") -> list[psutil.Process]:
        """Return all processes of a pod that have `word` in their command line."""
        mark = f"{self.folder}/pods/{pod['metadata']['uid']}/"
        processes = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                marked = process.environ().get("MIZZEN_LOCAL_MARK", "").startswith(mark)
                if marked and word in " ".join(process.cmdline()):
                    processes.append(process)
        return processes

    def rank(self, pod: dict[str, Any]) -> psutil.Process:
        """Wait for the process that executes the model in a pod, and return it."""
        return eventually(lambda: self.processes(pod, "mizzen.server.ranks.leader"), "a rank runs")[0]

    def serving(self) -> int:
        """Return the number of available groups."""
        return self.kubectl.json("get", "infsvc", NAME).get("status", {}).get("availableReplicas", 0)

    def suspend(self, wanted: bool) -> None:
        """If `wanted`, suspend the service, so that its gateway answers 503; otherwise, resume it."""
        spec = json.dumps({"spec": {"suspend": wanted}})
        self.kubectl("patch", "infsvc", NAME, "--type", "merge", "-p", spec)

    def roll_out(self) -> None:
        """Change the engines' environment, so that all groups are replaced; wait until the rollout begins."""
        env = [{"name": name, "value": "1"} for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")]
        patch = json.dumps({"spec": {"engine": {"env": env}}})
        self.kubectl("patch", "infsvc", NAME, "--type", "merge", "-p", patch)
        eventually(lambda: not self.settled(), "the rollout has begun")

    def send_malformed_frames(self, pod: dict[str, Any]) -> None:
        """Send malformed frames to an engine, as a gateway of another version might."""
        data = self.kubectl.json("get", "secret", f"{NAME}-gateway-keys")["data"]
        keys = {name: base64.b64decode(value).strip() for name, value in data.items()}
        context = zmq.Context()
        try:
            dealer = context.socket(zmq.DEALER)
            dealer.curve_publickey = keys["gateway.public"]
            dealer.curve_secretkey = keys["gateway.secret"]
            dealer.curve_serverkey = keys["engine.public"]
            dealer.connect(f"tcp://{pod['status']['podIP']}:5557")
            for _ in range(20):
                dealer.send(b"\xff no message")
            dealer.close(linger=5000)
        finally:
            context.term()


def question(words: str) -> dict[str, Any]:
    """Return the messages of a chat; all chats have the same system message."""
    return {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": words}]}


def key_header(name: str) -> dict[str, str]:
    """Return the header with the API key that has a name."""
    return {"Authorization": f"Bearer {KEYS[name]}"}


def send_common_prefix(url: str) -> None:
    """Send two chats with a common prefix, so that a gateway that has just started knows a shared prefix."""
    with httpx.Client(verify=False, timeout=60, trust_env=False, headers=key_header("batch")) as http:
        for words in ("What is a mast?", "What is a keel?"):
            body = {"model": NAME, **question(words), "max_tokens": 1}
            http.post(f"{url}/chat/completions", json=body).raise_for_status()


class Load:
    """Clients that send requests while a `with` block runs; some requests fail intentionally.

    `codes` counts responses by HTTP status, and `connection_errors` counts requests without a response.
    """

    def __init__(self, url: str, streams: int, *, invalid: bool = True) -> None:
        """Create the clients: `streams` chats at a time, and others, some of them with `invalid` requests."""
        self._url = url
        self._invalid = invalid
        self._streams = streams
        self._stop = threading.Event()
        self.codes: dict[int, int] = {}
        self.connection_errors = 0
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(
            verify=False, timeout=150, trust_env=False, limits=limits, headers=key_header("batch")
        ) as http:
            chats = [self._repeat(http, self._chat, number) for number in range(self._streams)]
            others = [self._structured]
            if self._invalid:
                others += [self._disconnect_early, self._send_invalid, self._send_burst]
            await asyncio.gather(*chats, *(self._repeat(http, client, 0) for client in others))

    async def _repeat(self, http: httpx.AsyncClient, work: Callable[..., Any], number: int) -> None:
        turn = 0
        while not self._stop.is_set():
            try:
                await work(http, number, turn)
            except httpx.HTTPError:
                self.connection_errors += 1
            turn += 1
            await asyncio.sleep(0.05)

    async def _post(
        self, http: httpx.AsyncClient, path: str, headers: dict[str, str] | None = None, **body: Any
    ) -> httpx.Response:
        answer = await http.post(f"{self._url}/{path}", json={"model": NAME, **body}, headers=headers)
        self.codes[answer.status_code] = self.codes.get(answer.status_code, 0) + 1
        if answer.status_code in (429, 503):
            await asyncio.sleep(0.3)
        return answer

    async def _chat(self, http: httpx.AsyncClient, number: int, turn: int) -> None:
        messages = question(f"Sailor {number} asks, {turn}: what is a fence?")
        headers = key_header("team-b" if number % 3 else "team-a")
        options = {"max_tokens": 80, "ignore_eos": True, "stream": True}
        await self._post(http, "chat/completions", headers, **messages, **options)

    async def _structured(self, http: httpx.AsyncClient, _: int, turn: int) -> None:
        schema = ANSWER if turn % 3 else {**ANSWER, "title": f"ship {turn}"}
        shape = {"type": "json_schema", "json_schema": {"name": "ship", "schema": schema}}
        messages = [{"role": "user", "content": "Name a ship."}]
        await self._post(http, "chat/completions", messages=messages, max_tokens=24, response_format=shape)
        if self._invalid:
            await self._post(http, "chat/completions", messages=messages, max_tokens=4, ebnf="root ::= (")

    async def _disconnect_early(self, http: httpx.AsyncClient, *_: int) -> None:
        body = {"model": NAME, "prompt": "Once", "max_tokens": 20, "ignore_eos": True, "stream": True}
        async with http.stream("POST", f"{self._url}/completions", json=body) as answer:
            async for _line in answer.aiter_lines():
                break
        await asyncio.sleep(0.5)

    async def _send_invalid(self, http: httpx.AsyncClient, *_: int) -> None:
        await self._post(http, "chat/completions", messages=[])
        await self._post(http, "completions", model="unknown", prompt="a")
        await self._post(http, "completions", prompt="word " * 3000)
        await asyncio.sleep(0.5)

    async def _send_burst(self, http: httpx.AsyncClient, _: int, turn: int) -> None:
        """In every 80th turn, send more concurrent requests than the gateway admits and queues."""
        if turn % 80 == 0:
            requests = [self._post(http, "completions", prompt="Ahoy", max_tokens=8) for _ in range(24)]
            await asyncio.gather(*requests, return_exceptions=True)
        await asyncio.sleep(0.05)


LOAD_CONDITIONS = (
    'sum(mizzen_gateway_requests_total{code="200"}) > 10',
    "sum(mizzen_engine_grammar_cache_hits_total) > 0",
    "sum(mizzen_engine_grammars_refused_total) > 0",
    "sum(mizzen_gateway_cached_prompt_tokens_total) > 0",
    "sum(mizzen_engine_steps_total) > 50",
    "sum(mizzen_gateway_aborts_total) > 0",
    "sum(mizzen_gateway_refused_requests_total) > 0",
)
"""PromQL conditions that the load must have met before the first fault."""


STEADY_SECONDS = 40.0


def run_steady_load(observed: ObservedCluster) -> tuple[float, float]:
    """Put the service under load, kill an engine, and roll out a change; return the start and the end.

    The gateway answers nearly all requests, so plots of this run show a working service. Both are Unix times
    in seconds.
    """
    began = time.time()
    with Load(observed.url(), streams=5, invalid=False):
        time.sleep(STEADY_SECONDS)
        observed.rank(observed.pods("engine")[0]).kill()
        time.sleep(STEADY_SECONDS)
        eventually(lambda: observed.serving() == 2 and observed.settled(), "the lost engine is replaced")
        observed.roll_out()
        eventually(lambda: observed.serving() == 2 and observed.settled(), "the rollout is complete")
        time.sleep(STEADY_SECONDS)
    return began, time.time()


def run_load_and_faults(observed: ObservedCluster, prometheus: Prometheus) -> Load:
    """Put the service under load until LOAD_CONDITIONS hold, then inject one fault after another.

    Each fault lasts until Prometheus has recorded its effect on the metrics.
    """

    def wait_for_series(*exprs: str) -> None:
        for expr in exprs:
            eventually(lambda expr=expr: prometheus.query(expr), expr)

    def find_busy_pod() -> dict[str, Any] | None:
        """Return the pod of the engine that generates the most tokens.

        Return None unless both engines serve, the gateway suspects neither of them, and one generates
        tokens.
        """
        no_suspects = "sum(mizzen_gateway_suspect_engines) == 0"
        busiest = prometheus.query("topk(1, rate(mizzen_engine_output_tokens_total[5s]) > 1)")
        pods = {pod["metadata"]["name"]: pod for pod in observed.pods("engine")}
        if not busiest or not prometheus.query(no_suspects) or observed.serving() < 2:
            return None
        return pods.get(busiest[0]["metric"]["pod"])

    def kill_busy_engine() -> bool:
        """Kill a busy engine; return whether its breaker opened and the other engine resumed an answer."""
        opened = "max(max_over_time(mizzen_gateway_breaker_state[2m])) > 0"
        resumed = "sum(mizzen_gateway_resume_seconds_count) > 0"
        observed.rank(eventually(find_busy_pod, "an engine is busy")).kill()
        with suppress(AssertionError):
            for expr in (opened, resumed):
                eventually(lambda expr=expr: prometheus.query(expr), expr, 10)
            return True
        return False

    def kill_all_engines() -> bool:
        """Kill all engines; return whether answers ended with an error.

        If an engine restarts in time, the gateway resumes the answers instead, and False is returned.
        """
        for pod in observed.pods("engine"):  # an engine may still be starting
            for rank in observed.processes(pod, "mizzen.server.ranks.leader"):
                rank.kill()
        broken = "sum(mizzen_gateway_stream_errors_total) > 0"
        failed = "sum(mizzen_gateway_resume_failures_total) > 0"
        with suppress(AssertionError):
            for expr in (broken, failed):
                eventually(lambda expr=expr: prometheus.query(expr), expr, 10)
            return True
        return False

    def recreate_broken_service() -> bool:
        """Recreate the broken service; return whether the operator counted a refused API request."""
        refused = 'sum(rate(mizzen_operator_api_requests_total{code!~"2.."}[15s])) > 0'
        observed.kubectl("delete", "infsvc", BROKEN)
        observed.apply(service(BROKEN, 1))
        with suppress(AssertionError):
            return bool(eventually(lambda: prometheus.query(refused), refused, 10))
        return False

    def replace_engine() -> bool:
        """Delete one of two engine pods; return whether the gateway sent prefixes to the new engine."""
        warmed = "sum(rate(mizzen_gateway_warmed_tokens_total[15s])) > 0"
        if observed.serving() < 2:
            return False
        with suppress(AssertionError, httpx.HTTPError):
            send_common_prefix(observed.url())  # all prompts since the gateway's restart may be short
            observed.kubectl("delete", "pod", observed.pods("engine")[0]["metadata"]["name"], "--wait=false")
            return bool(eventually(lambda: prometheus.query(warmed), warmed, 60))
        return False

    with Load(observed.url(), streams=7) as load:
        wait_for_series(*LOAD_CONDITIONS)
        observed.exceed_autoscaler()
        eventually(
            lambda: len(observed.pods("engine")) == 2 and observed.settled(), "the third engine is gone"
        )
        hung, other = observed.pods("engine")
        observed.rank(hung).send_signal(signal.SIGSTOP)
        wait_for_series("sum(mizzen_gateway_suspect_engines) > 0")
        observed.rank(hung).send_signal(signal.SIGCONT)
        observed.send_malformed_frames(other)
        wait_for_series("sum(mizzen_engine_malformed_frames_total) > 0")
        eventually(kill_busy_engine, "an answer is resumed by another engine")
        eventually(kill_all_engines, "answers end with an error")
        eventually(lambda: observed.serving() == 0, "the status shows the loss of both engines")
        eventually(recreate_broken_service, "the operator counts a refused API request")
        eventually(lambda: observed.serving() == 2 and observed.settled(), "both engines serve again")
        wait_for_series("sum(mizzen_gateway_retries_total) > 0")
        observed.suspend(True)
        wait_for_series('sum(rate(mizzen_gateway_requests_total{code="503"}[15s])) > 0')
        observed.suspend(False)
        eventually(
            lambda: observed.serving() == 2 and observed.settled(), "both engines serve after the suspension"
        )
        for process in observed.processes(observed.pods("gateway")[0]):
            process.kill()
        wait_for_series("sum(mizzen_engine_lost_gateways_total) > 0")
        answered = load.codes.get(200, 0)
        eventually(lambda: load.codes.get(200, 0) > answered + 3, "the gateway answers again")
        wait_for_series("sum(mizzen_gateway_requests_total) > 5")
    eventually(lambda: observed.serving() == 2 and observed.settled(), "both engines serve without load")
    eventually(replace_engine, "a new engine's cache is filled")
    return load
