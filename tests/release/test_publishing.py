# SPDX-License-Identifier: Apache-2.0
"""Images are scanned and tagged together, with programs that stand in for skopeo, grype and sudo."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Run = Callable[..., subprocess.CompletedProcess[str]]
NAMES = ("operator", "gateway", "engine-cpu", "engine")
SKOPEO = """#!/bin/sh
# Keeps the digest of each tag in a file of $TAGS.
file() { printf '%s' "$TAGS/${1##*/}"; }
for last; do :; done
case $1 in
  inspect)
    [ -z "${DOWN:-}" ] || { echo "connection refused" >&2; exit 1; }
    [ -e "$(file "$last")" ] || { echo "reading manifest: manifest unknown" >&2; exit 1; }
    cat "$(file "$last")" ;;
  copy)
    echo "$*" >> "$TAGS/copies"
    for word; do case $word in *@sha256:*) echo "${word##*@}" > "$(file "$last")" ;; esac; done ;;
esac
"""


def digest(name: str) -> str:
    return "sha256:" + f"{NAMES.index(name)}" * 64


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with the descriptions of four images that were pushed without tags."""
    (tmp_path / "tags").mkdir()
    monkeypatch.setenv("TAGS", str(tmp_path / "tags"))
    add_program(tmp_path, "skopeo", SKOPEO)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    folder = tmp_path / "images"
    folder.mkdir()
    for name in NAMES:
        record = {"reference": f"r.example.com/team/mizzen/{name}:1.2.3", "digest": digest(name)}
        (folder / f"{name}.json").write_text(json.dumps(record))
    return folder


def add_program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(script)
    (folder / name).chmod(0o755)


def tags(folder: Path) -> dict[str, str]:
    """Return the digests of the tags in the registry."""
    return {path.name: path.read_text().strip() for path in (folder.parent / "tags").glob("*:*")}


def test_all_images_of_a_release_are_tagged_with_their_digests(folder: Path, run_script: Run) -> None:
    for _ in range(2):  # a job that is run again changes nothing
        done = run_script("tag_images.py", folder)
        assert done.returncode == 0, done.stderr
        assert tags(folder) == {f"{name}:1.2.3": digest(name) for name in NAMES}
    copies = (folder.parent / "tags/copies").read_text().splitlines()
    assert len(copies) == len(NAMES)
    assert all("--all --preserve-digests" in copy for copy in copies)


def test_nothing_is_tagged_while_an_image_is_missing(folder: Path, run_script: Run) -> None:
    (folder / "engine.json").unlink()
    done = run_script("tag_images.py", folder)
    assert done.returncode == 1
    assert "nothing is tagged, because images are missing: " in done.stderr
    assert not tags(folder)
    assert run_script("tag_images.py", folder, "--target", "gateway").returncode == 0
    assert list(tags(folder)) == ["gateway:1.2.3"]


def test_a_tag_does_not_move(folder: Path, run_script: Run) -> None:
    (folder.parent / "tags/gateway:1.2.3").write_text("sha256:other\n")
    done = run_script("tag_images.py", folder)
    assert done.returncode == 1
    assert "gateway:1.2.3 is sha256:other in the registry" in done.stderr
    assert list(tags(folder)) == ["gateway:1.2.3"]


def test_nothing_is_tagged_if_versions_differ_or_the_registry_is_down(
    folder: Path, run_script: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOWN", "yes")
    done = run_script("tag_images.py", folder)
    assert "cannot look up r.example.com/team/mizzen/operator:1.2.3:\nconnection refused" in done.stderr
    record = {"reference": "r.example.com/team/mizzen/engine:1.2.4", "digest": digest("engine")}
    (folder / "engine.json").write_text(json.dumps(record))
    done = run_script("tag_images.py", folder)
    assert "the images have versions 1.2.3, 1.2.4" in done.stderr
    assert not tags(folder)


def test_an_image_with_a_vulnerability_fails_the_scan(folder: Path, run_script: Run) -> None:
    add_program(folder.parent, "grype", '#!/bin/sh\necho "$*"\ncase $1 in */engine@*) exit 2 ;; esac\n')
    good = run_script("scan_images.py", folder / "gateway.json")
    assert good.returncode == 0
    reference = f"r.example.com/team/mizzen/gateway@{digest('gateway')}"
    assert good.stdout == f"registry:{reference} --only-fixed --fail-on critical\n"
    bad = run_script("scan_images.py", folder / "engine.json", folder / "gateway.json", "--fail-on", "high")
    assert bad.returncode == 1
    assert bad.stderr.strip().endswith(f"in r.example.com/team/mizzen/engine@{digest('engine')}")
    assert len(bad.stdout.splitlines()) == 2


def free_disk(folder: Path, needed: str, environment: str) -> subprocess.CompletedProcess[str]:
    for name in ("sudo", "docker"):
        add_program(folder, name, f'#!/bin/sh\necho "{name} $*" >> {folder}/calls\n')
    variables = {"PATH": f"{folder}:{os.environ['PATH']}", "RUNNER_ENVIRONMENT": environment}
    command = [ROOT / "scripts/release/free_disk.sh", needed]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


def test_only_hosted_runners_are_cleaned(tmp_path: Path) -> None:
    assert free_disk(tmp_path, "0", "self-hosted").returncode == 0
    assert not (tmp_path / "calls").exists()
    assert free_disk(tmp_path, "0", "github-hosted").returncode == 0
    removal = (tmp_path / "calls").read_text().splitlines()[0]
    assert removal.startswith("sudo rm -rf /usr/share/dotnet ")
    for kept in ("hostedtoolcache/Python", "hostedtoolcache/go", "/usr/bin"):
        assert kept not in removal


def test_a_disk_that_is_too_small_fails_before_the_build(tmp_path: Path) -> None:
    small = free_disk(tmp_path, "9999999", "")
    assert small.returncode == 1
    assert "set the variable ENGINE_RUNNER to a larger runner" in small.stderr
