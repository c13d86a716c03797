# SPDX-License-Identifier: Apache-2.0
"""The page for users of vLLM and SGLang names options, fields, paths and metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import reference

from mizzen.commands.serve import serve_settings
from mizzen.common.foreign_options import FOREIGN_OPTIONS, SAME_OPTIONS, ForeignOption
from mizzen.common.options import flag

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden/data"
PAGE = (ROOT / "docs/coming-from.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def crd_fields() -> set[str]:
    return set(reference.crd_fields("spec"))


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize(
    "entry", (*FOREIGN_OPTIONS, *SAME_OPTIONS), ids=lambda entry: str(entry.vllm or entry.sglang)
)
def test_counterparts_of_options_exist(entry: ForeignOption, crd_fields: set[str]) -> None:
    own = {flag(setting.name): setting for setting in serve_settings()}
    for option in entry.options:
        name, _, value = option.partition(" ")
        assert name in own
        choices = own[name].choices
        assert not value or value.isupper() or value.isdecimal() or value in choices, option
    assert set(entry.fields) <= crd_fields
    assert set(re.findall(r"spec\.[a-zA-Z.]+[a-zA-Z]", entry.advice + entry.remark)) <= crd_fields
    assert entry.vllm or entry.sglang
    assert entry.instead


def test_an_option_has_one_translation() -> None:
    for server in ("vllm", "sglang"):
        names = [name for entry in FOREIGN_OPTIONS for name in getattr(entry, server)]
        assert len(names) == len(set(names))
    same = {name for entry in SAME_OPTIONS for name in (*entry.vllm, *entry.sglang)}
    assert same <= {flag(setting.name) for setting in serve_settings()}


def test_paths_of_the_gateway_exist() -> None:
    document = json.loads((GOLDEN / "worker_openapi.json").read_text())
    routes = document["routes"] + document["routes of the admin port"]
    paths = {route.split(" ")[1] for route in routes}
    for row in section("Endpoints").splitlines()[4:]:
        theirs, ours = row.strip("|").split("|")
        shown = theirs if "the same paths" in ours else ours
        assert set(re.findall(r"`(/[a-z_/0-9]+)`", shown)) <= paths, row
        for path in re.findall(r"`(/[a-z_/0-9]+)`", theirs):
            assert path in paths or "the same" not in ours, row


def test_counterparts_of_metrics_exist() -> None:
    shown = (ROOT / "docs/metrics.md").read_text()
    exported = set(re.findall(r"^\| `([a-z_:0-9]+)`", shown, re.MULTILINE))
    for row in section("Metrics").split("or none:")[1].strip().splitlines()[2:]:
        theirs, ours = row.strip("|").split("|")
        assert set(re.findall(r"`(mizzen_[a-z_]+)`", ours)) <= exported
        assert not set(re.findall(r"`([a-z]+:[a-z_]+)`", theirs)) & exported, row
    table = section("Metrics").split("or none:")[0]
    foreign = {name for name in exported if name.startswith(("vllm:", "sglang:"))}
    assert set(re.findall(r"`((?:vllm|sglang):[a-z_0-9]+)`", table)) == foreign
