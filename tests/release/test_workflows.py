# SPDX-License-Identifier: Apache-2.0
"""The workflows of the forge: least permissions, pinned actions, and scripts that exist in the repository."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github/workflows"
FILES = sorted(FOLDER.glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
WRITING = {
    ("docs.yml", "publish"): {"contents"},
    ("release.yml", "dist"): {"id-token", "attestations"},
    ("release.yml", "images"): {"packages", "id-token", "attestations"},
    ("release.yml", "tag"): {"packages"},
    ("release.yml", "chart"): {"packages", "id-token"},
    ("release.yml", "pypi"): {"id-token"},
    ("release.yml", "publish"): {"contents"},
}
"""Jobs with permissions to write, with these permissions."""


def read(path: Path) -> dict[str, Any]:
    return yaml.load(path.read_text(), Loader=yaml.BaseLoader)


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in read(path)["jobs"].values() for step in job["steps"]]


def test_there_are_four_workflows() -> None:
    assert [path.stem for path in FILES] == ["docs", "e2e", "release", "test"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_jobs_have_the_least_permissions_and_a_time_limit(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert "concurrency" in workflow
    for name, job in workflow["jobs"].items():
        assert int(job["timeout-minutes"]) <= 120
        granted = {scope for scope, level in job.get("permissions", {}).items() if level == "write"}
        assert granted == WRITING.get((path.name, name), set()), name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_actions_are_pinned_by_commit_with_their_version(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if "uses:" in line]
    assert lines
    for line in lines:
        assert re.fullmatch(r"\s*(?:- )?uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_commands_of_steps_exist_in_the_repository(path: Path) -> None:
    commands = [step["run"] for step in steps(path) if "run" in step]
    for command in commands:
        for name in re.findall(r"(?<![\w./])scripts/\S+", command):
            assert (ROOT / name).is_file(), command
            assert not name.endswith(".sh") or os.access(ROOT / name, os.X_OK), name
        for target in re.findall(r"\bmake ([a-z0-9-]+)", command):
            assert target in TARGETS, command
        assert "${{" not in command, f"an expression in a script can inject commands: {command}"


def test_every_script_of_a_release_is_used_by_a_workflow_or_another_script() -> None:
    folder = ROOT / "scripts/release"
    programs = [path for path in folder.iterdir() if path.suffix in (".py", ".sh")]
    users = [*FILES, *programs, ROOT / "Makefile"]
    for program in programs:
        uses = [user.name for user in users if user != program and program.stem in user.read_text()]
        assert uses, program.name


def test_releases_are_published_only_from_tags_of_versions_after_the_tests() -> None:
    workflow = read(FOLDER / "release.yml")
    assert workflow["on"] == {"push": {"tags": ["v[0-9]+.[0-9]+.[0-9]+"]}}
    jobs = workflow["jobs"]

    def needed(name: str) -> set[str]:
        direct = jobs[name].get("needs", [])
        direct = [direct] if isinstance(direct, str) else direct
        return {*direct, *(far for near in direct for far in needed(near))}

    for name, job in jobs.items():
        if "write" in job.get("permissions", {}).values() and name != "dist":
            assert {"check", "test"} <= needed(name), name
    assert jobs["pypi"]["environment"] == "pypi"
    assert jobs["images"]["strategy"]["fail-fast"] == "false"
    images = {"operator", "gateway", "engine-cpu", "engine"}
    for name in ("images", "scan"):
        assert set(jobs[name]["strategy"]["matrix"]["target"]) == images
    assert {"images", "scan"} <= needed("tag")
    assert "tag" in needed("chart")
    commands = {name: [step.get("run", "") for step in job["steps"]] for name, job in jobs.items()}
    assert [name for name, lines in commands.items() if "tag_images.py" in " ".join(lines)] == ["tag"]
    verify, tag = commands["tag"][-2:]
    assert "sign.py verify --identity" in verify
    assert all(f"dist/images/{image}.json" in verify for image in images)
    assert tag == "python scripts/release/tag_images.py dist/images"


def test_no_registry_is_written_into_a_workflow_or_script() -> None:
    files = [*FILES, *(ROOT / "scripts/release").iterdir()]
    for path in files:
        if path.is_file():
            assert not re.search(r"\b(ghcr|quay|docker)\.io\b|gcr\.io|amazonaws", path.read_text()), path.name


def test_the_matrix_has_all_supported_versions_of_python() -> None:
    supported = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    versions = read(FOLDER / "test.yml")["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert versions[0] == supported.removeprefix(">=")
    assert len(versions) == 3
