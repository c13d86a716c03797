# SPDX-License-Identifier: Apache-2.0
"""docs/troubleshooting.md leads from symptoms to reasons that exist, and to pages and headings that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mizzen_operator.api import reasons

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = ["troubleshooting.md", "quickstart.md"]
CONDITIONS = (DOCS / "conditions.md").read_text()
KUBERNETES = {"CrashLoopBackOff", "ImagePullBackOff", "OOMKilled"}
"""Reasons of Kubernetes that the operator passes on."""
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")


def constants() -> set[str]:
    """Return all reasons that the operator's code has."""
    return {value for name, value in vars(reasons).items() if name.isupper() and isinstance(value, str)}


def rows(page: str) -> list[list[str]]:
    """Return the reason and the last cell of each row of the tables that have a column `reason`."""
    found = []
    for head, body in re.findall(r"^(\|.*\| reason \|.*)\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE):
        column = cells(head).index("reason")
        found += [[cells(line)[column], cells(line)[-1]] for line in body.splitlines()]
    return found


def cells(line: str) -> list[str]:
    """Return the cells of a row of a table."""
    return [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")]


def section(anchor: str) -> str:
    """Return the part of docs/conditions.md below a heading."""
    parts = re.split(r"^## ", CONDITIONS, flags=re.MULTILINE)[1:]
    return next(part for part in parts if part.partition("\n")[0].lower() == anchor)


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as MkDocs makes them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    plain = [re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower()) for text in plain}


@pytest.mark.parametrize("page", PAGES)
def test_every_row_names_a_reason_of_the_code_that_the_conditions_page_explains(page: str) -> None:
    found = rows((DOCS / page).read_text())
    assert len(found) >= 5
    for reason, more in found:
        if not reason:  # a step before there is a service
            continue
        [name] = re.findall(r"^`(\w+)`$", reason)
        assert name in KUBERNETES or name in constants(), name
        assert f"`{name}`" in CONDITIONS
        for anchor in re.findall(r"\]\(conditions\.md#([a-z]+)\)", more):
            assert f"`{name}`" in section(anchor), f"{name} is not in {anchor}"


def test_every_link_leads_to_a_heading() -> None:
    for page in (*PAGES, "sizing.md", "storage.md", "outside.md", "gpus.md", "index.md"):
        for target, anchor in LINK.findall((DOCS / page).read_text()):
            path = DOCS / (target or page)
            assert path.is_file(), f"{page}: {target}"
            assert not anchor or anchor in anchors(path), f"{page}: {target}#{anchor}"


def test_statuses_of_the_table_are_those_of_the_gateway() -> None:
    page = (DOCS / "troubleshooting.md").read_text().split("## Requests fail")[1]
    named = {int(code) for line in page.splitlines() for code in re.findall(r"^\| (4\d\d|503)", line)}
    document = json.loads((ROOT / "tests/golden/data/worker_openapi.json").read_text())
    text = json.dumps(document)
    assert named == {400, 401, 403, 404, 413, 429, 503}
    assert all(f'"{code}"' in text for code in named)
