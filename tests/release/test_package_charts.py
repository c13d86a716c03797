# SPDX-License-Identifier: Apache-2.0
"""The packaged charts of a release: the operator's with the registry of its images, and the catalog."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import mizzen
from mizzen_local.helm import find_helm


def test_a_packaged_chart_renders_without_values(run_script: Any, tmp_path: Path) -> None:
    helm = find_helm()
    homes = {f"HELM_{kind}_HOME": str(tmp_path / kind) for kind in ("CACHE", "CONFIG", "DATA")}
    environment = {**os.environ, **homes, "HELM": str(helm)}
    registry = "registry.example.com:5000/team"
    made = run_script("package_charts.py", "--registry", registry, "--out", tmp_path, env=environment)
    assert made.returncode == 0, made.stderr
    package = tmp_path / f"mizzen-{mizzen.__version__}.tgz"

    def render(*values: str) -> str:
        command = [helm, "template", "sail", package, *values]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    for program in ("operator", "engine", "gateway"):
        assert f"{registry}/mizzen/{program}:{mizzen.__version__}" in render()
    assert "mirror.example.com/mizzen/engine" in render("--set", "images.registry=mirror.example.com")
    readme = subprocess.run(
        ["tar", "-xOf", package, "mizzen/README.md"], capture_output=True, text=True, check=True
    ).stdout
    assert f'| `images.registry` | string | `"{registry}"` |' in readme


def test_the_catalog_is_packaged_beside_the_operator(run_script: Any, tmp_path: Path) -> None:
    helm = tmp_path / "helm"
    digests = {"mizzen": "1" * 64, "mizzen-models": "2" * 64}
    reported = "".join(
        f'*/{name}-{mizzen.__version__}.tgz) echo "Digest: sha256:{digest}";; '
        for name, digest in digests.items()
    )
    real = f'[ "$1" = push ] || exec "{find_helm()}" "$@"'
    helm.write_text(f'#!/bin/sh\n{real}\necho "$3" >>"{tmp_path}/targets"\ncase "$2" in {reported} esac\n')
    helm.chmod(0o755)
    homes = {f"HELM_{kind}_HOME": str(tmp_path / kind) for kind in ("CACHE", "CONFIG", "DATA")}
    environment = {**os.environ, **homes, "HELM": str(helm)}
    options = ("--registry", "registry.example.com/team", "--out", tmp_path / "out", "--push")
    made = run_script("package_charts.py", *options, env=environment)
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "targets").read_text().split() == ["oci://registry.example.com/team/charts"] * 2
    for name, digest in digests.items():
        assert (tmp_path / f"out/{name}.digest").read_text() == f"sha256:{digest}\n"
    package = tmp_path / f"out/mizzen-models-{mizzen.__version__}.tgz"
    command = [helm, "template", "models", package, "--set", "catalog.qwen3-8b-h100.enabled=true"]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert f"helm.sh/chart: mizzen-models-{mizzen.__version__}" in shown


def test_a_failed_push_shows_the_output_of_helm(run_script: Any, tmp_path: Path) -> None:
    helm = tmp_path / "helm"
    helm.write_text('#!/bin/sh\n[ "$1" != push ] || { echo "denied: no such team" >&2; exit 1; }\n')
    helm.chmod(0o755)
    options = ("--registry", "registry.example.com/team", "--out", tmp_path / "out", "--push")
    made = run_script("package_charts.py", *options, env={**os.environ, "HELM": str(helm)})
    assert made.returncode == 1
    assert "denied: no such team" in made.stderr
    assert "Traceback" not in made.stderr
    assert not list((tmp_path / "out").glob("*.digest"))


def test_a_registry_with_a_scheme_is_refused(run_script: Any, tmp_path: Path) -> None:
    made = run_script("package_charts.py", "--registry", "oci://registry.example.com", "--out", tmp_path)
    assert made.returncode == 1
    assert "write a host and a path" in made.stderr
