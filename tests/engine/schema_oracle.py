# SPDX-License-Identifier: Apache-2.0
"""Random schemas and patterns, texts of their grammars, and the check that the texts conform.

The package jsonschema and Python's `re` judge the texts, so that no code of the engine judges itself.
"""

from __future__ import annotations

import json
import random
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import xgrammar
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from mizzen.core.sampling_params import Grammar, GrammarKind
from mizzen.engine.grammar.xgrammar_backend import GrammarBuilder, GrammarTarget

PIECES = (
    '",', '":', '"}', '{"', '"]', '","', "ab", "abc", "aaaaaaaa", "12", "0.1", "true", "null", "\n", "\t",
    "\r\n", "é", "éa", "😀", "\u00a0", "\u2028", "\ufeff", "\u0085", '\\"', "\\n", "\\u0061", "\\\\",
    " a", "x-", "-1", "e+", "]}",
)  # fmt: skip
VOCABULARY = 256 + len(PIECES) + 1
EOS = VOCABULARY - 1
TOKENS = [*(bytes([byte]) for byte in range(256)), *(piece.encode() for piece in PIECES), b"\xff<eos>"]
CLOSING = {token for token, text in enumerate(TOKENS) if text in (b'"', b"}", b"]", b'"}', b'"]', b'",')}
"""Tokens that end a string, object or array."""
WALK_SECONDS = 0.1
"""CPU seconds after which a text is given up: a pattern that can be read in many ways is slow to match."""


JUDGE_SECONDS = 0.2
"""CPU seconds after which `re` gives up a text: it takes exponential time for some patterns."""


class TooSlowError(Exception):
    """The judge took more than JUDGE_SECONDS for a text."""


@contextmanager
def limit_cpu_time() -> Iterator[None]:
    """Raise TooSlowError after JUDGE_SECONDS of CPU time; only in the main thread."""

    def stop(number: int, frame: object) -> None:
        raise TooSlowError

    previous = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, JUDGE_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


class OracleBuilder(GrammarBuilder):
    """A grammar builder whose tokens are all bytes and some texts that a grammar could misread."""

    def __init__(self) -> None:
        self._target = GrammarTarget(folder="", vocab_size=VOCABULARY, end_token_ids=(EOS,))
        self._nesting = 64
        self._compiler = self._make_compiler(TOKENS, 1)


