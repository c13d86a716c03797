# SPDX-License-Identifier: Apache-2.0
"""The grammar compile service limits time and memory, caches its results, and never blocks the engine."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grammar_kit as gk
import numpy as np
import pytest
import torch

from mizzen.core.outputs import GrammarCounts
from mizzen.core.sampling_params import Grammar, GrammarKind
from mizzen.engine.grammar.compile_service import GrammarCompiler
from mizzen.engine.grammar.compiled import CompiledGrammar
from mizzen.engine.grammar.limits import GrammarLimits
from mizzen.engine.grammar.matchers import GrammarMasks
from mizzen.engine.grammar.xgrammar_backend import GrammarBuilder, GrammarTarget
from mizzen.engine.uploader import Uploader

LARGE = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"enum": [f"number {i}" for i in range(9000)]}))


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


def compiled_text(compiler: GrammarCompiler, grammar: Grammar) -> str:
    results = gk.outcome(compiler, grammar).grammar
    assert results is not None
    return results.text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vocabulary")
    gk.save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def builder(folder: Path) -> GrammarBuilder:
    target = GrammarTarget(folder=str(folder), vocab_size=gk.VOCABULARY, end_token_ids=(gk.EOS,))
    return GrammarBuilder(target, threads=1, nesting=64)


@pytest.fixture
def compiler(folder: Path, request: pytest.FixtureRequest) -> Iterator[GrammarCompiler]:
    new_compiler = gk.compiler(folder, **getattr(request, "param", {}))
    yield new_compiler
    new_compiler.close()


@pytest.mark.parametrize("compiler", [{"cache_bytes": 20_000, "max_rejections": 2}], indirect=True)
def test_the_cache_is_bounded_and_evicts_the_least_recently_used(compiler: GrammarCompiler) -> None:
    first, second = regex("first"), regex("second")
    for grammar in (first, second, first):
        assert compiled_text(compiler, grammar) == grammar.text
    assert compiler.counts.compiled == 2
    for i in range(8):
        gk.outcome(compiler, regex(f"other{i}"))
        gk.outcome(compiler, first)
    assert compiler._cache_bytes <= 20_000
    compiled = compiler.counts.compiled
    gk.outcome(compiler, first)
    assert compiler.counts.compiled == compiled
    gk.outcome(compiler, second)
    assert compiler.counts.compiled == compiled + 1
    wrong = [regex("(" * (1 + i)) for i in range(4)]
    for grammar in (*wrong, wrong[-1]):
        assert "parenthesis" in gk.outcome(compiler, grammar).error
    assert compiler.counts.refused == 4
    assert len(compiler._rejected) == 2


@pytest.mark.parametrize("compiler", [{"compile_seconds": 0.002}], indirect=True)
def test_a_compilation_that_takes_too_long_is_killed(compiler: GrammarCompiler) -> None:
    fault = gk.outcome(compiler, LARGE).error
    assert fault.startswith("compiling it takes more than 0.002 s")


@pytest.mark.parametrize("compiler", [{"compile_bytes": 1 << 20, "compile_seconds": 60}], indirect=True)
def test_a_compilation_that_takes_too_much_memory_is_killed(compiler: GrammarCompiler) -> None:
    outcome = gk.outcome(compiler, LARGE)
    assert outcome.grammar is None
    assert "1 MiB" in outcome.error


@pytest.mark.parametrize("compiler", [{"compiled_bytes": 4000, "compile_seconds": 120}], indirect=True)
def test_large_compiled_grammars_are_rejected_and_small_ones_pass(compiler: GrammarCompiler) -> None:
    assert "more than the maximum of 4000" in gk.outcome(compiler, LARGE).error
    assert compiled_text(compiler, regex("small")) == "small"


@pytest.mark.parametrize("compiler", [{"mask_seconds": 0.0}], indirect=True)
def test_grammars_with_slow_masks_are_rejected_in_the_sandbox(compiler: GrammarCompiler) -> None:
    assert "ms of CPU time" in gk.outcome(compiler, regex("((a*)*)*b")).error


def test_the_sandbox_restarts_after_it_dies(compiler: GrammarCompiler) -> None:
    assert gk.outcome(compiler, regex("before")).grammar
    process = compiler._sandbox._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    gk.wait(lambda: process.poll() is not None)
    assert gk.outcome(compiler, regex("after")).grammar
    assert compiler._sandbox._process is not process


@pytest.mark.parametrize("compiler", [{"start_seconds": 0.0001}], indirect=True)
def test_a_sandbox_that_starts_too_late_does_not_reject_the_grammar(compiler: GrammarCompiler) -> None:
    outcome = gk.outcome(compiler, regex("late"))
    assert outcome.temporary
    assert "does not start" in outcome.error
    assert regex("late") not in compiler._rejected


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_sandbox_does_not_import_torch(compiler: GrammarCompiler) -> None:
    assert gk.outcome(compiler, regex("light")).grammar
    process = compiler._sandbox._process
    assert process is not None
    assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
    assert "Threads:\t1\n" in Path(f"/proc/{process.pid}/status").read_text()


def test_texts_that_would_crash_a_parser_are_rejected(compiler: GrammarCompiler) -> None:
    deep = "[" * 100_000
    for kind, text in (
        (GrammarKind.JSON_SCHEMA, deep),
        (GrammarKind.JSON_SCHEMA, '{"items":' * 70 + "{}" + "}" * 70),
        (GrammarKind.EBNF, "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000),
        (GrammarKind.REGEX, "(" * 50_000 + "a" + ")" * 50_000),
        (GrammarKind.STRUCTURAL_TAG, deep),
        (GrammarKind.EBNF, 'root ::= "a" [\\x00-'),
        (GrammarKind.REGEX, "[^\\x00-\\U0010ffff]"),
    ):
        outcome = gk.outcome(compiler, Grammar(kind, text))
        assert outcome.grammar is None, text[:40]
        assert outcome.error
    assert gk.outcome(compiler, regex("still here")).grammar


def test_cancelling_removes_a_grammar_from_the_queue(folder: Path) -> None:
    compiler = gk.compiler(folder, workers=1, max_waiting=2)
    try:
        with compiler._sandbox._lock:  # while the test holds the lock, no grammar is compiled
            for text in ("one", "two"):
                assert compiler.find_or_compile(regex(text)) is None
            full = compiler.find_or_compile(regex("three"))
            assert full is not None
            assert full.temporary
            compiler.cancel(regex("two"))
            assert compiler.find_or_compile(regex("three")) is None
        assert gk.outcome(compiler, regex("three")).grammar
        assert gk.outcome(compiler, regex("one")).grammar
        assert compiler.counts.compiled == 2
    finally:
        compiler.close()


def test_an_abandoned_grammar_frees_its_place_once_compiled(folder: Path) -> None:
    compiler = gk.compiler(folder, workers=1, max_waiting=1)
    try:
        with compiler._sandbox._lock:  # while the test holds the lock, no grammar is compiled
            assert compiler.find_or_compile(regex("left")) is None
            future = compiler._tasks[regex("left")].future
            gk.wait(future.running)
            compiler.cancel(regex("left"))
        gk.wait(future.done)
        # The queue has a free place again, so the next grammar is not rejected.
        assert compiler.find_or_compile(regex("next")) is None
        assert gk.outcome(compiler, regex("next")).grammar
        assert compiler.find_or_compile(regex("left")) is not None  # cached for the next request
        assert not compiler._abandoned
    finally:
        compiler.close()


def test_the_engine_does_not_repeat_the_sandboxs_checks(
    compiler: GrammarCompiler, builder: GrammarBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = regex("[a-c]{2,11}(, [a-c]{2,11})*")
    alone, tried = builder.check_and_compile(words)
    assert tried, "the compiler gets lookaheads for it"

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a pattern may take seconds to be tried, with the interpreter's lock held")

    monkeypatch.setattr("mizzen.engine.grammar.xgrammar_backend.check_schema", never)
    monkeypatch.setattr("mizzen.engine.grammar.xgrammar_backend.check_pattern", never)
    monkeypatch.setattr("mizzen.engine.grammar.xgrammar_backend.add_lookaheads", never)
    results = gk.outcome(compiler, words).grammar
    assert results is not None
    assert str(results.compiled.grammar) == str(alone.grammar)
    assert results.compiled.memory_size_bytes == alone.memory_size_bytes
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"type": "integer"}}}
    for kind, text in (
        (GrammarKind.JSON_SCHEMA, '{"type": "integer"}'),
        (GrammarKind.REGEX, "a+"),
        (GrammarKind.STRUCTURAL_TAG, json.dumps(tag)),
    ):
        assert compiled_text(compiler, Grammar(kind, text)) == text
    assert "not enforced" in gk.outcome(compiler, Grammar(GrammarKind.JSON_SCHEMA, '{"not": {}}')).error


def endless(number: int) -> Grammar:
    """Return a schema, different for each `number`, whose pattern backtracks longer than any time limit."""
    names, pattern = {"a" * 60 + str(number): {}}, {"^(a|a)*b$": {}}
    schema = {"type": "object", "properties": names, "patternProperties": pattern}
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def test_slow_grammars_do_not_delay_quick_ones(folder: Path) -> None:
    compiler = gk.compiler(folder, workers=1, quick_seconds=3.0, compile_seconds=1000.0)
    try:
        for number in range(2):
            assert compiler.find_or_compile(endless(number)) is None
        assert gk.outcome(compiler, regex("quick")).grammar
        assert all(compiler.find_or_compile(endless(number)) is None for number in range(2))
        assert gk.outcome(compiler, regex("another")).grammar
    finally:
        compiler.close()  # also kills the running compilation, which would take another 15 minutes


def test_many_slow_grammars_leave_places_for_quick_ones(folder: Path) -> None:
    compiler = gk.compiler(
        folder,
        workers=2,
        quick_seconds=1.0,
        busy_quick_seconds=0.3,
        busy_queue_length=2,
        max_slow_waiting=4,
        compile_seconds=1000.0,
    )
    try:
        slow = [endless(number) for number in range(10)]
        assert all(compiler.find_or_compile(grammar) is None for grammar in slow)
        turned_away = set()

        def settled() -> bool:
            for grammar in slow:
                outcome = None if grammar in turned_away else compiler.find_or_compile(grammar)
                if outcome is not None:
                    assert outcome.temporary
                    assert "slow grammars wait" in outcome.error
                    turned_away.add(grammar)
            return len(turned_away) >= 2

        compiler.find_or_compile(regex("quick"))
        gk.wait(settled)
        assert len(compiler._slow_grammars) == 4
    finally:
        compiler.close()


@pytest.mark.skipif(sys.platform != "linux", reason="processes take their children along on Linux")
def test_a_grammar_is_retried_if_its_sandbox_dies(folder: Path) -> None:
    compiler = gk.compiler(folder, workers=1, quick_seconds=1000.0, compile_seconds=1000.0)
    try:
        assert gk.outcome(compiler, regex("before")).grammar
        assert compiler.find_or_compile(endless(0)) is None
        killed = []
        for _ in range(2):
            process = gk.wait(lambda: (p := compiler._sandbox._process) not in killed and p)
            tried = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            gk.wait(lambda tried=tried: tried.read_text().strip())
            killed.append(process)
            process.kill()
        outcome = gk.outcome(compiler, endless(0))
        assert outcome.temporary
        assert "try again" in outcome.error
    finally:
        compiler.close()


def test_a_busy_machine_refuses_a_grammar_only_for_the_moment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = gk.compiler(folder, quick_seconds=10.0, compile_seconds=10.0, wall_factor=0.0)
    try:
        assert gk.outcome(compiler, regex("before")).grammar
        monkeypatch.setattr("mizzen.engine.grammar.compile_sandbox.SPARE_SECONDS", 1e-4)
        outcome = gk.outcome(compiler, regex("a+"))
        assert outcome.temporary
        assert "busy" in outcome.error
        monkeypatch.undo()
        assert gk.outcome(compiler, regex("a+")).grammar
    finally:
        compiler.close()


def test_models_without_end_token_or_tokenizer_reject_grammars(folder: Path, tmp_path: Path) -> None:
    for new_compiler, reason in (
        (GrammarCompiler(str(folder), gk.VOCABULARY, ()), "no end token"),
        (GrammarCompiler(str(tmp_path), gk.VOCABULARY, (gk.EOS,)), "no tokenizer.json"),
    ):
        assert reason in gk.outcome(new_compiler, regex("a")).error
        new_compiler.close()


def test_a_compiled_grammar_pickles_as_the_plain_one(builder: GrammarBuilder) -> None:
    compiled = CompiledGrammar(GrammarKind.REGEX, "a+", builder.compile(regex("a+")))
    assert pickle.loads(pickle.dumps(compiled)) == regex("a+")
    assert hash(regex("a+")) == hash(Grammar(GrammarKind.REGEX, "a+"))


class MaskBench:
    """Grammar masks on the CPU, driven step by step; `allowed` returns the tokens that they allow."""

    def __init__(self, builder: GrammarBuilder, **limits: float) -> None:
        self.builder = builder
        upload = Uploader(torch.device("cpu"))
        self.masks = GrammarMasks(gk.VOCABULARY, upload, GrammarCounts(), GrammarLimits(**limits))

    def start(self, slot: int, text: str, output: bytes = b"") -> CompiledGrammar:
        compiled = CompiledGrammar(GrammarKind.REGEX, text, self.builder.compile(regex(text)), slot)
        self.masks.start_slot(slot, compiled, np.array([4 + byte for byte in output], np.int32))
        return compiled

    def step(self, slots: list[int], drawn: bytes) -> None:
        tokens = np.array([4 + byte for byte in drawn])
        self.masks.add_launched_step(np.array(slots), lambda: tokens)

    def allowed(self, slots: list[int]) -> list[set[int]]:
        mask = self.masks.update_bitmasks(np.array(slots), np.zeros(len(slots), np.int64)).numpy()[slots]
        self.masks.mark_applied()
        rows = np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little")
        return [set(np.flatnonzero(row).tolist()) for row in rows]


def ids(text: bytes) -> set[int]:
    return {4 + byte for byte in text}


def test_masks_follow_each_slot_and_a_failure_affects_only_its_own_slot(builder: GrammarBuilder) -> None:
    bench = MaskBench(builder)
    bench.start(3, "xyz")
    bad = bench.start(5, "[pq]+")
    bench.start(8, "hi!", b"h")
    assert bench.allowed([3, 5, 8]) == [ids(b"x"), ids(b"pq"), ids(b"i")]
    bench.step([3, 5, 8, 9], b"xzi?")
    everything = set(range(32 * (gk.VOCABULARY // 32)))
    assert bench.allowed([3, 5, 8]) == [ids(b"y"), everything, ids(b"!")]
    ((grammar, reason),) = bench.masks.drain_failures()
    assert grammar is bad
    assert "does not conform" in reason
    bench.step([3, 8], b"y!")
    bench.start(5, "new")
    assert bench.allowed([8, 5]) == [{gk.EOS}, ids(b"n")]
    bench.masks.add_launched_step(np.array([8]), lambda: np.array([gk.EOS]))
    assert bench.allowed([8]) == [everything]
    assert not bench.masks.drain_failures()


def test_only_the_row_with_a_slow_mask_fails(builder: GrammarBuilder) -> None:
    bench = MaskBench(builder, mask_seconds=0.0)
    bench.start(1, "[pq]+")
    bench.allowed([1])  # slower than 0 s: from now on rows are timed one by one
    slow = bench.start(2, "(a|b|c|[d-z]){1,60}")
    assert bench.allowed([2]) != [set()]
    assert slow in [grammar for grammar, _ in bench.masks.drain_failures()]


def test_filled_masks_are_counted(builder: GrammarBuilder) -> None:
    bench = MaskBench(builder)
    bench.start(0, "ab")
    bench.allowed([0])
    assert bench.masks._counts.masks == 1
