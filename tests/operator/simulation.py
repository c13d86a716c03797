"""What the operator meets in a cluster, without running a model: a node, gateways' admin API, operators.

The API server, its garbage collector and its Deployment controller are real, and so is the operator's process
with the rights that the chart gives it. Simulated are the kubelet (it binds pods and writes their status) and
the gateways (each answers `GET /admin/engines` on its pod's own address, from what the pods are just then).
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from mizzen_local.addresses import free_port
from mizzen_local.controlplane import ControlPlane
from mizzen_local.pki import write_token_kubeconfig
from mizzen_operator.chart import operator_manifests
from mizzen_operator.resources.key_secrets import connection_key_name
from pod_security import RESTRICTED

ROOT = Path(__file__).parents[2]
SYSTEM = "mizzen-system"
TICK_SECONDS = 0.03
TOKENS = ("admin.token", "next.admin.token")
SERVICE, COMPONENT, ROUTABLE = "mizzen.dev/service", "mizzen.dev/component", "mizzen.dev/routable"
VERIFIED = "mizzen.dev/verified"


@dataclass
class Behaviour:
    """How long things take, in seconds, and what goes wrong."""

    start: float = 0.2
    connect: float = 0.15
    drain: float = 0.4
    broken_models: set[str] = field(default_factory=set)
    unready: set[str] = field(default_factory=set)
    deaf_gateways: set[str] = field(default_factory=set)
    turned_away: set[str] = field(default_factory=set)
    """Namespaces whose engines the node does not take."""
    full: set[str] = field(default_factory=set)
    """Namespaces for whose engines no node has room."""
    failed: set[str] = field(default_factory=set)
    """Uids of pods whose container ended with an error."""
    unreachable: set[str] = field(default_factory=set)
    """Uids of engines that are ready, and that no gateway can reach."""
    strangers: set[str] = field(default_factory=set)
    """Uids of engines whose protocol no gateway speaks."""
    why_unreachable: str = "tcp://10.0.0.1:5555 speaks protocol 2, this gateway 3"
    """What gateways say of those."""
    dead: set[str] = field(default_factory=set)
    """Uids of pods whose node nobody hears of any more: nothing ends there, and nothing is said."""
    lost_devices: set[str] = field(default_factory=set)
    """Uids of engines that end because their device is lost."""
    broken_devices: set[str] = field(default_factory=set)
    """Namespaces whose engines find no device that works when they start."""
    mounts: dict[str, float] = field(default_factory=dict)
    """Namespaces whose Secrets change in pods that run, with the seconds that it takes; nowhere else."""
    says: dict[str, str] = field(default_factory=dict)
    """How the engines of a namespace, or of a model's source there, continue golden prompts; else "4"."""
    mute: set[str] = field(default_factory=set)
    """Namespaces whose gateways cannot ask golden prompts."""
    fetches: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What the fetch of a namespace's model shows: `progress`, an `error`, or the `result`."""
    mounting: set[str] = field(default_factory=set)
    """Namespaces whose pods begin when all Secrets are there that they mount, as with a kubelet."""
    api_keys: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What the gateways of a namespace say of their API keys; nothing elsewhere, where nobody needs one."""
    loads: dict[str, dict[str, float]] = field(default_factory=dict)
    """What the gateways of a namespace say of their load, and `pagesUsed` of each engine's 100."""


