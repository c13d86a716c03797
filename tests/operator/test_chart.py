# SPDX-License-Identifier: Apache-2.0
"""The operator renders the chart as Helm does, and the rendered roles and pod are minimal."""

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
from hypothesis import given, settings
from hypothesis import strategies as st

from chart_manifests import IMAGES, REGISTRY
from mizzen_local.helm import find_helm
from mizzen_operator.chart import ChartError, operator_manifests

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/mizzen"


def helm(*arguments: str) -> str:
    run = subprocess.run(
        [find_helm(), "template", "sail", str(CHART), "--namespace", "harbour", *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout


def documents(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document]


def places(manifests: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in manifests}


def lacking(ours: Any, helms: Any, path: str) -> list[str]:
    """Return the fields of `ours` that Helm's manifest lacks or changes, each with both values.

    Helm's manifest may have further fields.
    """
    if isinstance(ours, dict) and isinstance(helms, dict):
        return [
            place for key, value in ours.items() for place in lacking(value, helms.get(key), f"{path}.{key}")
        ]
    return [] if ours == helms else [f"{path}: {ours!r} is {helms!r}"]


@pytest.mark.parametrize(
    "values",
    [
        IMAGES,
        {
            "operator": {"replicas": 1, "watchNamespace": "llm", "nodeSelector": {"a": "b"}},
            "images": {"registry": "r.example", "operator": {"digest": "sha256:" + "0" * 64}},
        },
        {
            "images": {
                "operator": {"repository": "r.example/operator"},
                "gateway": {"repository": "localhost/gateway"},
                "engine": {"repository": "cache:5000/engine"},
            },
        },
        {
            **IMAGES,
            "acceleratorProfiles": {
                "mig": {"resourceName": "nvidia.com/mig-3g.40gb", "memory": "39Gi"},
                "h100": {"tolerations": [{"key": "a", "effect": "NoExecute", "tolerationSeconds": 3600}]},
            },
        },
    ],
)
def test_helm_and_the_renderer_agree(values: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "values.json"
    file.write_text(json.dumps(values))
    ours = places(operator_manifests(CHART, values, "harbour", "sail"))
    helms = places(documents(helm("--values", str(file))))
    assert len(ours) == 8
    for place, manifest in ours.items():
        assert not lacking(manifest, helms.get(place), "/".join(place))


@settings(max_examples=30)
@given(st.dictionaries(st.text(min_size=1), st.text(), max_size=4), st.text(), st.integers(0, 10**12))
def test_a_value_is_rendered_unchanged(selector: dict[str, str], key: str, seconds: int) -> None:
    """Neither YAML nor the template interprets the content of a string."""
    tolerations = [{"key": key, "tolerationSeconds": seconds}]
    values = {"operator": {"nodeSelector": selector, "tolerations": tolerations}, **IMAGES}
    deployment = places(operator_manifests(CHART, values, "harbour"))["Deployment", "mizzen-operator"]
    pod = deployment["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == selector
    assert pod["tolerations"] == tolerations


def test_images_have_the_version_of_the_distribution() -> None:
    version = metadata.version("mizzen")
    deployment = places(operator_manifests(CHART, IMAGES, "harbour"))["Deployment", "mizzen-operator"]
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    images = [container["image"], *(argument for argument in container["args"] if "mizzen/" in argument)]
    assert images == [f"{REGISTRY}/mizzen/{name}:{version}" for name in ("operator", "engine", "gateway")]


def test_the_roles_have_minimal_permissions() -> None:
    manifests = operator_manifests(CHART, IMAGES, "harbour", "sail")
    roles = {m["metadata"]["name"]: m["rules"] for m in manifests if m["kind"] == "ClusterRole"}
    assert not any("*" in rule[part] for rules in roles.values() for rule in rules for part in rule)
    verbs: defaultdict[str, set[str]] = defaultdict(set)
    for rule in roles["sail-operator"]:
        if "resourceNames" not in rule:
            for resource in rule["resources"]:
                verbs[resource] |= set(rule["verbs"])
    assert verbs["secrets"] == {"get", "create", "patch", "list"}
    assert verbs["events"] == {"create"}
    assert verbs["inferenceservices"] == {"get", "list", "watch"}
    assert verbs["configmaps"] == {"create"}
    named = {
        resource: (rule["resourceNames"], set(rule["verbs"]))
        for rule in roles["sail-operator"]
        for resource in rule["resources"]
        if "resourceNames" in rule
    }
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
    manifests = operator_manifests(CHART, IMAGES, "harbour", "sail")
    pod = next(m for m in manifests if m["kind"] == "Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_the_error_names_an_unknown_value() -> None:
    with pytest.raises(ChartError, match=r"\.Values\.operator\.replica: the chart has no such value"):
        operator_manifests(CHART, {"operator": {"replica": 1}}, "harbour")


def test_the_error_asks_for_the_registry() -> None:
    with pytest.raises(ChartError, match=r"\.Values\.images\.registry: .* the image mizzen/operator"):
        operator_manifests(CHART, {}, "harbour")


def test_the_error_names_a_file_with_unsupported_template_syntax(tmp_path: Path) -> None:
    shutil.copytree(CHART, tmp_path / "chart", symlinks=True)
    (tmp_path / "chart/files/more.yaml").write_text("a: {{ if .Values.operator }}\n")
    with pytest.raises(ChartError, match=r"more\.yaml"):
        operator_manifests(tmp_path / "chart", IMAGES, "harbour")


def test_the_error_names_a_value_that_only_helm_supports() -> None:
    with pytest.raises(ChartError, match=r"\.Values\.rbac\.scope"):
        operator_manifests(CHART, {"rbac": {"scope": "namespace"}}, "harbour")
