# SPDX-License-Identifier: Apache-2.0
"""Simulated gateways, which report the engines of the current pods through the gateways' admin API.

Each gateway listens on the address of its pod.
"""

from __future__ import annotations

import base64
import contextlib
import json
import threading
import time
import urllib.parse
import urllib.request
import zlib
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mizzen_operator.resources.key_secrets import connection_key_name

TICK_SECONDS = 0.03
TOKENS = ("admin.token", "next.admin.token")
SERVICE, COMPONENT, ROUTABLE = "mizzen.dev/service", "mizzen.dev/component", "mizzen.dev/routable"
VERIFIED = "mizzen.dev/verified"


@dataclass
class Behaviour:
    """Durations (in seconds) of simulated steps, and faults to inject."""

    start: float = 0.2
    connect: float = 0.15
    drain: float = 0.4
    broken_models: set[str] = field(default_factory=set)
    unready: set[str] = field(default_factory=set)
    failing_gateways: set[str] = field(default_factory=set)
    rejected: set[str] = field(default_factory=set)
    """Namespaces whose engines the node rejects."""
    unschedulable: set[str] = field(default_factory=set)
    """Namespaces whose engines are unschedulable."""
    sidecars: set[str] = field(default_factory=set)
    """Namespaces in which admission adds an ordinary sidecar to each pod; it never ends by itself."""
    failed: set[str] = field(default_factory=set)
    """Uids of pods whose container ended with an error."""
    unreachable: set[str] = field(default_factory=set)
    """Uids of ready engines that no gateway can reach."""
    protocol_mismatches: set[str] = field(default_factory=set)
    """Uids of engines whose protocol no gateway speaks."""
    why_unreachable: str = "tcp://10.0.0.1:5555 speaks protocol 2, this gateway 3"
    """The gateways' routing error for engines that they cannot reach."""
    dead: set[str] = field(default_factory=set)
    """Uids of pods on a lost node, which do not end and do not report their status."""
    lost_devices: set[str] = field(default_factory=set)
    """Uids of engines that end because they have lost their device."""
    broken_devices: set[str] = field(default_factory=set)
    """Namespaces whose engines find no working device at their start."""
    mounts: dict[str, float] = field(default_factory=dict)
    """Seconds until running pods see a changed Secret, by namespace; in other namespaces, they never do."""
    answers: dict[str, str] = field(default_factory=dict)
    """Answers to golden prompts, by namespace or model source; "4" by default."""
    no_golden_prompts: set[str] = field(default_factory=set)
    """Namespaces whose gateways answer 503 to golden prompts."""
    fetches: dict[str, dict[str, Any]] = field(default_factory=dict)
    """State of the model fetch in each namespace: `progress`, an `error`, or the `result`."""
    mounting: set[str] = field(default_factory=set)
    """Namespaces whose pods start only once the Secrets that they mount exist, as with a kubelet."""
    unmounted: set[str] = field(default_factory=set)
    """Namespaces whose engines wait for their volumes."""
    api_keys: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The gateways' report on API keys, by namespace; no report by default."""
    loads: dict[str, dict[str, float]] = field(default_factory=dict)
    """Load that gateways report, by namespace; `pagesUsed` counts the used pages of an engine's 100 pages."""


