"""Helm and our own renderer make the same manifests of the same files."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import defaultdict
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from mizzen_local import assets
from mizzen_operator.chart import ChartError, operator_manifests

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/mizzen"


def helm(*arguments: str) -> str:
    program = shutil.which("helm") or str(assets.find() / "helm")
    run = subprocess.run(
        [program, "template", "sail", str(CHART), "--namespace", "harbour", *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout


def documents(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document]


def in_order(manifests: list[dict[str, Any]]) -> list[str]:
    return sorted(json.dumps(manifest, sort_keys=True) for manifest in manifests)


@pytest.mark.parametrize(
    "values", [{}, {"operator": {"replicas": 1, "watchNamespace": "llm", "image": "x:1"}}]
)
def test_helm_and_the_renderer_agree(values: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "values.json"
    file.write_text(json.dumps(values))
    ours = operator_manifests(CHART, values, "harbour", "sail")
    assert in_order(documents(helm("--values", str(file)))) == in_order(ours)
    assert len(ours) == 8


def test_the_chart_carries_the_repositorys_crd() -> None:
    crds = [d for d in documents(helm("--include-crds")) if d["kind"] == "CustomResourceDefinition"]
    assert crds == [yaml.safe_load((ROOT / "crds/inferenceservices.yaml").read_text())]


def test_versions_are_the_distributions() -> None:
    version = metadata.version("mizzen")
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())["operator"]
    assert chart["version"] == chart["appVersion"] == version
    for name in ("image", "engineImage", "gatewayImage"):
        assert values[name].endswith(f":{version}")


def test_the_operator_may_do_little() -> None:
    manifests = operator_manifests(CHART, {}, "harbour", "sail")
    roles = {m["metadata"]["name"]: m["rules"] for m in manifests if m["kind"] == "ClusterRole"}
    assert not any("*" in rule[part] for rules in roles.values() for rule in rules for part in rule)
    verbs: defaultdict[str, set[str]] = defaultdict(set)
    for rule in roles["sail-operator"]:
        if "resourceNames" not in rule:
            for resource in rule["resources"]:
                verbs[resource] |= set(rule["verbs"])
    assert verbs["secrets"] == {"get", "create", "list"}
    assert verbs["inferenceservices"] == {"get", "list", "watch"}
    assert verbs["configmaps"] == {"create"}
    named = {
        resource: (rule["resourceNames"], set(rule["verbs"]))
        for rule in roles["sail-operator"]
        for resource in rule["resources"]
        if "resourceNames" in rule
    }
    assert named["secrets"] == (["mizzen-shared"], {"patch"})
    assert named["configmaps"] == (["mizzen-shared"], {"get", "patch"})
    bind = [rule for rule in roles["sail-operator"] if "bind" in rule["verbs"]]
    assert [rule["resourceNames"] for rule in bind] == [["sail-gateway"]]
    assert roles["sail-gateway"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]},
        {
            "apiGroups": [""],
            "resources": ["configmaps"],
            "resourceNames": ["mizzen-shared"],
            "verbs": ["get", "list", "watch"],
        },
    ]


def test_the_operators_pod_is_restricted() -> None:
    manifests = operator_manifests(CHART, {}, "harbour", "sail")
    pod = next(m for m in manifests if m["kind"] == "Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_a_value_that_the_chart_lacks_is_named() -> None:
    with pytest.raises(ChartError, match=r"\.Values\.operator\.replica: the chart has no such value"):
        operator_manifests(CHART, {"operator": {"replica": 1}}, "harbour")


def test_a_file_with_other_syntax_is_named(tmp_path: Path) -> None:
    shutil.copytree(CHART, tmp_path / "chart", symlinks=True)
    (tmp_path / "chart/files/more.yaml").write_text("a: {{ if .Values.operator }}\n")
    with pytest.raises(ChartError, match=r"more\.yaml"):
        operator_manifests(tmp_path / "chart", {}, "harbour")
