"""Code snippets of README.md and docs/ are run unchanged, except for the server's port."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from cli_support import ENVIRONMENT, ROOT, Served

pytestmark = [pytest.mark.xdist_group("cli")]
MARKED = re.compile(r"<!-- run: (\w+) -->\n```(\w+)\n(.*?)```", re.DOTALL)
COMMANDS = re.compile(
    r"(?:<!-- (run|skip): ([^\n]+?) -->\n)?```(?:console|sh|bash|shell)\n(.*?)```", re.DOTALL
)
KINDS = {"serve", "offline", "shell", "anywhere", "cluster"}
URL = "http://127.0.0.1:8000/v1"


@dataclass(frozen=True)
class Snippet:
    page: str
    kind: str
    language: str
    text: str


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def snippets() -> list[Snippet]:
    return [
        Snippet(str(page.relative_to(ROOT)), *match)
        for page in pages()
        for match in MARKED.findall(page.read_text(encoding="utf-8"))
    ]


def named(kind: str) -> list[object]:
    of_kind = [snippet for snippet in snippets() if snippet.kind == kind]
    return [pytest.param(entry, id=f"{entry.page}-{index}") for index, entry in enumerate(of_kind)]


def run(code: list[str]) -> str:
    result = subprocess.run(
        code, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=100, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def holds_an_answer(text: str, snippet: Snippet, answers: dict[str, str]) -> bool:
    """Return whether the output contains the trained answer to every question of the snippet."""
    questions = [question for question in answers if f'"{question}"' in snippet.text]
    questions += re.findall(r"Question: (.*?)\\n", snippet.text)
    if "json_schema" in snippet.text:  # these answers conform to a schema instead of being trained texts
        forms = re.findall(r'^\{"masts": ?[123]\} -\d', text, re.MULTILINE)
        return len(forms) == len(text.splitlines()) == 2
    return bool(questions) and all(answers[question] in text for question in questions)


@pytest.mark.parametrize("snippet", named("serve"))
def test_client_snippets_get_the_trained_answers(
    snippet: Snippet, served: Served, answers: dict[str, str]
) -> None:
    assert URL in snippet.text
    text = run([sys.executable, "-c", snippet.text.replace(URL, served.url)])
    assert holds_an_answer(text, snippet, answers)


@pytest.mark.parametrize("snippet", named("offline"))
def test_offline_snippets_get_the_trained_answers(snippet: Snippet, answers: dict[str, str]) -> None:
    assert holds_an_answer(run([sys.executable, "-c", snippet.text]), snippet, answers)


def commands(snippet: Snippet) -> str:
    """Return the commands of a snippet as a script, with the programs of this environment."""
    lines = [line.removeprefix("$ ") for line in snippet.text.splitlines() if line.startswith("$ ")]
    return "\n".join(lines).replace(".venv/bin/", f"{Path(sys.executable).parent}/")


@pytest.mark.parametrize("snippet", named("shell"))
def test_shell_snippets_print_the_trained_answers(snippet: Snippet, answers: dict[str, str]) -> None:
    text = run(["bash", "-euc", commands(snippet)])
    assert holds_an_answer(text, snippet, answers)


@pytest.mark.parametrize("snippet", named("anywhere"))
def test_snippets_that_need_no_server_succeed(snippet: Snippet) -> None:
    run(["bash", "-euc", commands(snippet)])


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_snippet_is_tested_or_has_a_reason(page: Path) -> None:
    for mark, text, block in COMMANDS.findall(page.read_text(encoding="utf-8")):
        assert mark, f"a block of commands without a mark; see docs/contributing.md: {block}"
        assert text in KINDS if mark == "run" else len(text) > 15, text


def test_every_kind_of_snippet_occurs_in_the_docs() -> None:
    assert {snippet.kind for snippet in snippets()} == KINDS
