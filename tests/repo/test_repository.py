# SPDX-License-Identifier: Apache-2.0
"""Rules for the whole repository: no secrets or local paths, valid links, metadata and Makefile help."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LARGEST_BYTES = 3_000_000


def tracked() -> list[Path]:
    """Return all files that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
    return [path for name in names if name and (path := ROOT / name).is_file()]


def texts() -> list[tuple[Path, str]]:
    """Return the paths (relative to the root) and contents of all text files."""
    binary = (".safetensors", ".png", ".xz")
    paths = [path for path in tracked() if path.suffix not in binary]
    return [(path.relative_to(ROOT), path.read_text(encoding="utf-8")) for path in paths]


def test_no_file_contains_a_path_of_a_developers_machine() -> None:
    place = re.compile(r"/(home|Users)/[a-z][a-z0-9_-]*/|/[r]oot/|" + re.escape(str(ROOT)) + "/")
    offenders = [f"{path}: {match[0]}" for path, text in texts() if (match := place.search(text))]
    assert not [line for line in offenders if not line.startswith("tests/repo/test_repository.py")]


def test_no_file_holds_a_private_key_or_a_token() -> None:
    secret = re.compile(
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----\n[A-Za-z0-9+/]|hf_[A-Za-z0-9]{30}|sk-[A-Za-z0-9]{32}"
    )
    assert not [str(path) for path, text in texts() if secret.search(text)]


def test_the_code_has_no_todo_marks() -> None:
    mark = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|raise NotImplementedError")
    code = [(path, text) for path, text in texts() if path.suffix == ".py" and path.parts[0] != "tests"]
    assert not [f"{path}: {match[0]}" for path, text in code if (match := mark.search(text))]


def test_no_file_is_large() -> None:
    assert not [str(path) for path in tracked() if path.stat().st_size > LARGEST_BYTES]


def test_the_licence_is_apache() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert PROJECT["license"] == "Apache-2.0"


def test_make_alone_lists_every_target() -> None:
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    listed = {line.split()[0] for line in shown.splitlines() if line and not line.startswith("make")}
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony
    assert listed == set(phony[1].split())
    assert {"install", "demo", "demo-down", "test", "lint", "bench", "docs"} <= listed


def test_the_distribution_has_all_extras_and_programs() -> None:
    extras = PROJECT["optional-dependencies"]
    assert {"operator", "gateway", "worker", "gpu", "test"} <= set(extras)
    gpu = {re.split(r"[<>=!~;\[ ]", requirement)[0] for requirement in extras["gpu"]}
    assert gpu == {"flashinfer-python", "sglang-kernel", "xgrammar"}
    assert set(PROJECT["scripts"]) == {"mizzen", "mizzen-operator", "mizzen-local"}


@pytest.mark.parametrize("extra", ["", "operator", "gateway", "worker", "gpu", "test"])
def test_the_constraints_pin_every_requirement(extra: str) -> None:
    pinned = set()
    files = ("constraints.txt", "constraints-gpu.txt") if extra == "gpu" else ("constraints.txt",)
    for line in (line for file in files for line in (ROOT / file).read_text().splitlines()):
        if "==" in line:
            pinned.add(normal(line.split("==")[0]))
    required = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    assert {normal(re.split(r"[<>=!~;\[ ]", requirement)[0]) for requirement in required} <= pinned


def normal(name: str) -> str:
    """Return the normalized name of a distribution (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_links_between_pages_have_existing_targets() -> None:
    link = re.compile(r"\[[^\]]*\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]
    dead = [
        f"{page.name}: {target}"
        for page in pages
        for target in link.findall(page.read_text())
        if not (page.parent / target).exists()
    ]
    assert not dead


def test_files_in_the_contributing_guide_exist() -> None:
    guide = (ROOT / "docs/contributing.md").read_text()
    section = guide.split("## Where things are added")[1].split("\n## ")[0]
    folders = (ROOT, ROOT / "worker/mizzen", ROOT / "operator/mizzen_operator")
    named = set(re.findall(r"`([a-z_/]+\.(?:py|yaml|md)|[a-z_]+/[a-z_/]*)`", section))
    assert len(named) > 20
    assert not [name for name in sorted(named) if not any((folder / name).exists() for folder in folders)]
