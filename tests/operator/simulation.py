# SPDX-License-Identifier: Apache-2.0
"""A simulated node: it writes the status of pods as a kubelet does, and runs the gateways of all services.

The API server, its garbage collector and its Deployment controller are real.
"""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from simulated_gateways import Behaviour, SimulatedGateways, decoded

from mizzen_local.controlplane import ControlPlane

TICK_SECONDS = 0.03
SERVICE, COMPONENT, ROUTABLE = "mizzen.dev/service", "mizzen.dev/component", "mizzen.dev/routable"


class SimulatedNode(SimulatedGateways):
    """The gateways of all services, and a simulated kubelet, which only writes the status of pods."""

    def __init__(self, api: Any, plane: ControlPlane) -> None:
        self._api, self._plane = api, plane
        self.behaviour = Behaviour()
        self.pods: list[dict[str, Any]] = []
        self.lowest: dict[str, int] = {}
        self.names: list[str] = []
        self.created: dict[str, str] = {}
        """Creation timestamp of each pod, precise to the second, by `NAMESPACE/NAME`."""
        self._first_seen: dict[str, float] = {}
        self._ready_since: dict[str, float] = {}
        self._ending_since: dict[str, float] = {}
        self._addresses: dict[str, str] = {}
        self._written: dict[str, str] = {}
        self._servers: dict[str, ThreadingHTTPServer] = {}
        self.serves: set[str] = set()
        """Uids of the gateways that serve their admin API."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.errors: list[str] = []
        self._held: dict[str, dict[str, str]] = {}
        self._mounted_at: dict[str, float] = {}
        self.keyless_engines: list[str] = []
        """Names of ready engines for which a gateway had no key."""
        self.golden_prompts: list[tuple[str, str]] = []
        """Answered golden prompts: name of the pod, and text of the prompt."""

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
        """Restart the recording of the lowest number of serving groups in a namespace (`service`)."""
        self.lowest[service] = 1 << 30

    def _run(self) -> None:
        while not self._stop.wait(TICK_SECONDS):
            try:
                self._tick()
            except Exception as error:  # the tests check that there are no errors
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
        """Update a running pod's mounted Secret after a delay, as a kubelet does."""
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
        if meta["namespace"] in self.behaviour.unschedulable and meta["labels"][COMPONENT] == "engine":
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
            # A message that names metadata.uid means that another pod has the name by now.
            gone = any(words in str(error) for words in ("being terminated", "metadata.uid"))
            if getattr(error, "code", 0) not in (404, 409) and not gone:
                raise

    def _write_status(self, pod: dict[str, Any]) -> None:
        meta, spec = pod["metadata"], pod["spec"]
        container = spec["containers"][0]["name"]
        unmounted = container == "engine" and meta["namespace"] in self.behaviour.unmounted
        if unmounted or (meta["namespace"] in self.behaviour.mounting and self._lacks_secret(pod)):
            creating = {"name": container, "image": "i", "imageID": "", "restartCount": 0, "ready": False}
            creating["state"] = {"waiting": {"reason": "ContainerCreating"}}
            sandbox = {"type": "PodReadyToStartContainers", "status": "False"}
            self._patch(pod, {"phase": "Pending", "containerStatuses": [creating], "conditions": [sandbox]})
            return
        if container == "fetch":
            if pod["status"].get("phase") != "Succeeded":
                self._patch(pod, self._fetch_status(pod))
            return
        if container == "engine" and meta["namespace"] in self.behaviour.rejected:
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
            statuses = [container_status, *self._sidecars(meta)]
            phase = "Running" if len(statuses) > 1 else "Failed"
            over = {"phase": phase, "conditions": conditions, "containerStatuses": statuses}
            path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/status"
            content_type = "application/strategic-merge-patch+json"
            self._quietly("PATCH", path, {"status": over}, content_type=content_type)
            self._ready_since.pop(meta["uid"], None)
            return
        broken = self._broken(pod)
        age = time.monotonic() - self._first_seen[meta["uid"]]
        # A restarted container does not wait again.
        started = meta["uid"] in self._ready_since or age >= self.behaviour.start
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
            "containerStatuses": [self._container_status(pod, running, broken), *self._sidecars(meta)],
        }
        self._patch(pod, status)

    def _sidecars(self, meta: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the statuses of the containers that admission has added to a pod."""
        if meta["namespace"] not in self.behaviour.sidecars:
            return []
        sidecar = {"name": "proxy", "image": "i", "imageID": "", "restartCount": 0, "ready": True}
        return [{**sidecar, "state": {"running": {}}}]

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
        fetch = self.behaviour.fetches.get(meta["namespace"], {})
        self._serve_progress(meta)
        container: dict[str, Any] = {"name": "fetch", "image": "i", "imageID": "", "restartCount": 0}
        phase, state = "Running", {"state": {"running": {}}, "ready": True}
        if "result" in fetch:
            ended = {"exitCode": 0, "reason": "Completed", "message": json.dumps(fetch["result"])}
            phase = "Running" if self._sidecars(meta) else "Succeeded"
            state = {"state": {"terminated": ended}, "ready": False}
        elif "error" in fetch:
            ended = {"exitCode": 1, "reason": "Error", "message": fetch["error"]}
            waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
            state = {"state": waiting, "lastState": {"terminated": ended}, "ready": False}
        conditions = [{"type": "PodScheduled", "status": "True"}]
        address = self._address(meta["uid"])
        return {
            "phase": phase,
            "podIP": address,
            "conditions": conditions,
            "containerStatuses": [{**container, **state}, *self._sidecars(meta)],
        }

    def _serve_progress(self, meta: dict[str, Any]) -> None:
        if meta["uid"] in self._servers:
            return
        node = self

        class Progress(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fetch = node.behaviour.fetches.get(meta["namespace"], {})
                self.send_response(200 if "progress" in fetch else 503)
                self.end_headers()
                self.wfile.write(json.dumps(fetch.get("progress", {})).encode())

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer((self._address(meta["uid"]), 8082), Progress)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
        self._servers[meta["uid"]] = server

    def _lacks_secret(self, pod: dict[str, Any]) -> bool:
        volumes = [volume["secret"] for volume in pod["spec"]["volumes"] if "secret" in volume]
        names = [entry["secretName"] for entry in volumes if not entry.get("optional")]
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
            free = (self._plane.addresses.pod_address(number) for number in range(1020))
            self._addresses[uid] = next(address for address in free if address not in used)
        return self._addresses[uid]