class SimulatedGateways:
    """Simulates the gateways of all services; the subclass `SimulatedNode` also simulates a kubelet."""

    _api: Any
    behaviour: Behaviour
    pods: list[dict[str, Any]]
    serves: set[str]
    golden_prompts: list[tuple[str, str]]
    keyless_engines: list[str]
    _ready_since: dict[str, float]
    _servers: dict[str, ThreadingHTTPServer]
    _held: dict[str, dict[str, str]]

    def _device_lost(self, pod: dict[str, Any]) -> bool:
        raise NotImplementedError

    def _address(self, uid: str) -> str:
        raise NotImplementedError

    def _connected(self, pod: dict[str, Any]) -> bool:
        since = self._ready_since.get(pod["metadata"]["uid"])
        if pod["metadata"]["uid"] in self.behaviour.dead or self._device_lost(pod):
            return False
        reachable = (
            pod["metadata"]["uid"] not in self.behaviour.unreachable | self.behaviour.protocol_mismatches
        )
        return reachable and since is not None and time.monotonic() - since >= self.behaviour.connect

    def _routed(self, pod: dict[str, Any]) -> bool:
        """Return whether gateways send requests to an engine pod."""
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
        """Return a gateway's routing error for an engine; empty if the engine is reachable."""
        lost = pod["metadata"]["uid"] in self.behaviour.unreachable | self.behaviour.protocol_mismatches
        return self.behaviour.why_unreachable if lost else ""

    def answer(self, namespace: str, question: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return a gateway's answer to a golden prompt."""
        pods = [p for p in self.pods if p["metadata"]["uid"] == question["uid"]]
        if namespace in self.behaviour.no_golden_prompts:
            return 503, {"error": {"message": "the engine is lost"}}
        if not pods or self._state(pods[0]) != "verifying":
            return 409, {"error": {"message": "golden prompts need an engine that awaits verification"}}
        self.golden_prompts.append((pods[0]["metadata"]["name"], question["prompt"]))
        answers = self.behaviour.answers
        arguments = pods[0]["spec"]["containers"][0]["args"]
        text = next((answers[key] for key in (*arguments, namespace) if key in answers), "4")
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
                if meta["namespace"] in node.behaviour.failing_gateways:
                    self.send_response(500)
                    self.end_headers()
                    return
                parameters = dict(urllib.parse.parse_qsl(query))
                service = parameters["service"]
                deadline = time.monotonic() + float(parameters.get("wait", 0))
                while True:
                    known = own == service or (not own and node.shares(meta, service))
                    engines = node.engines(meta, service) if known else []
                    key_names = node.known_keys(meta, service) if known else []
                    load = node.behaviour.loads.get(meta["namespace"], {})
                    waits = load.get("waiting", 0) > 0
                    api_keys = node.behaviour.api_keys.get(meta["namespace"])
                    version = str(zlib.crc32(json.dumps([engines, waits, key_names, api_keys]).encode()))
                    deaf = meta["namespace"] in node.behaviour.failing_gateways
                    ended = deaf or meta["uid"] not in node.serves
                    if version != parameters.get("version") or ended or time.monotonic() >= deadline:
                        break
                    time.sleep(TICK_SECONDS)
                table = {
                    "keys": key_names,
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
                with contextlib.suppress(ConnectionError):  # the client may have disconnected
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
        """Return whether a shared gateway's ConfigMap lists a service with its engines' public key."""
        config_map = self._api.find("ConfigMap", meta["namespace"], "mizzen-shared")
        listed = json.loads(config_map["data"]["services.json"])["services"] if config_map else []
        return any(entry["name"] == service and "enginePublicKey" in entry for entry in listed)

    def held(self, uid: str) -> dict[str, str]:
        """Return the contents of the Secret that a pod mounts."""
        return self._held.get(uid, {})

    def known_keys(self, gateway: dict[str, Any], service: str) -> list[str]:
        """Return the names of the keys that a gateway has for a service's engines, the newest first."""
        held = self.held(gateway["uid"])
        engine = public(held, "engine")
        if gateway["labels"].get(SERVICE) != service:
            config_map = self._api.find("ConfigMap", gateway["namespace"], "mizzen-shared")
            listed = json.loads(config_map["data"]["services.json"])["services"] if config_map else []
            entry = next((entry for entry in listed if entry["name"] == service), {})
            public_keys = (entry.get(name) for name in ("nextEnginePublicKey", "enginePublicKey"))
            engine = [key for key in public_keys if key]
        return [connection_key_name(key, own) for key in engine for own in public(held, "gateway")]

    def _used_keys(self, known: list[str], pod: dict[str, Any]) -> list[str]:
        """Return a list of at most one name: that of the newest key that a gateway and an engine share."""
        held = self.held(pod["metadata"]["uid"])
        theirs = {
            connection_key_name(own, gateway)
            for own in public(held, "engine")
            for gateway in public(held, "gateway")
        }
        common = [name for name in known if name in theirs]
        if not common and pod["metadata"]["uid"] in self._ready_since:
            self.keyless_engines.append(pod["metadata"]["name"])
        return common[:1]

    def engines(self, gateway: dict[str, Any], service: str) -> list[dict[str, Any]]:
        """Return a service's engines as a gateway's admin API reports them."""
        namespace = gateway["namespace"]
        pods = [p for p in self.pods if p["metadata"]["namespace"] == namespace]
        known = self.known_keys(gateway, service)
        return [
            {
                "name": pod["metadata"]["name"],
                "uid": pod["metadata"]["uid"],
                "state": self._state(pod),
                "problem": self._problem(pod),
                "otherProtocol": pod["metadata"]["uid"] in self.behaviour.protocol_mismatches,
                "keys": self._used_keys(known, pod),
                "revision": pod["metadata"]["labels"]["mizzen.dev/revision"],
                "requests": 0,
            }
            for pod in pods
            if pod["metadata"]["labels"].get(SERVICE) == service
            and _leads(pod)
            and "deletionTimestamp" not in pod["metadata"]
        ]


def decoded(secret: dict[str, Any]) -> dict[str, str]:
    """Return the decoded values of a Secret, by key."""
    return {name: base64.b64decode(value).decode() for name, value in secret["data"].items()}


def public(held: dict[str, str], side: str) -> list[str]:
    """Return the public keys of a `side` (`engine` or `gateway`) in a mounted Secret, the newest first."""
    return [held[name] for name in (f"next.{side}.public", f"{side}.public") if name in held]


def _leads(pod: dict[str, Any]) -> bool:
    """Return whether gateways discover a pod: it must be an engine pod with the wire port."""
    ports = [port["name"] for port in pod["spec"]["containers"][0].get("ports", ())]
    return pod["metadata"]["labels"][COMPONENT] == "engine" and "wire" in ports
