# SPDX-License-Identifier: Apache-2.0
"""A mask is refilled only when it changes; at every step, it equals a mask that is refilled each time."""

from __future__ import annotations

import json
import threading
from typing import Any

import grammar_kit as gk
import numpy as np
import pytest
import torch
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from mizzen.core.outputs import GrammarCounts
from mizzen.core.sampling_params import Grammar, GrammarKind
from mizzen.engine.grammar.compiled import CompiledGrammar
from mizzen.engine.grammar.mask_threads import MaskThreads
from mizzen.engine.grammar.matchers import GrammarMasks
from mizzen.engine.grammar.schema_rules import REWRITTEN_PREFIXES, json_schema_to_ebnf
from mizzen.engine.grammar.xgrammar_backend import GrammarBuilder, GrammarTarget
from mizzen.engine.sampling.token_bitmask import TokenBitmasks
from mizzen.engine.uploader import Uploader

WORDS = -(-gk.VOCABULARY // 32)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "bounded": {"type": "string", "maxLength": 6},
        "any": {"type": "array"},
        "tree": {"$ref": "#/$defs/tree"},
    },
    "required": ["name", "any", "tree"],
    "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
}
CALL = {
    "type": "tag",
    "begin": "<tool_call>",
    "content": {"type": "json_schema", "json_schema": SCHEMA, "max_whitespace_cnt": 0},
    "end": "</tool_call>",
}
TAG = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [CALL]}
GRAMMARS = (
    Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    Grammar(GrammarKind.JSON_OBJECT),
    Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps({"type": "structural_tag", "format": TAG})),
    Grammar(GrammarKind.EBNF, 'root ::= "a" | "a" "b"* "c" | list\nlist ::= "[" (list ("," list)*)? "]"'),
    Grammar(GrammarKind.EBNF, "root ::= word | root sign root\nword ::= [a-z]{2,5}\nsign ::= [+*]"),
    Grammar(GrammarKind.REGEX, r"(a|ab|abc)*(x{2,7}y?)+[^z]*z"),
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[CompiledGrammar]:
    folder = tmp_path_factory.mktemp("tokenizer")
    gk.save_tokenizer(folder)
    target = GrammarTarget(folder=str(folder), vocab_size=gk.VOCABULARY, end_token_ids=(gk.EOS,))
    builder = GrammarBuilder(target, threads=1, nesting=64)
    return [CompiledGrammar(grammar.kind, grammar.text, builder.compile(grammar)) for grammar in GRAMMARS]


def masks() -> GrammarMasks:
    return GrammarMasks(gk.VOCABULARY, Uploader(torch.device("cpu")), GrammarCounts())


def started(grammar: CompiledGrammar, number: int) -> tuple[GrammarMasks, np.ndarray]:
    """Return masks in which `number` slots are at the start of a grammar, and these slots."""
    subject, slots = masks(), np.arange(number)
    for slot in slots.tolist():
        subject.start_slot(slot, grammar.for_request(slot), np.empty(0, np.int32))
    return subject, slots


def allowed(row: np.ndarray) -> np.ndarray:
    bits = np.unpackbits(row.view(np.uint8), bitorder="little", count=gk.VOCABULARY)
    return np.flatnonzero(bits)


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.lists(st.integers(0, len(GRAMMARS) - 1), min_size=1, max_size=6))
def test_refilled_rows_equal_masks_filled_at_every_step(
    compiled: list[CompiledGrammar], seed: int, kinds: list[int]
) -> None:
    rng, subject = np.random.default_rng(seed), masks()
    plain: dict[int, Any] = {}
    for slot, kind in enumerate(kinds):
        subject.start_slot(slot, compiled[kind], np.empty(0, np.int32))
        plain[slot] = xgrammar.GrammarMatcher(compiled[kind].compiled)
    for _ in range(40):
        slots = rng.permutation([slot for slot, matcher in plain.items() if matcher is not None])
        if not len(slots):
            return
        bits = subject.update_bitmasks(slots, np.zeros(len(slots), np.int64)).numpy()
        drawn = []
        for slot in slots.tolist():
            expected = np.zeros((1, WORDS), np.int32)
            plain[slot].fill_next_token_bitmask(expected)
            assert allowed(bits[slot]).tolist() == allowed(expected[0]).tolist()
            # The end token is rarely sampled, so that most rows stay within their grammars.
            choices = allowed(expected[0])
            continuing = choices[choices != gk.EOS]
            token = int(rng.choice(continuing if len(continuing) and rng.random() < 0.97 else choices))
            drawn.append(token)
            plain[slot].accept_token(token)
            if plain[slot].is_terminated():
                plain[slot] = None
        subject.add_launched_step(slots, lambda drawn=drawn: np.array(drawn))
    assert not subject.drain_failures()


def test_no_mask_is_refilled_within_a_string(compiled: list[CompiledGrammar]) -> None:
    for text, kind in (('{"name":"', 0), ('{"', 1), ('<tool_call>{"name":"', 2)):
        subject, sent = masks(), []
        subject._bitmasks.send_rows = lambda first, last, sent=sent: sent.append((first, last))  # type: ignore[method-assign]
        output = np.array([4 + byte for byte in text.encode()], np.int32)
        subject.start_slot(1, compiled[kind], output)
        where = np.array([1]), np.zeros(1, np.int64)
        subject.update_bitmasks(*where)
        for byte in b" a very long name, of thirty":
            subject.add_launched_step(where[0], lambda byte=byte: np.array([4 + byte]))
            subject.update_bitmasks(*where)
        assert sent == [(1, 2)]
        subject.add_launched_step(where[0], lambda: np.array([4 + ord("\\")]))
        subject.update_bitmasks(*where)
        assert sent == [(1, 2)] * 2


