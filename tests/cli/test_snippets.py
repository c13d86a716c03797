# SPDX-License-Identifier: Apache-2.0
"""Code blocks of the documentation are run unchanged, except for the server's port.

`tests/cluster/test_commands.py` runs those for a local cluster, `tests/e2e/test_quickstart.py` those for a
cluster with containers, and `tests/chart/test_manifests_in_docs.py` checks the manifests.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_support import ENVIRONMENT, ROOT, Served

from snippets import (
    MARKED_LANGUAGES,
    Snippet,
    all_snippets,
    here_documents,
    list_pages,
    list_snippets,
    shell_script,
    snippets_to_run,
)

pytestmark = [pytest.mark.xdist_group("cli")]
KINDS = {
    *("serve", "offline", "python", "shell", "anywhere"),  # run here
    *("cluster", "local", "e2e", "e2e-background"),
}
URL = "http://127.0.0.1:8000/v1"


def named(kind: str) -> list[object]:
    of_kind = snippets_to_run(kind)
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


@pytest.mark.parametrize("snippet", named("python"))
def test_offline_snippets_print_something(snippet: Snippet) -> None:
    assert run([sys.executable, "-c", snippet.text]).strip()


@pytest.mark.parametrize("snippet", named("shell"))
def test_shell_snippets_print_the_trained_answers(snippet: Snippet, answers: dict[str, str]) -> None:
    text = run(["bash", "-euc", shell_script(snippet.text)])
    assert holds_an_answer(text, snippet, answers)


@pytest.mark.parametrize("snippet", named("anywhere"))
def test_snippets_that_need_no_server_succeed(snippet: Snippet) -> None:
    run(["bash", "-euc", shell_script(snippet.text)])


@pytest.mark.parametrize("page", list_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_that_readers_run_is_tested_or_has_a_reason(page: Path) -> None:
    for snippet in list_snippets(page):
        place = f"{snippet.page}:{snippet.line}"
        if snippet.language in MARKED_LANGUAGES:
            assert snippet.verb, f"{place}: a block without a mark; see docs/contributing.md"
            known = snippet.kind in KINDS if snippet.verb == "run" else len(snippet.kind) > 15
            assert known, f"{place}: {snippet.kind}"
        else:
            assert not snippet.verb, f"{place}: a mark before a block that nothing runs"
            assert "\n$ " not in f"\n{snippet.text}", f"{place}: commands need a language, such as console"


def test_every_kind_of_snippet_occurs_in_the_docs() -> None:
    assert {snippet.kind for snippet in all_snippets() if snippet.verb == "run"} == KINDS


def test_only_the_quick_start_has_blocks_for_the_end_to_end_test() -> None:
    pages = {snippet.page for snippet in all_snippets() if snippet.kind.startswith("e2e")}
    assert pages == {"docs/quickstart.md"}


def test_the_commands_of_a_block_include_continuations_and_here_documents() -> None:
    block = "$ one \\\n    --two\noutput\n$ cat <<'EOF'\nkind: X\n$ not a command\nEOF\noutput\n$ three\n"
    expected = "one \\\n    --two\ncat <<'EOF'\nkind: X\n$ not a command\nEOF\nthree"
    assert shell_script(block) == expected
    assert here_documents(block) == ["kind: X\n$ not a command\n"]