def walk(compiled: xgrammar.CompiledGrammar, rng: random.Random, most: int = 100) -> str | None:
    """Return a text of random allowed tokens.

    Return None if it does not end within 3 times `most` tokens, or takes more than WALK_SECONDS of CPU time.
    """
    end = time.process_time() + WALK_SECONDS
    matcher = xgrammar.GrammarMatcher(compiled)
    bits = np.empty((1, -(-VOCABULARY // 32)), np.int32)
    text, wild = bytearray(), rng.random() < 0.5
    for step in range(3 * most):
        matcher.fill_next_token_bitmask(bits)
        if time.process_time() > end:
            return None
        allowed = np.flatnonzero(
            np.unpackbits(bits.view(np.uint8), bitorder="little", count=VOCABULARY)
        ).tolist()
        if not allowed and text in (b"", b"<"):
            return None  # nothing conforms: the engine refuses such a grammar on trial
        assert allowed, f"nothing may follow {bytes(text)!r}"
        closing = [token for token in allowed if token in CLOSING or token == EOS]
        if closing and (step > most or rng.random() < (0.05 if wild else 0.25)):
            token = rng.choice(closing)
        else:
            token = rng.choice(allowed)
        assert matcher.accept_token(token)
        if token == EOS:
            return text.decode()
        text += TOKENS[token]
    return None


def allows(builder: GrammarBuilder, grammar: Grammar, text: str) -> bool:
    """Return whether a grammar allows a text, byte by byte."""
    matcher = xgrammar.GrammarMatcher(builder.compile(grammar))
    return all(matcher.accept_token(token) for token in (*text.encode(), EOS))


# ── generated patterns ────────────────────────────────────────────────────────────────────────────────────


def random_pattern(rng: random.Random) -> str:
    """Return a random regular expression, often with anchors."""
    alternatives = [_pattern_sequence(rng, 2) for _ in range(rng.choice((1, 1, 1, 2)))]
    before, after = rng.choice((("^", "$"), ("^", "$"), ("", ""), ("^", "")))
    if len(alternatives) > 1 and rng.random() < 0.5:
        return f"^({'|'.join(alternatives)})$"
    return "|".join(before + alternative + after for alternative in alternatives)


def _pattern_sequence(rng: random.Random, depth: int) -> str:
    return "".join(_pattern_part(rng, depth) for _ in range(rng.choice((1, 1, 2, 3))))


def _pattern_part(rng: random.Random, depth: int) -> str:
    if depth and rng.random() < 0.35:
        # repetitions inside repeated groups can be read in too many ways to be matched quickly
        counts = (
            rng.choice(("", "?", "?")) if depth == 1 else rng.choice(("", "?", "?", "*", "+", "{2}", "{0,3}"))
        )
        inner_depth = 0 if counts in ("*", "+", "{2}", "{0,3}") else depth - 1
        inner = "|".join(_pattern_sequence(rng, inner_depth) for _ in range(rng.choice((1, 1, 2))))
        return rng.choice(("(", "(?:")) + inner + ")" + counts
    atom = rng.choice(
        ("a", "b", "0", "-", "é", "😀", r"\.", r"\-", r"\d", r"\w", r"\s", r"\S", r"\D", r"\W", ".", "[a-c]",
         "[^a]", "[0-9a-f]", r"[\w.-]", r"[^\s,]", r"[\s\S]", r"[^\W_]", "[é-ü ]",
         r"[\]\[]", "{", r"\x41", r"\u00e9")
    )  # fmt: skip
    counts = ("", "", "", "?", "*", "+", "{2}", "{1,4}", "{0,2}", "{3,}", "+?")
    long_counts = ("{1,130}", "{60,100}", "{0,200}", "{66}")
    is_long = depth == 2 and rng.random() < 0.15
    return atom + rng.choice(long_counts if is_long else counts)


_OUTSIDE = {"d": "[0-9]", "w": "[0-9A-Z_a-z]", "D": "[^0-9]", "W": "[^0-9A-Z_a-z]"}
_INSIDE = {"d": "0-9", "w": "0-9A-Z_a-z", "D": "\0-/:-\U0010ffff", "W": "\0-/:-@\\[-\\^`{-\U0010ffff"}


def as_python(pattern: str) -> str:
    r"""Return a pattern in which `\d` and `\w` match only ASCII characters, as JSON Schema defines it."""
    text, inside, index = "", False, 0
    while index < len(pattern):
        piece = pattern[index : index + (2 if pattern[index] == "\\" else 1)]
        index += len(piece)
        if len(piece) == 2:
            text += (_INSIDE if inside else _OUTSIDE).get(piece[1], piece)
            continue
        inside = piece == "[" or (inside and piece != "]")
        text += piece
    return text


# ── generated schemas ─────────────────────────────────────────────────────────────────────────────────────

NAMES = ("a", "b", "ab", "é", 'q"', "x-1", "n\n", "", "a b", "~/", "\\u0061")
VALUES: tuple[Any, ...] = (
    0, 1, -1, 0.1, 0.7, 1e100, 1.5e-7, 2**63, 2**64 - 1, -(2**70), 12345678901234567890123, "", "a",
    "é\u0001\"", "\ud800", "\u2028", None, True, False, [], [1, 0.3], {}, {"a": [None, "b"], "é": 0.1},
)  # fmt: skip


def random_schema(rng: random.Random) -> Any:
    """Return a random schema, which may have references into `$defs`."""
    schema = _schema(rng, 2)
    if isinstance(schema, dict):
        schema = {**schema, "$defs": {name: _schema(rng, 1, plain=True) for name in ("a/b", "t~ é", "z")}}
    return schema


def _schema(rng: random.Random, depth: int, plain: bool = False) -> Any:
    makers = [_string, _string, _string, _number, _number, _listed, _mixed]
    if depth:
        makers += [_object, _object, _array, _choice]
    if not plain:
        makers.append(_reference)
    return rng.choice(makers)(rng, depth)


def _reference(rng: random.Random, depth: int) -> Any:
    return {"$ref": "#/$defs/" + rng.choice(("a~1b", "t~0 é", "t~0%20%C3%A9", "z"))}


def _string(rng: random.Random, depth: int) -> Any:
    schema: dict[str, Any] = {"type": "string"}
    return schema | rng.choice((_no_limit, _lengths, _pattern, _pattern, _format))(rng)


def _no_limit(rng: random.Random) -> dict[str, Any]:
    return {}


def _lengths(rng: random.Random) -> dict[str, Any]:
    low = rng.choice((0, 1, 2, 5, 17, 40, 90))
    high = low + rng.choice((0, 1, 3, 20, 31, 33, 64, 100, 300))
    return rng.choice(({"minLength": low}, {"maxLength": high}, {"minLength": low, "maxLength": float(high)}))


def _pattern(rng: random.Random) -> dict[str, Any]:
    return {"pattern": random_pattern(rng)}


def _format(rng: random.Random) -> dict[str, Any]:
    return {
        "format": rng.choice(
            ("date", "date-time", "uuid", "email", "ipv4", "ipv6", "uri", "hostname", "time")
        )
    }


def _number(rng: random.Random, depth: int) -> Any:
    kind = rng.choice(("integer", "number"))
    schema: dict[str, Any] = {"type": kind}
    low = rng.choice((-1000, -7, -0.5, 0, 0.5, 1, 3, 17, 2.25, 99, 1e6))
    high = low + rng.choice((0, 1, 2.5, 10, 100, 12345))
    if rng.random() < 0.5:
        schema[rng.choice(("minimum", "exclusiveMinimum"))] = low
    if rng.random() < 0.5:
        schema[rng.choice(("maximum", "exclusiveMaximum"))] = high
    if kind == "integer" and rng.random() < 0.15:
        schema["multipleOf"] = rng.choice((1, 2, 3, 7, 10))
    return schema


def _listed(rng: random.Random, depth: int) -> Any:
    if rng.random() < 0.5:
        return {"const": rng.choice(VALUES)}
    return {"enum": rng.sample(VALUES, rng.randint(1, 4))}


def _mixed(rng: random.Random, depth: int) -> Any:
    types = rng.sample(("string", "null", "integer", "boolean", "number"), rng.randint(1, 3))
    if "number" in types and "integer" in types:
        types.remove("integer")
    schema: dict[str, Any] = {"type": types}
    return schema | (_lengths(rng) if rng.random() < 0.5 else _pattern(rng)) if "string" in types else schema


def _object(rng: random.Random, depth: int) -> Any:
    properties = {name: _schema(rng, depth - 1) for name in rng.sample(NAMES, rng.randint(0, 3))}
    schema: dict[str, Any] = {"type": "object"}
    if properties:
        schema["properties"] = properties
        schema["required"] = [name for name in properties if rng.random() < 0.6]
    extra = rng.choice((None, False, False, True, "schema", "pattern", "names"))
    if extra == "schema":
        schema["additionalProperties"] = _schema(rng, depth - 1)
    elif extra == "pattern":
        schema |= {
            "patternProperties": {random_pattern(rng): _schema(rng, depth - 1)},
            "additionalProperties": False,
        }
    elif extra == "names":
        schema |= {"propertyNames": rng.choice((_lengths, _pattern))(rng), "additionalProperties": True}
    elif extra is not None:
        schema["additionalProperties"] = extra
    if rng.random() < 0.15:
        schema["maxProperties"] = rng.randint(1, 3)
    if rng.random() < 0.1:
        schema["minProperties"] = 1
    return schema


def _array(rng: random.Random, depth: int) -> Any:
    schema: dict[str, Any] = {"type": "array"}
    if rng.random() < 0.7:
        schema["items"] = _schema(rng, depth - 1)
    if rng.random() < 0.3:
        schema["prefixItems"] = [_schema(rng, depth - 1) for _ in range(rng.randint(1, 2))]
    if rng.random() < 0.4:
        schema["minItems"] = rng.randint(0, 2)
    if rng.random() < 0.6:
        schema["maxItems"] = schema.get("minItems", 0) + rng.randint(0, 3)
    return schema


def _choice(rng: random.Random, depth: int) -> Any:
    name = rng.choice(("anyOf", "anyOf", "oneOf", "allOf"))
    return {name: [_schema(rng, depth - 1) for _ in range(1 if name == "allOf" else rng.randint(1, 3))]}


# ── checks ────────────────────────────────────────────────────────────────────────────────────────────────


def as_judged(schema: Any) -> Any:
    """Return a schema whose patterns are those of `as_python`."""
    if isinstance(schema, list):
        return [as_judged(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value
        if key in ("enum", "const")
        else as_python(value)
        if key == "pattern" and isinstance(value, str)
        else {as_python(pattern): as_judged(part) for pattern, part in value.items()}
        if key == "patternProperties"
        else as_judged(value)
        for key, value in schema.items()
    }


def schema_grammar(schema: Any, whitespace: int | None = None) -> Grammar:
    """Return the grammar of a schema; with `whitespace`, in a structural tag."""
    if whitespace is None:
        return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    return tag_grammar({"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": whitespace})


def tag_grammar(content: dict[str, Any]) -> Grammar:
    """Return the grammar of content between `<` and `>`."""
    tag = {"type": "tag", "begin": "<", "content": content, "end": ">"}
    return Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps({"type": "structural_tag", "format": tag}))


def content_of(grammar: Grammar, text: str) -> str:
    """Return a text of a grammar without the tag around it."""
    if grammar.kind is not GrammarKind.STRUCTURAL_TAG:
        return text
    assert text[0] == "<"
    assert text[-1] == ">"
    return text[1:-1]


def check_texts(
    builder: GrammarBuilder, grammar: Grammar, schema: Any, rng: random.Random, rounds: int
) -> int:
    """Check texts of a grammar against a schema; return the number of checked texts."""
    compiled = builder.compile(grammar)
    validator, checked = Draft202012Validator(as_judged(schema)), 0
    for text in texts_of(compiled, rng, rounds):
        value = json.loads(content_of(grammar, text), strict=True)
        try:
            with limit_cpu_time():
                error = best_match(validator.iter_errors(value))
        except TooSlowError:
            continue
        assert error is None, f"{text!r} does not conform to {json.dumps(schema)}: {error.message}"
        checked += 1
    return checked


def check_matches(
    builder: GrammarBuilder, grammar: Grammar, pattern: str, rng: random.Random, rounds: int
) -> int:
    """Check texts of a grammar against a pattern; return the number of checked texts."""
    compiled, judge, checked = builder.compile(grammar), re.compile(as_python(pattern)), 0
    for text in texts_of(compiled, rng, rounds):
        content = content_of(grammar, text)
        try:
            with limit_cpu_time():
                found = judge.fullmatch(content)
        except TooSlowError:
            continue
        assert found, f"{content!r} does not match {pattern!r}"
        checked += 1
    return checked


def texts_of(compiled: xgrammar.CompiledGrammar, rng: random.Random, rounds: int) -> Iterator[str]:
    """Yield the texts of several walks; a walk that does not end has no text."""
    return (text for text in (walk(compiled, rng) for _ in range(rounds)) if text is not None)
