# SPDX-License-Identifier: Apache-2.0
"""Clients in JavaScript against a gateway with the demo model: tools, typed answers, second turns."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

pytestmark = pytest.mark.xdist_group("demo-engine")

SCRIPTS = Path(__file__).parent / "node_clients"
ANSWERS = [{"word": word, "masts": masts} for word in ("mast", "hull") for masts in (1, 2, 3, "one", "two")]
PARTS_OF_A_SHIP = ["A mast is part of a ship.", "A hull is part of a ship."]

Run = Callable[..., Any]


@pytest.fixture(scope="session")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the scripts and their packages, which npm installs into the user's cache once."""
    if shutil.which("npm") is None and not os.environ.get("CI"):
        pytest.skip("needs npm")
    lock = hashlib.sha256((SCRIPTS / "package-lock.json").read_bytes()).hexdigest()[:16]
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(base) / "mizzen-local" / "node" / f"gateway-clients-{lock}"
    cache.mkdir(parents=True, exist_ok=True)
    folder = tmp_path_factory.mktemp("node_clients")
    shutil.copytree(SCRIPTS, folder, dirs_exist_ok=True)
    with FileLock(cache / "lock"):
        if not (cache / "node_modules").is_dir():
            with tempfile.TemporaryDirectory(dir=cache) as work:  # so that no incomplete folder is ever used
                for name in ("package.json", "package-lock.json"):
                    shutil.copy2(SCRIPTS / name, work)
                command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
                subprocess.run(command, cwd=work, check=True, timeout=240)
                Path(work, "node_modules").rename(cache / "node_modules")
    (folder / "node_modules").symlink_to(cache / "node_modules")
    return folder


@pytest.fixture
def run_script(live_demo: Run, scripts: Path) -> Run:
    """Return a function that runs a script against a new gateway, and returns what the script reports."""

    async def run(script: str, *arguments: str, **options: Any) -> Any:
        gateway = await live_demo(tool_parser="hermes", **options)
        process = await asyncio.create_subprocess_exec(
            "node", script, gateway.url, *arguments,
            cwd=scripts, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            output, errors = await asyncio.wait_for(process.communicate(), 180)
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode == 0, errors.decode()
        return json.loads(output)

    return run


def ignored(report: Any) -> set[str]:
    return {field for request in report["requests"] for field in request["ignored"]}


async def test_openai_node_parses_answers_and_sends_them_back(run_script: Run) -> None:
    report = await run_script("openai_parse.mjs")
    assert {request["status"] for request in report["requests"]} == {200}
    assert len(report["parsed"]) == len(report["responses"]) == 2
    assert all(fact in ANSWERS for fact in report["parsed"] + report["responses"])
    assert [call["word"] in ("mast", "hull") for call in report["calls"]] == [True]
    assert {
        "messages[].parsed", "messages[].tool_calls[].function.parsed_arguments", "service_tier", "verbosity",
    } <= ignored(report)  # fmt: skip


@pytest.mark.parametrize("api", ["chat_completions", "responses"])
async def test_openai_agents_js_calls_a_tool_and_continues(run_script: Run, api: str) -> None:
    report = await run_script("agents_turns.mjs", api)
    assert {request["status"] for request in report["requests"]} == {200}
    assert report["outputs"][0] in PARTS_OF_A_SHIP
    assert len(report["answers"]) == 2
    assert all(fact in ANSWERS for fact in report["answers"])
    if api == "chat_completions":
        assert "messages[].content[].role" in ignored(report)


def references(report: Any) -> list[Any]:
    items = [item for request in report["requests"] for item in request["body"]["input"]]
    return [item for item in items if item.get("type") == "item_reference"]


@pytest.mark.parametrize("stored", [False, True])
async def test_ai_sdk_continues_after_a_tool_call(run_script: Run, stored: bool) -> None:
    """By default the SDK refers to items of earlier answers; without a store it sends the items."""
    options = {"response_store_seconds": 60} if stored else {}
    report = await run_script("ai_sdk_turns.mjs", json.dumps({} if stored else {"store": False}), **options)
    assert report["error"] is None
    assert {request["status"] for request in report["requests"]} == {200}
    assert report["outputs"][0] in PARTS_OF_A_SHIP
    assert len(report["texts"]) == 2
    assert bool(references(report)) == stored
    assert "text.verbosity" in ignored(report)


async def test_ai_sdk_learns_that_store_must_be_false(run_script: Run) -> None:
    report = await run_script("ai_sdk_turns.mjs", "{}")
    assert references(report)
    assert "store: false" in report["error"]
