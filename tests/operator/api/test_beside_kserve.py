# SPDX-License-Identifier: Apache-2.0
"""KServe's CRD has the same kind and plural in another group; `infsvc` and the full name stay unambiguous."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from marks import CONTROL_PLANE

pytestmark = CONTROL_PLANE
KSERVE = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "inferenceservices.serving.kserve.io"},
    "spec": {
        "group": "serving.kserve.io",
        "scope": "Namespaced",
        "names": {
            "kind": "InferenceService",
            "listKind": "InferenceServiceList",
            "plural": "inferenceservices",
            "singular": "inferenceservice",
            "shortNames": ["isvc"],
        },
        "versions": [
            {
                "name": "v1beta1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
                },
            }
        ],
    },
}
"""The names of KServe's CRD, without its schema."""


def test_both_crds_can_be_installed_and_addressed(
    api: Any, control_plane: Any, namespace: str, minimal: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    def kubectl(*arguments: str, check: bool = True) -> str:
        command = [str(control_plane.assets / "kubectl"), "--kubeconfig", str(control_plane.kubeconfig)]
        command += ["--cache-dir", str(tmp_path / "cache"), "--namespace", namespace]
        return subprocess.run([*command, *arguments], capture_output=True, text=True, check=check).stdout

    (tmp_path / "crd.json").write_text(json.dumps(KSERVE))
    kubectl("apply", "-f", str(tmp_path / "crd.json"))
    try:
        kubectl("wait", "crd/inferenceservices.serving.kserve.io", "--for=condition=Established")
        ours = minimal("ours")
        ours["metadata"]["namespace"] = namespace
        api.create(ours)
        theirs = {
            "apiVersion": "serving.kserve.io/v1beta1",
            "kind": "InferenceService",
            "metadata": {"name": "theirs"},
        }
        (tmp_path / "theirs.json").write_text(json.dumps(theirs))
        deadline = time.monotonic() + 30
        while not kubectl("apply", "-f", str(tmp_path / "theirs.json"), "-o", "name", check=False):
            if time.monotonic() > deadline:
                pytest.fail("the API server does not accept objects of the second CRD")
        for name in ("infsvc", "inferenceservices.mizzen.dev"):
            assert kubectl("get", name, "-o", "name").split() == ["inferenceservice.mizzen.dev/ours"]
        for name in ("isvc", "inferenceservices.serving.kserve.io"):
            assert kubectl("get", name, "-o", "name").split() == ["inferenceservice.serving.kserve.io/theirs"]
        shown = kubectl("get", "inferenceservices", "-o", "name").split()
        assert shown == ["inferenceservice.mizzen.dev/ours"]  # the first group by name
        kubectl("scale", "infsvc", "ours", "--replicas=3")
        kubectl("delete", "infsvc", "ours", "--wait=false")
        assert kubectl("get", "isvc", "-o", "name").split() == ["inferenceservice.serving.kserve.io/theirs"]
    finally:
        kubectl("delete", "-f", str(tmp_path / "crd.json"))
