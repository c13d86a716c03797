# SPDX-License-Identifier: Apache-2.0
"""Each extra is enough for its programs, and a missing extra is one sentence that names it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from built_distribution import ROOT
from installations import blocked_modules, run_with

pytestmark = pytest.mark.xdist_group("packaging")
URL = "http://127.0.0.1:1/v1"
PROGRAMS = {
    "mizzen": "mizzen.cli",
    "mizzen-operator": "mizzen_operator.cli",
    "mizzen-local": "mizzen_local.cli",
}
MISSING = [
    ("serve demo", "", "gateway,worker"),
    ("serve demo", "worker", "gateway,worker"),
    ("serve demo", "gateway", "gateway,worker"),
    ("engine --model demo", "", "worker"),
    ("engine --model demo", "gateway", "worker"),
    ("gateway --served-name demo", "", "gateway"),
    ("gateway --served-name demo", "worker", "gateway"),
    ("complete demo Hi", "", "gateway,worker"),
    ("chat demo", "gateway", "gateway,worker"),
    ("mizzen-operator --help", "", "operator"),
    ("mizzen-operator check --help", "gateway", "operator"),
    ("mizzen-local up", "", "local"),
    ("mizzen-local demo", "operator", "local"),
    ("mizzen-local status", "", "local"),
]
ENOUGH = [
    ("mizzen --help", "", 0, "inspect"),
    ("mizzen inspect demo", "", 0, "2,048 tokens"),
    (f"mizzen complete {URL} Hi", "", 3, "no server answers"),
    (f"mizzen chat {URL}", "", 3, "no server answers"),
    ("mizzen fetch hf://org/model --to x --attempts 1", "", 1, "does not answer"),
    ("mizzen gateway --served-name demo --engine tcp://192.0.2.1:5", "gateway", 1, "needs CURVE keys"),
    ("mizzen-operator --help", "operator", 0, "--lease-name"),
    ("mizzen-local --help", "", 0, "kubectl"),
    ("mizzen-local status", "operator", 1, "down"),
]


def run_program(line: str, extras: str, folder: Path) -> tuple[int, str, str]:
    program, *arguments = line.split()
    code = f"import sys; from {PROGRAMS[program]} import main; sys.argv[0] = {program!r}; main()"
    run = run_with(extras, code, arguments, folder)
    return run.returncode, run.stdout, run.stderr


@pytest.mark.parametrize(("line", "extras", "needed"), MISSING)
def test_a_missing_extra_is_one_sentence(
    line: str, extras: str, needed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIZZEN_LOCAL_DIR", "/dev/null/cluster")  # a cluster cannot be started there
    code, output, errors = run_program(line if "-" in line.split()[0] else f"mizzen {line}", extras, tmp_path)
    assert (code, output) == (1, "")
    (sentence,) = errors.splitlines()
    assert re.search(
        rf"needs the Python module '\w+', which is not installed: pip install 'mizzen\[{needed}\]'$", sentence
    )


@pytest.mark.parametrize(("line", "extras", "code", "text"), ENOUGH)
def test_an_extra_is_enough_for_its_programs(
    line: str, extras: str, code: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIZZEN_LOCAL_DIR", str(tmp_path / "cluster"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    result, output, errors = run_program(line, extras, tmp_path)
    assert result == code, errors
    assert text in output + errors
    assert "Traceback" not in errors


def test_offline_inference_names_the_missing_extra() -> None:
    run = run_with("gateway", "from mizzen import LLM")
    assert run.stderr.splitlines()[-1] == (
        "ImportError: mizzen.LLM needs the Python module 'torch', which is not installed: "
        "pip install 'mizzen[worker]'"
    )
    assert "During handling" not in run.stderr


def test_the_worker_extra_is_enough_for_offline_inference_and_the_engine() -> None:
    code = """
import mizzen.server.supervisor, mizzen.server.ranks.leader
from mizzen import LLM, SamplingParams
with LLM("demo", device="cpu", kv_cache_tokens=512) as llm:
    chat = llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=4))
    print(chat[0].token_ids != [])
"""
    run = run_with("worker", code)
    assert run.stdout == "True\n", run.stderr


def test_a_module_of_mizzen_that_is_missing_is_no_missing_extra(tmp_path: Path) -> None:
    code = "import sys; sys.modules['mizzen.fetch.run'] = None; from mizzen.cli import main; main()"
    run = run_with("", code, ["fetch", "s3://bucket", "--to", "x"], tmp_path)
    assert "Traceback" in run.stderr
    assert "pip install" not in run.stderr


def test_installations_differ_in_the_modules_that_matter() -> None:
    assert {"fastapi", "torch", "kopf", "yaml", "zmq"} <= set(blocked_modules(""))
    assert not {"httpx", "msgspec", "numpy", "typer"} & set(blocked_modules(""))
    assert "fastapi" in blocked_modules("worker")
    assert "torch" in blocked_modules("gateway")


def test_the_readme_lists_every_extra_for_users() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert listed >= set(project["optional-dependencies"]) - {"test", "docs"}
