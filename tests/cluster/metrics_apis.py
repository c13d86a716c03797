"""What scales services from outside, but for Prometheus and Kubernetes' controller, which are real.

`MetricsApi` answers the HPA controller on the aggregated APIs `custom.metrics.k8s.io` and
`external.metrics.k8s.io` from Prometheus, by a rule of prometheus-adapter. `Keda` does what KEDA does with a
ScaledObject: it makes an HPA of external metrics, and itself scales from zero and to zero.
"""

from __future__ import annotations

import base64
import json
import re
import ssl
import threading
import urllib.parse
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import monotonic
from typing import Any

from mizzen_local.pki import Authority

SERVER = "metrics-apis"
CUSTOM, EXTERNAL = "custom.metrics.k8s.io/v1beta2", "external.metrics.k8s.io/v1beta1"
ASKED = re.compile(
    r"/apis/(?P<group>[a-z0-9.]+/v1beta[12])(/namespaces/(?P<namespace>[^/]+)(?P<pods>/pods/\*)?/(?P<metric>[^/]+))?"
)

Query = Callable[[str], list[dict[str, Any]]]


class MetricsApi:
    """Serves both APIs for a cluster, from Prometheus."""

    def __init__(self, cluster: Any, query: Query, rule: Mapping[str, Any], folder: Path) -> None:
        """Serve.

        Args:
            cluster: where the APIs are registered.
            query: an instant query of Prometheus.
            rule: of prometheus-adapter, for custom metrics of pods.
            folder: for certificates.
        """
        self._cluster, self._query, self._rule = cluster, query, rule
        self.external: dict[str, str] = {}
        """Queries of external metrics, by the metrics' names."""
        self.asked: list[str] = []
        """Metrics that the controller asked for."""
        authority = Authority(folder / "pki")
        pair = authority.issue(SERVER, SERVER, hosts=[f"{SERVER}.default.svc"])
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pair.certificate, pair.key)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self._register(authority.pair.certificate.read_bytes())

    def close(self) -> None:
        """Take both APIs back."""
        for name in (CUSTOM, EXTERNAL):
            group, version = name.split("/")
            self._cluster.kubectl("delete", "apiservice", f"{version}.{group}", "--wait=true")
        self._cluster.kubectl("delete", "service", SERVER)
        self._server.shutdown()
        self._server.server_close()

    def _register(self, authority: bytes) -> None:
        """Lead the API server here: to a name outside of the cluster, for there is no pod behind it."""
        front = {"type": "ExternalName", "externalName": "localhost"}
        objects = [{"apiVersion": "v1", "kind": "Service", "metadata": {"name": SERVER}, "spec": front}]
        for name in (CUSTOM, EXTERNAL):
            group, version = name.split("/")
            spec = {
                "group": group,
                "version": version,
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
                "service": {"name": SERVER, "namespace": "default", "port": self._server.server_port},
                "caBundle": base64.b64encode(authority).decode(),
            }
            meta = {"name": f"{version}.{group}"}
            objects.append(
                {
                    "apiVersion": "apiregistration.k8s.io/v1",
                    "kind": "APIService",
                    "metadata": meta,
                    "spec": spec,
                }
            )
        self._cluster.apply(*objects)
        names = [one["metadata"]["name"] for one in objects[1:]]
        for name in names:
            self._cluster.kubectl("wait", f"apiservice/{name}", "--for=condition=Available", "--timeout=60s")

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                url = urllib.parse.urlsplit(self.path)
                body = api.answer(url.path, dict(urllib.parse.parse_qsl(url.query)))
                self.send_response(404 if body is None else 200)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(json.dumps(body or {}).encode())

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    def answer(self, path: str, asked: Mapping[str, str]) -> dict[str, Any] | None:
        """The answer to a GET; None for what is not there."""
        found = ASKED.fullmatch(urllib.parse.unquote(path))
        if found is None or found["group"] not in (CUSTOM, EXTERNAL):
            return None
        if not found["metric"]:
            return {
                "kind": "APIResourceList",
                "apiVersion": "v1",
                "groupVersion": found["group"],
                **self._known(),
            }
        self.asked.append(found["metric"])
        items = (self._of_pods if found["pods"] else self._outside)(
            found["namespace"], found["metric"], asked
        )
        kind = "MetricValueList" if found["pods"] else "ExternalMetricValueList"
        return {"kind": kind, "apiVersion": found["group"], "metadata": {}, "items": items}

    def _known(self) -> dict[str, Any]:
        names = {one["metric"]["__name__"] for one in self._query(self._rule["seriesQuery"])}
        common = {"singularName": "", "namespaced": True, "verbs": ["get"]}
        pods = [{**common, "name": f"pods/{name}", "kind": "MetricValueList"} for name in sorted(names)]
        return {"resources": pods or [{**common, "name": "none", "kind": "ExternalMetricValueList"}]}

    def _of_pods(self, namespace: str, metric: str, asked: Mapping[str, str]) -> list[dict[str, Any]]:
        """One value for each pod that the selector finds, as prometheus-adapter asks for it."""
        pods = self._cluster.get("pods", "-n", namespace, "-l", asked["labelSelector"])["items"]
        names = "|".join(pod["metadata"]["name"] for pod in pods)
        expr = self._rule["metricsQuery"]
        for placeholder, text in {
            "<<.Series>>": metric,
            "<<.LabelMatchers>>": f'namespace="{namespace}",pod=~"{names}"',
            "<<.GroupBy>>": "pod",
        }.items():
            expr = expr.replace(placeholder, text)
        return [
            {
                "describedObject": {
                    "kind": "Pod",
                    "namespace": namespace,
                    "name": one["metric"]["pod"],
                    "apiVersion": "/v1",
                },
                "metric": {"name": metric},
                "timestamp": stamp(),
                "value": quantity(one),
            }
            for one in self._query(expr)
        ]

    def _outside(self, namespace: str, metric: str, asked: Mapping[str, str]) -> list[dict[str, Any]]:
        found = self._query(self.external[metric])
        value = quantity(found[0]) if found else "0"
        return [{"metricName": metric, "metricLabels": {}, "timestamp": stamp(), "value": value}]


