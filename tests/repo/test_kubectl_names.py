# SPDX-License-Identifier: Apache-2.0
"""Commands name the CRD by `infsvc` or by its full name: KServe's InferenceService has the same plural."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ratchets import ROOT, tracked

ENDINGS = (".md", ".py", ".txt", ".yaml", ".tpl", ".json", ".sh")
PRODUCT = ("README.md", "docs", "charts", "examples", "operator", "worker", "scripts", "SECURITY.md")
COMMAND = re.compile(
    r"(?:kubectl[^\n`|]*?[ \"',])inferenceservices?(?=[\s/`\"']|$)"
    r"|[\"'](?:get|delete|wait|scale|patch|describe|explain|label)[\"'], [\"']inferenceservices?[\"'/]"
)
"""A kubectl command with a name that may also mean KServe's kind."""


def product_files() -> list[Path]:
    found = [path for ending in ENDINGS for path in tracked(ending)]
    return [path for path in found if path.parts[0] in PRODUCT]


def test_commands_do_not_use_ambiguous_names() -> None:
    wrong = [
        f"{path}: {match.group(0)}"
        for path in product_files()
        for match in COMMAND.finditer((ROOT / path).read_text(encoding="utf-8"))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "ambiguous"),
    [
        ("$ kubectl get inferenceservice demo", True),
        ("run `kubectl wait inferenceservices/demo`", True),
        ('kubectl("get", "inferenceservices", "-A")', True),
        ("kubectl get inferenceservices.mizzen.dev", False),
        ("kubectl apply -f examples/inferenceservice.yaml", False),
        ("kubectl get infsvc", False),
    ],
)
def test_the_search_finds_ambiguous_names(text: str, ambiguous: bool) -> None:
    assert bool(COMMAND.search(text)) == ambiguous
