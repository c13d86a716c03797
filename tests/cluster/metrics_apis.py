# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for prometheus-adapter and KEDA; Prometheus and the HPA controller of the tests are real.

`MetricsApi` serves the aggregated APIs `custom.metrics.k8s.io` and `external.metrics.k8s.io` to the HPA
controller, with values from Prometheus and a rule of prometheus-adapter. `Keda` handles a ScaledObject as
KEDA does: it creates an HPA with external metrics, and scales the service from and to zero by itself.
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

from mizzen_local.pki import CertificateAuthority

SERVER = "metrics-apis"
CUSTOM, EXTERNAL = "custom.metrics.k8s.io/v1beta2", "external.metrics.k8s.io/v1beta1"
METRIC_PATH = re.compile(
    r"/apis/(?P<group>[a-z0-9.]+/v1beta[12])(/namespaces/(?P<namespace>[^/]+)(?P<pods>/pods/\*)?/(?P<metric>[^/]+))?"
)

Query = Callable[[str], list[dict[str, Any]]]


class MetricsApi:
    """Serves the custom and external metrics APIs of a cluster with values from Prometheus."""

    def __init__(self, cluster: Any, query: Query, rule: Mapping[str, Any], folder: Path) -> None:
        """Start the server and register its APIs.

        Args:
            cluster: cluster in which the APIs are registered.
            query: runs an instant query of Prometheus.
            rule: rule of prometheus-adapter for custom metrics of pods.
            folder: folder for certificates.
        """
        self._cluster, self._query, self._rule = cluster, query, rule
        self.external: dict[str, str] = {}
        """PromQL queries of external metrics, by the names of the metrics."""
        self.requested_metrics: list[str] = []
        """Metrics that the HPA controller has requested, in order."""
        authority = CertificateAuthority(folder / "pki")
        pair = authority.issue(SERVER, SERVER, hosts=[f"{SERVER}.default.svc"])
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pair.certificate, pair.key)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self._register(authority.pair.certificate.read_bytes())

    def close(self) -> None:
        """Unregister both APIs and stop the server."""
        for name in (CUSTOM, EXTERNAL):
            group, version = name.split("/")
            self._cluster.kubectl("delete", "apiservice", f"{version}.{group}", "--wait=true")
        self._cluster.kubectl("delete", "service", SERVER)
        self._server.shutdown()
        self._server.server_close()

    def _register(self, authority: bytes) -> None:
        """Register both APIs with a Service of type ExternalName, because no pod runs the server."""
        external_name = {"type": "ExternalName", "externalName": "localhost"}
        objects = [
            {"apiVersion": "v1", "kind": "Service", "metadata": {"name": SERVER}, "spec": external_name}
        ]
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
        for api_service in objects[1:]:
            resource = f"apiservice/{api_service['metadata']['name']}"
            self._cluster.kubectl("wait", resource, "--for=condition=Available", "--timeout=60s")

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

    def answer(self, path: str, parameters: Mapping[str, str]) -> dict[str, Any] | None:
        """Return the body of the response to a GET; None if the path does not exist."""
        match = METRIC_PATH.fullmatch(urllib.parse.unquote(path))
        if match is None or match["group"] not in (CUSTOM, EXTERNAL):
            return None
        if not match["metric"]:
            return {
                "kind": "APIResourceList",
                "apiVersion": "v1",
                "groupVersion": match["group"],
                **self._list_resources(),
            }
        self.requested_metrics.append(match["metric"])
        items = (self._pod_metrics if match["pods"] else self._external_metrics)(
            match["namespace"], match["metric"], parameters
        )
        kind = "MetricValueList" if match["pods"] else "ExternalMetricValueList"
        return {"kind": kind, "apiVersion": match["group"], "metadata": {}, "items": items}

    def _list_resources(self) -> dict[str, Any]:
        names = {series["metric"]["__name__"] for series in self._query(self._rule["seriesQuery"])}
        common = {"singularName": "", "namespaced": True, "verbs": ["get"]}
        pods = [{**common, "name": f"pods/{name}", "kind": "MetricValueList"} for name in sorted(names)]
        return {"resources": pods or [{**common, "name": "none", "kind": "ExternalMetricValueList"}]}

    def _pod_metrics(
        self, namespace: str, metric: str, parameters: Mapping[str, str]
    ) -> list[dict[str, Any]]:
        """Return the metric of each pod that matches the label selector; the rule contains the query."""
        pods = self._cluster.get("pods", "-n", namespace, "-l", parameters["labelSelector"])["items"]
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
                    "name": series["metric"]["pod"],
                    "apiVersion": "/v1",
                },
                "metric": {"name": metric},
                "timestamp": stamp(),
                "value": quantity(series),
            }
            for series in self._query(expr)
        ]

    def _external_metrics(
        self, namespace: str, metric: str, parameters: Mapping[str, str]
    ) -> list[dict[str, Any]]:
        series = self._query(self.external[metric])
        value = quantity(series[0]) if series else "0"
        return [{"metricName": metric, "metricLabels": {}, "timestamp": stamp(), "value": value}]


def stamp() -> str:
    """Return the current time in the format of Kubernetes."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def quantity(series: Mapping[str, Any]) -> str:
    """Return the value of an instant query's series as a Kubernetes quantity in thousandths."""
    return f"{round(1000 * float(series['value'][1]))}m"


class Keda:
    """A stand-in for KEDA that handles one ScaledObject with Prometheus triggers."""

    PERIOD_SECONDS = 0.5

    def __init__(self, cluster: Any, api: MetricsApi, query: Query, scaled: Mapping[str, Any]) -> None:
        self._cluster, self._query = cluster, query
        self._spec, self._name = scaled["spec"], scaled["metadata"]["name"]
        self._triggers = [trigger["metadata"] for trigger in self._spec["triggers"]]
        assert all(trigger["type"] == "prometheus" for trigger in self._spec["triggers"])
        api.external |= {f"s{n}-prometheus": trigger["query"] for n, trigger in enumerate(self._triggers)}
        cluster.apply(self._autoscaler())
        self._active_at = monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop scaling, and delete the HPA."""
        self._stop.set()
        self._thread.join(60)
        self._cluster.kubectl("delete", "hpa", f"keda-hpa-{self._name}")

    def _autoscaler(self) -> dict[str, Any]:
        metrics = [
            {
                "type": "External",
                "external": {
                    "metric": {"name": f"s{number}-prometheus"},
                    "target": {"type": "AverageValue", "averageValue": trigger["threshold"]},
                },
            }
            for number, trigger in enumerate(self._triggers)
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
        for trigger in self._triggers:
            series = self._query(trigger["query"])
            assert len(series) <= 1, f"{trigger['query']}: KEDA requires a query with one series"
            if series and float(series[0]["value"][1]) > float(trigger.get("activationThreshold", "0")):
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