def stamp() -> str:
    """Now, as Kubernetes writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def quantity(series: Mapping[str, Any]) -> str:
    """A sample as a Kubernetes quantity, in thousandths."""
    return f"{round(1000 * float(series['value'][1]))}m"


class Keda:
    """KEDA, for one ScaledObject with Prometheus triggers."""

    PERIOD_SECONDS = 0.5

    def __init__(self, cluster: Any, api: MetricsApi, query: Query, scaled: Mapping[str, Any]) -> None:
        self._cluster, self._query = cluster, query
        self._spec, self._name = scaled["spec"], scaled["metadata"]["name"]
        self._triggers = [one["metadata"] for one in self._spec["triggers"]]
        assert all(one["type"] == "prometheus" for one in self._spec["triggers"])
        api.external |= {f"s{n}-prometheus": one["query"] for n, one in enumerate(self._triggers)}
        cluster.apply(self._autoscaler())
        self._active_at = monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Forget the ScaledObject."""
        self._stop.set()
        self._thread.join(60)
        self._cluster.kubectl("delete", "hpa", f"keda-hpa-{self._name}")

    def _autoscaler(self) -> dict[str, Any]:
        metrics = [
            {
                "type": "External",
                "external": {
                    "metric": {"name": f"s{number}-prometheus"},
                    "target": {"type": "AverageValue", "averageValue": one["threshold"]},
                },
            }
            for number, one in enumerate(self._triggers)
        ]
        spec = {
            "scaleTargetRef": self._spec["scaleTargetRef"],
            "minReplicas": max(1, self._spec["minReplicaCount"]),
            "maxReplicas": self._spec["maxReplicaCount"],
            "metrics": metrics,
            "behavior": self._spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"],
        }
        meta = {"name": f"keda-hpa-{self._name}"}
        return {
            "apiVersion": "autoscaling/v2",
            "kind": "HorizontalPodAutoscaler",
            "metadata": meta,
            "spec": spec,
        }

    def _active(self) -> bool:
        for one in self._triggers:
            found = self._query(one["query"])
            assert len(found) <= 1, f"{one['query']}: KEDA wants one series"
            if found and float(found[0]["value"][1]) > float(one.get("activationThreshold", "0")):
                return True
        return False

    def _run(self) -> None:
        while not self._stop.wait(self.PERIOD_SECONDS):
            replicas = self._cluster.get("infsvc", self._name)["spec"]["replicas"]
            if self._active():
                self._active_at = monotonic()
                if replicas == 0:
                    self._scale(max(1, self._spec["minReplicaCount"]))
            elif replicas and monotonic() - self._active_at > self._spec["cooldownPeriod"]:
                self._scale(self._spec["minReplicaCount"])

    def _scale(self, replicas: int) -> None:
        self._cluster.kubectl("scale", "infsvc", self._name, f"--replicas={replicas}")
