# SPDX-License-Identifier: Apache-2.0
"""Code blocks of the documentation, their marks, and the commands in them."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARKED_LANGUAGES = {"console", "sh", "bash", "shell", "python", "dockerfile", "javascript", "typescript"}
"""Languages of blocks that need a mark, because readers run these blocks."""
_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>```+)(?P<language>[\w-]*)[^`]*$")
_MARK = re.compile(r"<!-- (?P<verb>run|skip): (?P<text>[^\n]+?) -->")


@dataclass(frozen=True)
class Snippet:
    """A code block of a page.

    Attributes:
        page: path of the page, relative to the repository.
        line: number of the line on which the block begins.
        language: word after the opening fence, or an empty string.
        verb: `run`, `skip`, or empty if no mark precedes the block.
        kind: how a block with `run` is run, or why a block with `skip` is not.
        text: content of the block, without the indentation of the fence.
    """

    page: str
    line: int
    language: str
    verb: str
    kind: str
    text: str


def list_pages() -> list[Path]:
    """Return all Markdown pages of the repository, except the release notes."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split()
    return sorted(ROOT / name for name in names if name != "CHANGELOG.md" and (ROOT / name).is_file())


def list_snippets(page: Path) -> Iterator[Snippet]:
    """Yield the code blocks of a page in their order.

    Raises:
        ValueError: a block does not end.
    """
    lines = iter(enumerate(page.read_text(encoding="utf-8").splitlines(), start=1))
    name, previous = str(page.relative_to(ROOT)), ""
    for number, line in lines:
        fence = _FENCE.match(line)
        if fence is None:
            previous = line
            continue
        mark = _MARK.fullmatch(previous.strip())
        end = fence["indent"] + fence["ticks"]
        body: list[str] = []
        for _, inner in lines:
            if inner.rstrip() == end:
                break
            body.append(inner)
        else:
            raise ValueError(f"{name}:{number}: the block does not end")
        yield Snippet(
            page=name,
            line=number,
            language=fence["language"],
            verb=mark["verb"] if mark else "",
            kind=mark["text"] if mark else "",
            text=textwrap.dedent("\n".join(body)) + "\n",
        )
        previous = ""


def all_snippets() -> list[Snippet]:
    """Return the code blocks of all pages."""
    return [snippet for page in list_pages() for snippet in list_snippets(page)]


def snippets_to_run(kind: str) -> list[Snippet]:
    """Return the code blocks of all pages that are run in one way, such as `cluster`."""
    return [snippet for snippet in all_snippets() if (snippet.verb, snippet.kind) == ("run", kind)]


def shell_script(text: str) -> str:
    """Return the commands of a block: lines after `$ `, their continuations, and here-documents.

    Other lines are output. Programs of this environment replace those in `.venv/bin`.
    """
    commands: list[str] = []
    lines = iter(text.splitlines())
    for line in lines:
        if not line.startswith("$ "):
            continue
        command = line.removeprefix("$ ")
        while command.endswith("\\"):
            command += "\n" + next(lines)
        commands.append(command)
        if here := re.search(r"<<-?\s*(['\"]?)(\w+)\1", command):
            for inner in lines:
                commands.append(inner)
                if inner == here[2]:
                    break
            else:
                raise ValueError(f"the here-document {here[2]} does not end: {command}")
    return "\n".join(commands).replace(".venv/bin/", f"{Path(sys.executable).parent}/")


def here_documents(text: str) -> list[str]:
    """Return the here-documents of a block's commands."""
    return [
        found[3] for found in re.finditer(r"<<-?\s*(['\"]?)(\w+)\1[^\n]*\n(.*?\n)\2(?:\n|$)", text, re.DOTALL)
    ]