def test_rewritten_rules_exist_in_this_compiler_version() -> None:
    text = json_schema_to_ebnf(SCHEMA)
    assert all(new in text and old not in text for old, new in REWRITTEN_PREFIXES.items())


def test_undescribed_json_has_no_whitespace(compiled: list[CompiledGrammar]) -> None:
    for text in ('{"name":"","any":[1,2],"tree":[]}', '{"name":"","any":[{"a":1,"b":"c"}],"tree":[]}'):
        matcher = xgrammar.GrammarMatcher(compiled[0].compiled)
        assert matcher.accept_string(text)
        assert matcher.is_completed()
    assert not xgrammar.GrammarMatcher(compiled[0].compiled).accept_string('{"name":"","any":[1, 2]')
    call = '<tool_call>{"name":"x","any":[1,2],"tree":[[]]}</tool_call>'
    assert xgrammar.GrammarMatcher(compiled[2].compiled).accept_string(call)
    assert not xgrammar.GrammarMatcher(compiled[2].compiled).accept_string(call.replace(":", ": "))


@pytest.mark.parametrize("rows", [0, 1, 40])
def test_slow_rows_are_spread_over_threads_and_filled_once(rows: int) -> None:
    fillers: MaskThreads[int] = MaskThreads(4)
    both, threads, filled = threading.Barrier(2), set(), []

    def fill(batch: list[int]) -> None:
        threads.add(threading.get_ident())
        if rows > 1 and len(filled) < 2:
            filled.extend(batch)
            both.wait(60)  # the first call blocks until a second one has arrived
        else:
            filled.extend(batch)

    try:
        fillers._row_seconds = 1.0  # the previous step was slow
        fillers.fill_rows(list(range(rows)), fill)
        assert sorted(filled) == list(range(rows))
        assert len(threads) == 0 if not rows else len(threads) >= min(rows, 2)
    finally:
        fillers.close()


def test_bitmasks_keep_their_rows_as_they_grow() -> None:
    table = TokenBitmasks(70, torch.device("cpu"))
    table.ensure_rows(3)
    table.host[2] = 7
    table.send_rows(2, 3)
    table.ensure_rows(100)
    assert table.device.shape == (100, 3)
    assert table.device[2].tolist() == [7] * 3
    assert table.device[99].tolist() == [-1] * 3


def test_an_error_while_matching_fails_only_its_request(
    compiled: list[CompiledGrammar], monkeypatch: pytest.MonkeyPatch
) -> None:
    subject, slots = started(compiled[0], 4)
    before = subject.update_bitmasks(slots, slots).clone()
    token = int(allowed(before[0].numpy())[0])
    one_by_one = xgrammar.GrammarMatcher.accept_token

    def breaking(matchers: list[Any], tokens: list[int]) -> list[bool]:
        assert all(
            one_by_one(matcher, token) for matcher, token in zip(matchers[:2], tokens[:2], strict=True)
        )
        raise RuntimeError("broken")

    def accept(self: Any, token: int) -> bool:
        if self is subject._matchers[2].matcher:
            raise RuntimeError("broken")
        return one_by_one(self, token)

    monkeypatch.setattr(xgrammar.BatchGrammarMatcher, "batch_accept_token", staticmethod(breaking))
    monkeypatch.setattr(xgrammar.GrammarMatcher, "accept_token", accept)
    subject.add_launched_step(slots, lambda: np.full(4, token))
    after = subject.update_bitmasks(slots, slots)
    assert [(grammar.rid, reason) for grammar, reason in subject.drain_failures()] == [(2, "grammar: broken")]
    plain = xgrammar.GrammarMatcher(compiled[0].compiled)
    one_by_one(plain, token)
    expected = np.zeros((1, WORDS), np.int32)
    plain.fill_next_token_bitmask(expected)
    for slot in (0, 1, 3):
        assert allowed(after[slot].numpy()).tolist() == allowed(expected[0]).tolist()


def test_an_error_while_filling_fails_only_its_request(
    compiled: list[CompiledGrammar], monkeypatch: pytest.MonkeyPatch
) -> None:
    subject, slots = started(compiled[0], 3)
    fill, broken = xgrammar.GrammarMatcher.fill_next_token_bitmask, subject._matchers[1].matcher

    def fill_all(*given: Any) -> None:
        raise RuntimeError("broken")

    def fill_one(self: Any, bits: Any, index: int) -> bool:
        if self is broken:
            raise RuntimeError("broken")
        return fill(self, bits, index)

    monkeypatch.setattr(xgrammar.BatchGrammarMatcher, "batch_fill_next_token_bitmask", fill_all)
    monkeypatch.setattr(xgrammar.GrammarMatcher, "fill_next_token_bitmask", fill_one)
    bits = subject.update_bitmasks(slots, slots).numpy()
    assert [grammar.rid for grammar, _ in subject.drain_failures()] == [1]
    assert len(allowed(bits[1])) == gk.VOCABULARY
    assert 0 < len(allowed(bits[0])) == len(allowed(bits[2])) < gk.VOCABULARY
