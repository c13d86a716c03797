# SPDX-License-Identifier: Apache-2.0
"""The end-to-end test installs the artifacts that the release scripts make."""

from __future__ import annotations

import os
import runpy
import subprocess
from pathlib import Path

import pytest

from mizzen_local.helm import find_helm

ROOT = Path(__file__).parents[2]
ARTIFACTS = runpy.run_path(str(ROOT / "tests/e2e/artifacts.py"))


def test_the_quick_start_installs_the_packaged_chart(tmp_path: Path) -> None:
    release, checkout = tmp_path / "release", tmp_path / "checkout"
    checkout.mkdir()
    command = ARTIFACTS["package_command"](release / "chart", "registry.example.com/team/mizzen")
    environment = {**os.environ, "HELM": str(find_helm()), "HELM_CACHE_HOME": str(tmp_path / "cache")}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    ARTIFACTS["make_checkout"](ARTIFACTS["find_package"](release / "chart"), checkout)
    values = (checkout / "charts/mizzen/values.yaml").read_text()
    assert '  registry: "registry.example.com/team"\n' in values
    assert not (checkout / "charts/mizzen/files/crd/inferenceservices.yaml").is_symlink()
    assert (checkout / "examples/README.md").is_file()


def test_an_incomplete_release_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("E2E_RELEASE", raising=False)
    assert ARTIFACTS["release_folder"]() is None
    monkeypatch.setenv("E2E_RELEASE", str(tmp_path))
    with pytest.raises(SystemExit, match="contains no package of a chart"):
        ARTIFACTS["release_folder"]()
    (tmp_path / "chart").mkdir()
    (tmp_path / "chart/mizzen-0.1.0.tgz").touch()
    assert ARTIFACTS["release_folder"]() == tmp_path
    with pytest.raises(SystemExit, match=r"there is no .*operator\.tar"):
        ARTIFACTS["image_archive"](tmp_path, "operator")
