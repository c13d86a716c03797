# SPDX-License-Identifier: Apache-2.0
"""The API server accepts every example, and the health check for Argo CD follows the conditions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lupa
import pytest
import yaml

from mizzen_local.kubectl import Kubectl

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
cluster = [pytest.mark.cluster, pytest.mark.xdist_group("chart")]


def documents(path: Path) -> Iterator[dict[str, Any]]:
    for document in yaml.safe_load_all(path.read_text()):
        if document:
            yield document


@pytest.fixture(scope="module")
def argocd(kubectl: Kubectl) -> None:
    """Create the namespace of the example for Argo CD."""
    kubectl("create", "namespace", "argocd")


@pytest.mark.usefixtures("crd", "stand_ins", "argocd")
@pytest.mark.parametrize("example", [pytest.param(path, id=path.stem, marks=cluster) for path in EXAMPLES])
def test_the_api_server_accepts_the_example(example: Path, dry_run: Callable[..., list[str]]) -> None:
    accepted = dry_run(example.read_text())
    assert len(accepted) == len(list(documents(example)))


@pytest.mark.parametrize("example", [pytest.param(path, id=path.stem) for path in EXAMPLES])
def test_the_example_begins_with_a_comment_and_refers_only_to_its_own_services(example: Path) -> None:
    assert example.read_text().startswith("# ")
    services = [d for d in documents(example) if d["kind"] == "InferenceService"]
    assert services or example.stem == "argocd"
    names = {service["metadata"]["name"] for service in services}
    for target in (scaled(document) for document in documents(example)):
        assert target is None or target in names


def scaled(document: dict[str, Any]) -> str | None:
    """Return the name of the InferenceService that an autoscaler or route refers to; None for other kinds."""
    if document["kind"] in ("HorizontalPodAutoscaler", "ScaledObject"):
        return document["spec"]["scaleTargetRef"]["name"]
    if document["kind"] == "HTTPRoute":
        return document["spec"]["rules"][0]["backendRefs"][0]["name"].removesuffix("-gateway")
    return None


def scaling_queries() -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the autoscalers of the examples, each with a metric or query that it uses."""
    for document in (document for path in EXAMPLES for document in documents(path)):
        if document["kind"] == "HorizontalPodAutoscaler":
            for metric in document["spec"]["metrics"]:
                yield document, metric["pods"]["metric"]["name"]
        elif document["kind"] == "ScaledObject":
            for trigger in document["spec"]["triggers"]:
                yield document, trigger["metadata"]["query"]


def test_every_metric_of_an_autoscaler_exists() -> None:
    table = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    seen = 0
    for document, query in scaling_queries():
        used = re.findall(r"\bmizzen_\w+", query)
        assert used, query
        assert set(used) <= set(table), query
        seen += 1
        if document["kind"] == "ScaledObject":
            chosen = dict(re.findall(r'(\w+)="([^"]*)"', query))
            assert chosen == {"namespace": "default", "service": scaled(document)}
    assert seen == 4


def test_the_keda_example_has_the_fields_of_the_prometheus_scaler() -> None:
    """KEDA's Prometheus scaler requires three fields, all of them strings; thresholds contain numbers."""
    [document] = [d for d in documents(ROOT / "examples/keda.yaml") if d["kind"] == "ScaledObject"]
    for trigger in document["spec"]["triggers"]:
        metadata = trigger["metadata"]
        assert trigger["type"] == "prometheus"
        assert {"serverAddress", "query", "threshold"} <= set(metadata)
        assert set(metadata) <= {"serverAddress", "query", "threshold", "activationThreshold"}
        assert float(metadata["threshold"]) > float(metadata["activationThreshold"]) >= 0
        assert metadata["query"].startswith("sum(")  # KEDA accepts only queries with one series


@pytest.mark.cluster
@pytest.mark.xdist_group("chart")
@pytest.mark.usefixtures("crd")
def test_the_hpa_example_finds_its_service(kubectl: Kubectl, make_namespace: Callable[[str], str]) -> None:
    home = make_namespace("hpa")
    kubectl("apply", "--namespace", home, "-f", str(ROOT / "examples/hpa.yaml"))
    able = ("--for=condition=AbleToScale", "--timeout=120s")
    kubectl("wait", "--namespace", home, "hpa/scaled-by-hpa", *able, timeout=150)
    conditions = "jsonpath={.status.conditions}"
    assert "SucceededGetScale" in kubectl(
        "get", "hpa", "scaled-by-hpa", "--namespace", home, "-o", conditions
    )
    kubectl("delete", "--namespace", home, "-f", str(ROOT / "examples/hpa.yaml"))


def health(obj: dict[str, Any]) -> tuple[str, str]:
    """Run the example's Lua script as Argo CD does, and return the health of `obj`: status and message."""
    [document] = documents(ROOT / "examples/argocd.yaml")
    script = document["data"]["resource.customizations.health.mizzen.dev_InferenceService"]
    lua = lupa.LuaRuntime(unpack_returned_tuples=True, register_eval=False, register_builtins=False)
    lua.globals()["obj"] = lua.table_from(obj, recursive=True)
    answer = lua.execute(script)
    return answer["status"], answer["message"]


def service(*conditions: tuple[str, bool, str], observed: int = 3) -> dict[str, Any]:
    """Return a service of generation 3 with conditions, given as type, status and reason."""
    status = {
        "observedGeneration": observed,
        "conditions": [
            {"type": kind, "status": "True" if value else "False", "reason": reason, "message": "words"}
            for kind, value, reason in conditions
        ],
    }
    return {"metadata": {"name": "s", "generation": 3}, "status": status}


FINE = [("Failed", False, "AsExpected"), ("Conflict", False, "NoConflict")]


@pytest.mark.parametrize(
    ("obj", "status", "reason"),
    [
        ({"metadata": {"generation": 1}}, "Progressing", "not reconciled"),
        (service(("Ready", True, "Settled"), observed=2), "Progressing", "not reconciled"),
        (service(("Ready", True, "AllGroupsServe"), *FINE), "Healthy", "AllGroupsServe: words"),
        (service(("Ready", True, "ScaledToZero"), *FINE), "Healthy", "ScaledToZero"),
        (service(("Ready", False, "ReplacingGroups"), *FINE), "Progressing", "ReplacingGroups"),
        (service(("Ready", False, "Suspended"), *FINE), "Suspended", "Suspended"),
        (service(("Ready", False, "Paused"), *FINE), "Suspended", "Paused"),
        (service(("Ready", False, "ProgressDeadlineExceeded"), *FINE), "Degraded", "ProgressDeadline"),
        (service(("Ready", False, "X"), ("Failed", True, "EngineEnded")), "Degraded", "EngineEnded: words"),
        (service(("Ready", True, "X"), ("Conflict", True, "NameConflict")), "Degraded", "NameConflict"),
    ],
)
def test_the_health_for_argo_cd_follows_the_conditions(obj: dict[str, Any], status: str, reason: str) -> None:
    actual, message = health(obj)
    assert actual == status
    assert reason in message
