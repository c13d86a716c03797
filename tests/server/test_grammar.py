# SPDX-License-Identifier: Apache-2.0
"""Grammars over the wire: rejections before the first token, metrics, and resumed requests."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mizzen.engine.loading.loader import load_engine
from mizzen.server.config import EngineConfig
from mizzen.server.engine_api import EngineProtocol
from mizzen.server.ranks.leader import StartupReporter, serve_engine
from mizzen.server.ranks.rank_status import RankStatus
from mizzen.server.status_block import StatusReader, StatusWriter, create_status_blocks
from mizzen.wire.messages import RefusalCode, Refused, Welcome

DEMO = Path(__file__).parents[2] / "models/demo"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"type": "integer", "maximum": 9}},
    "required": ["name", "size"],
}


def load(config: EngineConfig, startup: StartupReporter) -> EngineProtocol:
    return load_engine(config, startup.begin_phase, startup.report_progress)


class Served:
    """Engine with the demo model in a thread of this process, reachable over a socket."""

    def __init__(self, folder: Path) -> None:
        self.block = create_status_blocks(1)
        self.reader = StatusReader(self.block, 0)
        status = RankStatus(StatusWriter(self.block, 0))
        control, self.commands = os.pipe()
        config = EngineConfig(
            model=str(DEMO), device="cpu", threads=1, kv_cache_tokens=4096, max_running_requests=8,
            wire_bind=f"ipc://{folder}/wire", drain_timeout_seconds=0.0,
        )  # fmt: skip
        self.endpoint = config.wire_bind
        self.thread = threading.Thread(target=serve_engine, args=(config, status, control, load), daemon=True)
        self.thread.start()

    def close(self) -> None:
        os.write(self.commands, b"e")
        self.thread.join(60)
        assert not self.thread.is_alive()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    fixture = Served(tmp_path_factory.mktemp("wire"))
    yield fixture
    fixture.close()


@pytest.fixture
def gateway(served: Served, connect: Callable[[str], Any]) -> Any:
    fixture = connect(served.endpoint)
    fixture.expect(Welcome, 120)
    return fixture


def text(tokens: list[int]) -> str:
    from mizzen.gateway.text.tokenizer import Tokenizer

    return Tokenizer.load(DEMO).decode(tokens)


def test_an_answer_matches_its_schema_and_resumes_after_a_cut(gateway: Any, served: Served) -> None:
    options = {
        "temperature": 1.0,
        "seed": 5,
        "max_tokens": 60,
        "grammar": ("json_schema", json.dumps(SCHEMA)),
    }
    prompt = list(range(20, 40))
    gateway.generate(1, prompt, **options)
    gateway.generate(2, prompt, temperature=1.0, seed=5, max_tokens=6)
    gateway.until(lambda: {1, 2} <= gateway.ends.keys(), 120)
    full_tokens = gateway.tokens[1]
    assert set(json.loads(text(full_tokens[:-1]))) == {"name", "size"}
    prefix = full_tokens[: len(full_tokens) // 2]
    gateway.generate(3, [*prompt, *prefix], generated=len(prefix), **options)
    gateway.tokens[3] = list(prefix)  # new tokens are numbered after the known ones
    gateway.until(lambda: 3 in gateway.ends, 60)
    assert gateway.tokens[3] == full_tokens
    gateway.until(lambda: served.reader.read()["grammar_hits"] >= 1)
    snapshot = served.reader.read()
    assert snapshot["grammars_compiled"] >= 1
    assert snapshot["grammar_masks"] >= len(full_tokens)
    assert snapshot["grammar_seconds"] > 0


@pytest.mark.parametrize(
    ("kind", "written", "expected"),
    [
        ("json_schema", '{"not": {}}', '"not" at /'),
        ("json_schema", "{", "not JSON"),
        ("regex", "(a", "parenthesis"),
        ("ebnf", "root ::= x", '"x"'),
        ("structural_tag", "{}", "structural_tag"),
        ("poem", "", "grammar must be one of"),
    ],
)
def test_an_invalid_grammar_is_rejected_with_its_field(
    gateway: Any, kind: str, written: str, expected: str
) -> None:
    gateway.generate(9, [5, 6, 7], max_tokens=4, grammar=(kind, written))
    refused = gateway.expect(Refused, 120)
    assert (refused.rid, refused.code) == (9, RefusalCode.INVALID)
    assert refused.message.startswith("grammar")
    assert expected in refused.message
    assert not gateway.tokens[9]
    gateway.generate(
        9, [5, 6, 7], max_tokens=4, grammar=("regex", "[ab]{2}")
    )  # the request id can be used again
    gateway.until(lambda: 9 in gateway.ends, 60)
    assert re.fullmatch("[ab]{2}", text(gateway.tokens[9][:-1]))
