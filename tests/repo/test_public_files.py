# SPDX-License-Identifier: Apache-2.0
"""The files that the forge and the tools of contributors read: they parse, and agree with the project."""

from __future__ import annotations

import configparser
import json
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml
from compatibility import read_pins

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FORMS = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")
FORM_FIELDS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}
ADVISORY = f"{PROJECT['urls']['Source']}/security/advisories/new"


def load(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


@pytest.mark.parametrize("page", ["SECURITY.md", "CODE_OF_CONDUCT.md", ".github/ISSUE_TEMPLATE/config.yml"])
def test_private_reports_go_to_the_advisory_form(page: str) -> None:
    assert ADVISORY in (ROOT / page).read_text()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_issue_forms_have_labelled_fields_with_unique_names(form: Path) -> None:
    content = load(str(form))
    assert {"name", "description", "body"} <= set(content)
    for field in content["body"]:
        assert field["type"] in FORM_FIELDS
        assert field["attributes"]["label"]
        assert set(field) <= {"type", "id", "attributes", "validations"}
    names = [field["id"] for field in content["body"]]
    assert len(names) == len(set(names)) > 0


def test_people_without_a_form_find_the_documentation() -> None:
    links = load(".github/ISSUE_TEMPLATE/config.yml")["contact_links"]
    assert PROJECT["urls"]["Documentation"] in {link["url"] for link in links}
    assert all(set(link) == {"name", "url", "about"} for link in links)


def test_every_pattern_of_the_code_owners_has_an_owner() -> None:
    lines = (ROOT / ".github/CODEOWNERS").read_text().splitlines()
    rules = [line.split() for line in lines if line and not line.startswith("#")]
    assert rules[0][0] == "*"
    for pattern, *owners in rules:
        assert pattern == "*" or (ROOT / pattern.strip("/")).exists()
        assert owners
        assert all(re.fullmatch(r"@[\w-]+(/[\w-]+)?", owner) for owner in owners)


def test_pre_commit_runs_the_linter_of_the_constraints() -> None:
    repos = {repo["repo"].rpartition("/")[2]: repo for repo in load(".pre-commit-config.yaml")["repos"]}
    ruff = repos["ruff-pre-commit"]
    assert ruff["rev"] == f"v{read_pins('constraints.txt')['ruff']}"
    assert {hook["id"] for hook in ruff["hooks"]} == {"ruff-check", "ruff-format"}


def test_renovate_reads_every_list_of_pinned_versions() -> None:
    config = json.loads((ROOT / "renovate.json").read_text())
    patterns = [re.compile(text.strip("/")) for text in config["pip_requirements"]["managerFilePatterns"]]
    pinned = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("scripts/**/requirements.txt")]
    for name in ("constraints.txt", "constraints-gpu.txt", *pinned):
        assert any(pattern.search(name) for pattern in patterns), name
    gpu = config["packageRules"][-1]
    pins = read_pins("constraints.txt") | read_pins("constraints-gpu.txt")
    for name in gpu["matchPackageNames"]:
        assert any(fnmatch(pin, name) for pin in pins), name
    extras = PROJECT["optional-dependencies"]["gpu"]
    assert {re.split(r"[<>=]", extra)[0] for extra in extras} <= set(gpu["matchPackageNames"])


def test_editors_use_the_line_length_of_the_linter() -> None:
    config = configparser.ConfigParser()
    text = (ROOT / ".editorconfig").read_text()
    config.read_string("[top]\n" + text)
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
    assert config["top"]["root"] == "true"
    assert int(config["*.{py,pyi}"]["max_line_length"]) == ruff["line-length"]


def test_links_of_the_public_pages_have_targets() -> None:
    link = re.compile(r"\]\((?!https?:)([^)#]+)")
    for page in ("SECURITY.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md"):
        for target in link.findall((ROOT / page).read_text()):
            assert (ROOT / target).exists(), f"{page}: {target}"