class SimulatedNode:
    """A kubelet that only writes status, and the gateways of every service."""

    def __init__(self, api: Any, plane: ControlPlane) -> None:
        self._api, self._plane = api, plane
        self.behaviour = Behaviour()
        self.pods: list[dict[str, Any]] = []
        self.lowest: dict[str, int] = {}
        self.names: list[str] = []
        self.created: dict[str, str] = {}
        """When the API server made a pod, by namespace and name; in whole seconds."""
        self._first_seen: dict[str, float] = {}
        self._ready_since: dict[str, float] = {}
        self._ending_since: dict[str, float] = {}
        self._addresses: dict[str, str] = {}
        self._written: dict[str, str] = {}
        self._servers: dict[str, ThreadingHTTPServer] = {}
        self.serves: set[str] = set()
        """Uids of the gateways that answer."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.errors: list[str] = []
        self._held: dict[str, dict[str, str]] = {}
        self._mounted_at: dict[str, float] = {}
        self.locked_out: list[str] = []
        """Engines that a gateway had no key for."""
        self.asked: list[tuple[str, str]] = []
        """Golden prompts: the pod's name and the prompt."""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(10)
        self.serves.clear()
        for server in self._servers.values():
            server.shutdown()
            server.server_close()

    def reset_lowest(self, service: str) -> None:
        """Begin to watch how few groups of a service (its namespace's only one) get requests at any time."""
        self.lowest[service] = 1 << 30

    def _run(self) -> None:
        while not self._stop.wait(TICK_SECONDS):
            try:
                self._tick()
            except Exception as error:  # the tests look at this
                self.errors.append(repr(error))

    def _tick(self) -> None:
        self.pods = self._api.list("Pod", "", COMPONENT)
        for service in list(self.lowest):
            serving = [p for p in self.pods if p["metadata"]["namespace"] == service and self._routed(p)]
            self.lowest[service] = min(self.lowest[service], len(serving))
        for pod in self.pods:
            meta = pod["metadata"]
            if meta["uid"] not in self._first_seen:
                self._first_seen[meta["uid"]] = time.monotonic()
                name = f"{meta['namespace']}/{meta['name']}"
                self.names.append(name)
                self.created[name] = meta["creationTimestamp"]
            if meta["uid"] in self.behaviour.dead:
                continue
            if "deletionTimestamp" in meta:
                self._end(pod)
            elif not pod["spec"].get("nodeName"):
                self._bind(pod)
            else:
                self._mount(pod)
                self._write_status(pod)
        gone = set(self._servers) - {pod["metadata"]["uid"] for pod in self.pods}
        for uid in gone:
            self.serves.discard(uid)
            server = self._servers.pop(uid)
            server.shutdown()
            server.server_close()
            del self._addresses[uid]

    def _mount(self, pod: dict[str, Any]) -> None:
        """Have a pod that runs find what its Secret holds now, late as a kubelet is."""
        meta = pod["metadata"]
        late = self.behaviour.mounts.get(meta["namespace"])
        last = self._mounted_at.get(meta["uid"])
        if last is not None and (late is None or time.monotonic() - last < late):
            return
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        if "mizzen-keys" not in volumes:
            return
        secret = self._api.find("Secret", meta["namespace"], volumes["mizzen-keys"]["secret"]["secretName"])
        if secret is not None:
            self._mounted_at[meta["uid"]] = time.monotonic()
            self._held[meta["uid"]] = decoded(secret)

    def _bind(self, pod: dict[str, Any]) -> None:
        meta = pod["metadata"]
        if meta["namespace"] in self.behaviour.full and meta["labels"][COMPONENT] == "engine":
            words = "0/1 nodes are available: 1 Insufficient cpu."
            unfit = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
            self._patch(pod, {"conditions": [unfit]})
            return
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": meta["name"]},
            "target": {"apiVersion": "v1", "kind": "Node", "name": "sim"},
        }
        self._quietly("POST", f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/binding", binding)

    def _end(self, pod: dict[str, Any]) -> None:
        meta = pod["metadata"]
        since = self._ending_since.setdefault(meta["uid"], time.monotonic())
        if time.monotonic() - since >= self.behaviour.drain:
            body = {"gracePeriodSeconds": 0, "preconditions": {"uid": meta["uid"]}}
            self._quietly("DELETE", f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}", body)

    def _quietly(self, method: str, path: str, body: Any, **options: Any) -> None:
        try:
            self._api.request(method, path, body, **options)
        except Exception as error:
            # The last: another pod has come meanwhile that has the name.
            gone = any(words in str(error) for words in ("being terminated", "metadata.uid"))
            if getattr(error, "code", 0) not in (404, 409) and not gone:
                raise

    def _write_status(self, pod: dict[str, Any]) -> None:
        meta, spec = pod["metadata"], pod["spec"]
        container = spec["containers"][0]["name"]
        if meta["namespace"] in self.behaviour.mounting and self._lacks_secret(pod):
            creating = {"name": container, "image": "i", "imageID": "", "restartCount": 0, "ready": False}
            creating["state"] = {"waiting": {"reason": "ContainerCreating"}}
            self._patch(pod, {"phase": "Pending", "containerStatuses": [creating]})
            return
        if container == "fetch":
            if pod["status"].get("phase") != "Succeeded":
                self._patch(pod, self._fetch_status(pod))
            return
        if container == "engine" and meta["namespace"] in self.behaviour.turned_away:
            away = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "no device is left"}
            path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/status"
            content_type = "application/strategic-merge-patch+json"
            self._quietly("PATCH", path, {"status": away}, content_type=content_type)
            return
        if meta["uid"] in self.behaviour.failed:
            ended = {"exitCode": 1, "reason": "Error", "message": "rank_died: rank 1 was killed by signal 9"}
            container_status = {"name": container, "image": spec["containers"][0]["image"], "imageID": ""}
            container_status |= {"restartCount": 0, "ready": False, "state": {"terminated": ended}}
            conditions = [{"type": kind, "status": "False"} for kind in ("ContainersReady", "Ready")]
            over = {"phase": "Failed", "conditions": conditions, "containerStatuses": [container_status]}
            path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/status"
            content_type = "application/strategic-merge-patch+json"
            self._quietly("PATCH", path, {"status": over}, content_type=content_type)
            self._ready_since.pop(meta["uid"], None)
            return
        broken = self._broken(pod)
        age = time.monotonic() - self._first_seen[meta["uid"]]
        started = meta["uid"] in self._ready_since or age >= self.behaviour.start  # it starts once
        running = started and not broken and meta["uid"] not in self.behaviour.unready
        running = running and not self._device_lost(pod)
        if container == "gateway":
            self._serve_admin(pod)
        gates = [gate["conditionType"] for gate in spec.get("readinessGates", [])]
        conditions = {c["type"]: c["status"] for c in pod["status"].get("conditions", [])}
        ready = running and all(conditions.get(gate) == "True" for gate in gates)
        if running:
            self._ready_since.setdefault(meta["uid"], time.monotonic())
        else:
            self._ready_since.pop(meta["uid"], None)
        status = {
            "phase": "Running",
            "podIP": self._address(meta["uid"]),
            "conditions": [
                {"type": "PodScheduled", "status": "True"},
                {"type": "ContainersReady", "status": str(running)},
                {"type": "Ready", "status": str(ready)},
            ],
            "containerStatuses": [self._container_status(pod, running, broken)],
        }
        self._patch(pod, status)

    def _patch(self, pod: dict[str, Any], status: dict[str, Any]) -> None:
        meta, text = pod["metadata"], json.dumps(status)
        if self._written.get(meta["uid"]) != text:
            self._quietly(
                "PATCH",
                f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/status",
                {"metadata": {"uid": meta["uid"]}, "status": status},
                content_type="application/strategic-merge-patch+json",
            )
            self._written[meta["uid"]] = text

    def _fetch_status(self, pod: dict[str, Any]) -> dict[str, Any]:
        meta = pod["metadata"]
        told = self.behaviour.fetches.get(meta["namespace"], {})
        self._serve_progress(meta)
        container: dict[str, Any] = {"name": "fetch", "image": "i", "imageID": "", "restartCount": 0}
        phase, state = "Running", {"state": {"running": {}}, "ready": True}
        if "result" in told:
            ended = {"exitCode": 0, "reason": "Completed", "message": json.dumps(told["result"])}
            phase, state = "Succeeded", {"state": {"terminated": ended}, "ready": False}
        elif "error" in told:
            ended = {"exitCode": 1, "reason": "Error", "message": told["error"]}
            waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
            state = {"state": waiting, "lastState": {"terminated": ended}, "ready": False}
        conditions = [{"type": "PodScheduled", "status": "True"}]
        address = self._address(meta["uid"])
        return {
            "phase": phase,
            "podIP": address,
            "conditions": conditions,
            "containerStatuses": [{**container, **state}],
        }

    def _serve_progress(self, meta: dict[str, Any]) -> None:
        if meta["uid"] in self._servers:
            return
        node = self

        class Progress(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                told = node.behaviour.fetches.get(meta["namespace"], {})
                self.send_response(200 if "progress" in told else 503)
                self.end_headers()
                self.wfile.write(json.dumps(told.get("progress", {})).encode())

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer((self._address(meta["uid"]), 8082), Progress)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
        self._servers[meta["uid"]] = server

    def _lacks_secret(self, pod: dict[str, Any]) -> bool:
        volumes = [volume["secret"] for volume in pod["spec"]["volumes"] if "secret" in volume]
        names = [one["secretName"] for one in volumes if not one.get("optional")]
        namespace = pod["metadata"]["namespace"]
        return any(self._api.find("Secret", namespace, name) is None for name in names)

    def _broken(self, pod: dict[str, Any]) -> bool:
        return bool(self.behaviour.broken_models & set(pod["spec"]["containers"][0].get("args", [])))

    def _device_lost(self, pod: dict[str, Any]) -> bool:
        meta, name = pod["metadata"], pod["spec"]["containers"][0]["name"]
        broken = meta["namespace"] in self.behaviour.broken_devices and name == "engine"
        return broken or meta["uid"] in self.behaviour.lost_devices

    def _container_status(self, pod: dict[str, Any], running: bool, broken: bool) -> dict[str, Any]:
        spec = pod["spec"]["containers"][0]
        status = {"name": spec["name"], "image": spec["image"], "imageID": "", "ready": running}
        if self._device_lost(pod):
            words = "device_lost: rank 0 failed: AcceleratorError: CUDA error: uncorrectable ECC error"
            ended = {"exitCode": 3, "reason": "Error", "message": words}
            return {**status, "restartCount": 0, "state": {"terminated": ended}}
        if broken:
            words = "rank_failed: rank 0 failed: ConfigError: no config.json in the model's folder"
            ended = {"exitCode": 1, "reason": "Error", "message": words}
            return {
                **status,
                "restartCount": 3,
                "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
                "lastState": {"terminated": ended},
            }
        return {**status, "restartCount": 0, "state": {"running": {}}}

    def _address(self, uid: str) -> str:
        if uid not in self._addresses:
            used = set(self._addresses.values())
            free = (self._plane.addresses.pod(number) for number in range(1020))
            self._addresses[uid] = next(address for address in free if address not in used)
        return self._addresses[uid]

    def _connected(self, pod: dict[str, Any]) -> bool:
        since = self._ready_since.get(pod["metadata"]["uid"])
        if pod["metadata"]["uid"] in self.behaviour.dead or self._device_lost(pod):
            return False
        reachable = pod["metadata"]["uid"] not in self.behaviour.unreachable | self.behaviour.strangers
        return reachable and since is not None and time.monotonic() - since >= self.behaviour.connect

    def _routed(self, pod: dict[str, Any]) -> bool:
        """Whether gateways send requests to an engine's pod."""
        meta = pod["metadata"]
        engine = _leads(pod)
        if self._gated(pod) and not self._verified(pod):
            return False
        return engine and "deletionTimestamp" not in meta and self._connected(pod)

    def _gated(self, pod: dict[str, Any]) -> bool:
        return {"conditionType": VERIFIED} in pod["spec"].get("readinessGates", [])

    def _verified(self, pod: dict[str, Any]) -> bool:
        conditions = pod["status"].get("conditions", [])
        return any(c["type"] == VERIFIED and c["status"] == "True" for c in conditions)

    def _state(self, pod: dict[str, Any]) -> str:
        if not self._connected(pod):
            return "connecting"
        return "serving" if not self._gated(pod) or self._verified(pod) else "verifying"

    def _problem(self, pod: dict[str, Any]) -> str:
        """What a gateway says is wrong with an engine."""
        lost = pod["metadata"]["uid"] in self.behaviour.unreachable | self.behaviour.strangers
        return self.behaviour.why_unreachable if lost else ""

    def answer(self, namespace: str, question: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """What a gateway answers to a golden prompt."""
        pods = [p for p in self.pods if p["metadata"]["uid"] == question["uid"]]
        if namespace in self.behaviour.mute:
            return 503, {"error": {"message": "the engine is lost"}}
        if not pods or self._state(pods[0]) != "verifying":
            return 409, {"error": {"message": "golden prompts are for one that is verifying"}}
        self.asked.append((pods[0]["metadata"]["name"], question["prompt"]))
        says = self.behaviour.says
        arguments = pods[0]["spec"]["containers"][0]["args"]
        text = next((says[one] for one in (*arguments, namespace) if one in says), "4")
        return 200, {"text": text, "finish": "length", "promptTokens": 3, "outputTokens": 1, "seconds": 0.0}

    def _serve_admin(self, pod: dict[str, Any]) -> None:
        meta = pod["metadata"]
        if meta["uid"] in self._servers:
            return
        own = meta["labels"].get(SERVICE, "")
        keys = f"{own}-gateway-keys" if own else "mizzen-shared"
        secret = self._api.find("Secret", meta["namespace"], keys)
        if secret is None:
            return
        self._held.setdefault(meta["uid"], decoded(secret))
        node = self

        class Admin(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path, _, query = self.path.partition("?")
                held = node.held(meta["uid"])
                tokens = [f"Bearer {held[name]}" for name in TOKENS if name in held]
                if self.headers["Authorization"] not in tokens or path != "/admin/engines":
                    self.send_response(401)
                    self.end_headers()
                    return
                if meta["namespace"] in node.behaviour.deaf_gateways:
                    self.send_response(500)
                    self.end_headers()
                    return
                asked = dict(urllib.parse.parse_qsl(query))
                service = asked["service"]
                deadline = time.monotonic() + float(asked.get("wait", 0))
                while True:
                    known = [service] if own == service or (not own and node.shares(meta, service)) else []
                    engines = [engine for one in known for engine in node.engines(meta, one)]
                    there = [key for one in known for key in node.keys_known(meta, one)]
                    load = node.behaviour.loads.get(meta["namespace"], {})
                    waits = load.get("waiting", 0) > 0
                    api_keys = node.behaviour.api_keys.get(meta["namespace"])
                    version = str(zlib.crc32(json.dumps([engines, waits, there, api_keys]).encode()))
                    deaf = meta["namespace"] in node.behaviour.deaf_gateways
                    ended = deaf or meta["uid"] not in node.serves
                    if version != asked.get("version") or ended or time.monotonic() >= deadline:
                        break
                    time.sleep(TICK_SECONDS)
                table = {
                    "keys": there,
                    "apiKeys": api_keys,
                    "synced": True,
                    "version": version,
                    "waiting": 0,
                    "queued": 0,
                    "inFlight": 0,
                }
                for engine in engines:
                    engine["stats"] = {"running": 0, "waiting": 0, "waitingTokens": 0, "pagesTotal": 100}
                    engine["stats"]["pagesUsed"] = load.get("pagesUsed", 0)
                body = json.dumps({**table, "idleSeconds": 0.0, **load, "engines": engines})
                with contextlib.suppress(ConnectionError):  # whoever waited may have gone
                    self.send_response(200)
                    self.send_header("Content-Type", "application/json")
                    self.end_headers()
                    self.wfile.write(body.encode())

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status, answer, held = 401, dict[str, Any](), node.held(meta["uid"])
                tokens = [f"Bearer {held[name]}" for name in TOKENS if name in held]
                if self.headers["Authorization"] in tokens and self.path == "/admin/verify":
                    status, answer = node.answer(meta["namespace"], json.loads(body))
                with contextlib.suppress(ConnectionError):
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.end_headers()
                    self.wfile.write(json.dumps(answer).encode())

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer((self._address(meta["uid"]), 8001), Admin)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
        self._servers[meta["uid"]] = server
        self.serves.add(meta["uid"])

    def shares(self, meta: dict[str, Any], service: str) -> bool:
        """Whether a shared gateway knows a service and its engines' key, by the operator's list."""
        found = self._api.find("ConfigMap", meta["namespace"], "mizzen-shared")
        listed = json.loads(found["data"]["services.json"])["services"] if found else []
        return any(one["name"] == service and "enginePublicKey" in one for one in listed)

    def held(self, uid: str) -> dict[str, str]:
        """What a pod finds in the Secret that it mounts."""
        return self._held.get(uid, {})

    def keys_known(self, gateway: dict[str, Any], service: str) -> list[str]:
        """Names of the keys that a gateway could use with a service's engines, the newest first."""
        held = self.held(gateway["uid"])
        engine = public(held, "engine")
        if gateway["labels"].get(SERVICE) != service:
            found = self._api.find("ConfigMap", gateway["namespace"], "mizzen-shared")
            listed = json.loads(found["data"]["services.json"])["services"] if found else []
            entry = next((one for one in listed if one["name"] == service), {})
            told = (entry.get(name) for name in ("nextEnginePublicKey", "enginePublicKey"))
            engine = [key for key in told if key]
        return [connection_key_name(one, two) for one in engine for two in public(held, "gateway")]

    def _keys_used(self, known: list[str], pod: dict[str, Any]) -> list[str]:
        """The newest keys that both a gateway and an engine have."""
        held = self.held(pod["metadata"]["uid"])
        theirs = {connection_key_name(one, two) for one in public(held, "engine") for two in public(held, "gateway")}
        common = [name for name in known if name in theirs]
        if not common and pod["metadata"]["uid"] in self._ready_since:
            self.locked_out.append(pod["metadata"]["name"])
        return common[:1]

    def engines(self, gateway: dict[str, Any], service: str) -> list[dict[str, Any]]:
        """What a gateway's admin API says."""
        namespace = gateway["namespace"]
        pods = [p for p in self.pods if p["metadata"]["namespace"] == namespace]
        known = self.keys_known(gateway, service)
        return [
            {
                "name": pod["metadata"]["name"],
                "uid": pod["metadata"]["uid"],
                "state": self._state(pod),
                "problem": self._problem(pod),
                "otherProtocol": pod["metadata"]["uid"] in self.behaviour.strangers,
                "keys": self._keys_used(known, pod),
                "revision": pod["metadata"]["labels"]["mizzen.dev/revision"],
                "requests": 0,
            }
            for pod in pods
            if pod["metadata"]["labels"].get(SERVICE) == service
            and _leads(pod)
            and "deletionTimestamp" not in pod["metadata"]
        ]


def decoded(secret: dict[str, Any]) -> dict[str, str]:
    """What a mounted Secret's files hold."""
    return {name: base64.b64decode(value).decode() for name, value in secret["data"].items()}


def public(held: dict[str, str], side: str) -> list[str]:
    """The public keys of a side in a mounted Secret, the newest first."""
    return [held[name] for name in (f"next.{side}.public", f"{side}.public") if name in held]


def _leads(pod: dict[str, Any]) -> bool:
    """Whether a pod is one that gateways find: an engine with the wire's port."""
    ports = [port["name"] for port in pod["spec"]["containers"][0].get("ports", ())]
    return pod["metadata"]["labels"][COMPONENT] == "engine" and "wire" in ports


class Operators:
    """Operator processes with the rights of the chart's ServiceAccount."""

    def __init__(self, api: Any, plane: ControlPlane, folder: Path) -> None:
        self._api, self._plane, self._folder = api, plane, folder
        self._running: list[tuple[subprocess.Popen[bytes], str, int]] = []
        self._count = 0

    def install(self) -> None:
        """Apply the chart's manifests, without the Deployment, and get a token."""
        paths = {
            "ServiceAccount": f"/api/v1/namespaces/{SYSTEM}/serviceaccounts",
            "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
            "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
            "Role": f"/apis/rbac.authorization.k8s.io/v1/namespaces/{SYSTEM}/roles",
            "RoleBinding": f"/apis/rbac.authorization.k8s.io/v1/namespaces/{SYSTEM}/rolebindings",
        }
        namespace = {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": SYSTEM, "labels": RESTRICTED},
        }
        self._api.apply_any(namespace, "/api/v1/namespaces")
        for manifest in operator_manifests(ROOT / "charts/mizzen", {}, SYSTEM, "mizzen"):
            if manifest["kind"] in paths:
                self._api.apply_any(manifest, paths[manifest["kind"]])
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        account = f"/api/v1/namespaces/{SYSTEM}/serviceaccounts/mizzen-operator/token"
        token = self._folder / "operator.token"
        token.write_text(self._api.request("POST", account, request)["status"]["token"])
        self.kubeconfig = self._config("operator.kubeconfig", self._plane.server)

    def _config(self, name: str, server: str) -> Path:
        return write_token_kubeconfig(
            self._folder / name,
            server=server,
            authority=self._plane.authority,
            namespace=SYSTEM,
            token_file=self._folder / "operator.token",
        )

    def start(self, *options: str, server: str = "") -> str:
        """Start one more, perhaps with another way to the API server, and return its identity."""
        self._count += 1
        identity, port = f"operator-{self._count}", free_port(self._plane.addresses.host)
        command = [sys.executable, "-m", "mizzen_operator.main"]
        fixed = {
            "identity": identity,
            "lease-namespace": SYSTEM,
            "health-host": self._plane.addresses.host,
            "health-port": str(port),
            "recheck-seconds": "1",
        }
        arguments = [item for name, value in fixed.items() for item in (f"--{name}", value)]
        config = self._config(f"{identity}.kubeconfig", server) if server else self.kubeconfig
        with (self._folder / f"{identity}.log").open("wb") as log:
            process = subprocess.Popen(
                [*command, *arguments, *options],
                stdout=log,
                stderr=log,
                env={**os.environ, "KUBECONFIG": str(config)},
            )
        self._running.append((process, identity, port))
        return identity

    def leader(self) -> str:
        """Identity in the Lease; empty when nobody holds it."""
        lease = self._api.find("Lease", SYSTEM, "mizzen-operator")
        return lease["spec"].get("holderIdentity", "") if lease else ""

    def leads(self) -> bool:
        """Whether one of the running ones leads."""
        return self.leader() in {identity for process, identity, _ in self._running if process.poll() is None}

    def kill(self, identity: str, number: int = signal.SIGKILL) -> int:
        """Send a signal and return the exit code."""
        process = next(p for p, name, _ in self._running if name == identity)
        process.send_signal(number)
        code = process.wait(60)
        self._running = [entry for entry in self._running if entry[1] != identity]
        return code

    def answers(self, identity: str) -> bool:
        """Whether one has started: it leads, or waits for the Lease."""
        try:
            return self.http(identity, "/healthz") == "ok\n"
        except OSError:
            return False

    def http(self, identity: str, path: str) -> str:
        port = next(port for _, name, port in self._running if name == identity)
        url = f"http://{self._plane.addresses.host}:{port}{path}"
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.read().decode()

    def log(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self._folder.glob("operator-*.log")))

    def stop(self, wait: Callable[..., Any]) -> None:
        for process, _, _ in self._running:
            process.terminate()
        wait(lambda: all(process.poll() is not None for process, _, _ in self._running))
