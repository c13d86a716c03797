# SPDX-License-Identifier: Apache-2.0
"""The documentation's commands for a cluster work on the cluster that `make demo` creates."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mizzen_local.assets import find_programs
from snippets import shell_script, snippets_to_run

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("cluster-demo")]


def blocks() -> list[object]:
    return [
        pytest.param(snippet.text, id=f"{snippet.page}-{number}")
        for number, snippet in enumerate(snippets_to_run("cluster"))
    ]


def run(environment: dict[str, str], *command: str) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=380, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Run `mizzen-local demo`, and yield the environment variables of a shell that uses its cluster."""
    environment = {
        **os.environ,
        "MIZZEN_LOCAL_DIR": str(tmp_path_factory.mktemp("demo") / "cluster"),
        "PATH": f"{find_programs()}:{os.environ['PATH']}",
    }
    try:
        assert "demo" in run(environment, f"{BIN}/mizzen-local", "demo")
        kubeconfig = run(environment, f"{BIN}/mizzen-local", "kubeconfig").strip()
        yield {**environment, "KUBECONFIG": kubeconfig}
    finally:
        run(environment, f"{BIN}/mizzen-local", "down")


@pytest.mark.parametrize("block", blocks())
def test_the_commands_of_a_block_succeed(demo: dict[str, str], block: str) -> None:
    run(demo, "bash", "-euo", "pipefail", "-c", shell_script(block))


def test_the_documentation_has_blocks_for_a_cluster() -> None:
    assert len(blocks()) >= 4
