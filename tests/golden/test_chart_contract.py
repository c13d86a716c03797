# SPDX-License-Identifier: Apache-2.0
"""The objects that the chart renders for its default values and for other values; no cluster is needed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from golden_files import check

import mizzen
from chart_manifests import IMAGES
from mizzen_local import helm

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/mizzen"
PROSE, DEFAULT = "<prose>", "<as by default>"
DASHBOARD_PROSE = {"title", "description", "label", "legendFormat"}
PLACEHOLDER = re.compile(r"\{\{.*?\}\}")
RELEASE = re.compile(rf"(?<![^-:]){re.escape(mizzen.__version__)}$")
PEER = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
EXTRA = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "extra", "labels": {}},
    "data": {"release": "{{ .Release.Name }}"},
}
VALUES: dict[str, dict[str, Any]] = {
    "default": {},
    "monitoring": {
        "monitoring": {
            "enabled": True,
            "dashboards": {"namespace": "grafana"},
            "rules": {"runbookBaseUrl": "https://runbooks.example/mizzen", "disabled": ["MizzenNoLeader"]},
        }
    },
    "namespace": {"rbac": {"scope": "namespace"}, "operator": {"watchNamespace": "llm"}},
    "bare": {
        "crds": {"enabled": False},
        "serviceAccount": {"create": False, "name": "mine"},
        "networkPolicy": {"enabled": False},
        "podDisruptionBudget": {"enabled": False},
        "rbac": {"create": False},
    },
    "no-secrets": {"rbac": {"listSecrets": False}, "networkPolicy": {"from": [PEER]}},
    "names": {"fullnameOverride": "fleet", "extraObjects": [EXTRA]},
    "name": {"nameOverride": "llm"},
    "images": {
        "images": {
            "registry": "registry.example.com/mirror",
            "operator": {"digest": "sha256:" + "0123456789abcdef" * 4},
            "engine": {"repository": "team/engine", "tag": "9"},
            "pullSecrets": [{"name": "regcred"}],
            "childPullPolicy": "Always",
        }
    },
    "pods": {
        "commonLabels": {"team": "llm", "app.kubernetes.io/instance": "not-this"},
        "commonAnnotations": {"owner": "me"},
        "serviceAccount": {"annotations": {"iam": "role"}},
        "operator": {
            "replicas": 3,
            "extraArgs": ["--resync-seconds", "60"],
            "extraEnv": [{"name": "A", "value": "b"}],
            "extraEnvFrom": [{"secretRef": {"name": "s"}}],
            "extraVolumes": [{"name": "v", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "v", "mountPath": "/v"}],
            "extraContainers": [{"name": "beside", "image": "x"}],
            "extraInitContainers": [{"name": "before", "image": "x"}],
            "podLabels": {"pod": "label"},
            "podAnnotations": {"pod": "annotation"},
            "podSecurityContext": {"runAsUser": None, "fsGroup": 1000680000},
            "priorityClassName": "system-cluster-critical",
            "nodeSelector": {"a": "b"},
            "tolerations": [{"key": "k", "operator": "Exists", "effect": "NoSchedule"}],
            "affinity": {"nodeAffinity": {}},
            "topologySpreadConstraints": [
                {"maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
            ],
            "terminationGracePeriodSeconds": 33,
            "api": {"requestsPerSecond": 400, "burst": 100000},
            "leaderElection": {"leaseSeconds": 30, "renewSeconds": 20, "retrySeconds": 5},
            "logLevel": "debug",
        },
    },
}


def render_chart(folder: Path, values: dict[str, Any]) -> list[dict[str, Any]]:
    """Render the chart as release `sail` in namespace `harbour`, without the user's Helm configuration."""
    file = folder / "values.yaml"
    images = {**IMAGES["images"], **values.get("images", {})}
    file.write_text(yaml.safe_dump({**values, "images": images}))
    command = [helm.find_helm(), "template", "sail", CHART, "--namespace", "harbour", "--values", file]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HELM_")}
    environment |= {f"HELM_{kind}_HOME": str(folder / kind) for kind in ("CACHE", "CONFIG", "DATA")}
    environment["KUBECONFIG"] = str(folder / "none")
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert not run.returncode, run.stderr
    return [hide_version(document) for document in yaml.safe_load_all(run.stdout) if document]


def hide_version(value: Any) -> Any:
    """Replace the version in image tags and labels by a mark, so that a release changes no golden file."""
    if isinstance(value, dict):
        return {key: hide_version(item) for key, item in value.items()}
    if isinstance(value, list):
        return [hide_version(item) for item in value]
    return RELEASE.sub("<version>", value) if isinstance(value, str) and "\n" not in value else value


def replace_prose(value: Any, keys: set[str]) -> Any:
    """Replace each text under the given keys by a fixed mark, followed by the placeholders in the text."""
    if isinstance(value, list):
        return [replace_prose(item, keys) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: " ".join([PROSE, *PLACEHOLDER.findall(item)])
        if key in keys and isinstance(item, str)
        else replace_prose(item, keys)
        for key, item in value.items()
    }


def normalise(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return an object without prose; dashboards are replaced by digests, because they are large."""
    if manifest["kind"] == "CustomResourceDefinition":
        return replace_prose(manifest, {"description", "message"})
    if manifest["kind"] == "PrometheusRule":
        return replace_prose(manifest, {"summary", "description"})
    if "grafana_dashboard" in manifest["metadata"].get("labels", {}):
        boards = {
            name: replace_prose(json.loads(text), DASHBOARD_PROSE) for name, text in manifest["data"].items()
        }
        return {**manifest, "data": {name: _digest(board) for name, board in boards.items()}}
    return manifest


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def render_objects(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{item['kind']} {item['metadata'].get('namespace', '-')}/{item['metadata']['name']}": normalise(item)
        for item in render_chart(folder, values)
    }


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return render_objects(tmp_path_factory.mktemp("default"), {})


def test_the_crd_of_the_chart_is_unchanged(default: dict[str, Any]) -> None:
    check("crd", default["CustomResourceDefinition -/inferenceservices.mizzen.dev"])


@pytest.mark.parametrize("name", VALUES)
def test_rendered_objects_of_the_chart_are_unchanged(
    name: str, default: dict[str, Any], tmp_path: Path
) -> None:
    """Golden files contain only differences from the default rendering; the CRD has its own golden file."""
    rendered = render_objects(tmp_path, VALUES[name])
    below = (
        default
        if name != "default"
        else {key: manifest for key, manifest in default.items() if "/inference" in key}
    )
    check(
        f"chart_{name}",
        {key: show_differences(manifest, below.get(key, {})) for key, manifest in rendered.items()},
    )


def show_differences(manifest: dict[str, Any], default: dict[str, Any]) -> Any:
    """Return an object in which everything that equals the default rendering is replaced by a placeholder."""
    if manifest == default:
        return DEFAULT
    return {key: DEFAULT if default.get(key) == part else part for key, part in manifest.items()}
