# SPDX-License-Identifier: Apache-2.0
"""Unknown fields are removed from bodies without being decoded, and everything else is kept and checked."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mizzen.gateway.errors import ApiError
from mizzen.gateway.fields import scan
from mizzen.gateway.fields.decoder import BodyDecoder
from mizzen.gateway.fields.ignored import MAX_HEADER_CHARACTERS, MAX_PATHS, MORE, ignored_header
from mizzen.gateway.fields.known import HOSTED_TOOLS, KNOWN_FIELDS, field_label
from mizzen.gateway.fields.rules import UNUSED, Effect, advise, refuse
from mizzen.gateway.openai.field_rules import CHAT_RULES, COMPLETION_RULES
from mizzen.gateway.openai.schemas import ChatRequest
from mizzen.gateway.responses.parse import RULES


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    """Object in a list."""

    number: int
    free: dict[str, Any] | None = None


class Left(msgspec.Struct, forbid_unknown_fields=True, tag="left"):
    """One of two objects."""

    a: int = 0


class Right(msgspec.Struct, forbid_unknown_fields=True, tag="right"):
    """The other object."""

    b: int = 0


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    """A body with all kinds of nesting."""

    name: str = ""
    count: int | None = None
    inner: str | list[Inner] | None = None
    side: Left | Right | None = None


DECODER = BodyDecoder(Outer)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
UNKNOWN = st.dictionaries(st.text(max_size=4).map("x".__add__), JSON, max_size=3)
INNER = st.fixed_dictionaries(
    {"number": st.integers(0, 9), "free": st.dictionaries(st.text(max_size=3), JSON)}
)
SIDES = st.sampled_from([{"type": "left", "a": 1}, {"type": "right", "b": 2}])


@settings(max_examples=40)
@given(st.data())
def test_body_with_unknown_fields_decodes_like_the_same_body_without_them(data: st.DataObject) -> None:
    plain = {"name": "n", "inner": data.draw(st.lists(INNER, max_size=3)), "side": data.draw(SIDES)}
    extra = [data.draw(UNKNOWN) for _ in range(3)]
    items = [{**extra[1], **item} for item in plain["inner"]]
    body = {**extra[0], **plain, "inner": items, "side": {**plain["side"], **extra[2]}}
    request, ignored = DECODER.decode(json.dumps(body).encode())
    assert request == msgspec.convert(plain, Outer)
    groups = (("", extra[0]), ("inner[].", extra[1] if items else {}), ("side.", extra[2]))
    expected = {
        prefix + scan.safe_name(name)
        for prefix, fields in groups
        for name, value in fields.items()
        if value is not None
    }
    assert set(ignored) == expected


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"x": 1, "name": 3}, "name"),
        ({"x": 1, "inner": [{"number": 1, "y": 2}, {"y": 3}]}, "inner[1].number"),
        ({"x": 1, "inner": [{"number": "1"}]}, "inner[0].number"),
        ({"x": 1, "side": {"type": "up", "z": 1}}, "side.type"),
        ({"x": 1, "side": {"z": 1}}, "side.type"),
        ({"x": 1, "count": 1.5}, "count"),
    ],
)
def test_known_fields_are_checked_despite_unknown_ones(body: Any, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        DECODER.decode(json.dumps(body).encode())
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    "body",
    [
        b'{"x": [1, }',
        b'{"x": nul}',
        b'{"x": 1, "name": "\xff"}',
        b'{"x": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"x": NaN}',
        b'{"x": 1} {}',
    ],
)
def test_malformed_json_in_unknown_fields_is_400(body: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        DECODER.decode(body)
    assert (refused.value.status, refused.value.code) == (400, "invalid_json")


def test_integers_written_as_floats_are_accepted_next_to_unknown_fields() -> None:
    request, ignored = DECODER.decode(b'{"count": 3.0, "x": 1.0, "y": null}')
    assert (request.count, ignored) == (3, ("x",))


def test_unknown_fields_are_not_decoded_into_memory() -> None:
    body = (
        b'{"x": [' + b"[]," * 300_000 + b"1]," + b",".join(b'"%d": 1' % key for key in range(100_000)) + b"}"
    )
    peaks = []
    for _ in range(3):  # threads that earlier tests left may allocate meanwhile, but not each time
        tracemalloc.start()
        _, ignored = DECODER.decode(body)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert min(peaks) < 200_000
    assert len(ignored) == MAX_PATHS + 1
    assert ignored[-1] == MORE


def test_number_of_fields_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "MAX_FIELDS", 5)
    with pytest.raises(ApiError) as refused:
        DECODER.decode(b'{"a": 1, "b": 1, "c": 1, "d": 1, "e": 1, "f": 1}')
    assert refused.value.code == "body_too_complex"


def test_header_is_short_and_safe() -> None:
    names = ["a\r\nx-injected: 1", "x" * 5000, "ключ", ""] + [f"{index}" * 48 for index in range(40)]
    _, ignored = DECODER.decode(json.dumps(dict.fromkeys(names, 1)).encode())
    value = ignored_header(ignored)
    assert value.startswith(b"a__x-injected__1, " + b"x" * 48 + b", ____, _, ")
    assert len(value) <= MAX_HEADER_CHARACTERS + len(f", {MORE}")
    assert value.endswith(b", ...")
    assert value.isascii()
    assert value.decode().isprintable()


def test_strict_decoder_refuses_unknown_and_advisory_fields() -> None:
    rules = {"name": advise("neutral", ""), "max": refuse(1, reason="use count")}
    lenient, strict = BodyDecoder(Outer, rules), BodyDecoder(Outer, rules, strict=True)
    for body, path in ((b'{"x": null}', "x"), (b'{"x": 1}', "x"), (b'{"name": "a"}', "name")):
        with pytest.raises(ApiError) as refused:
            strict.decode(body)
        assert refused.value.param == path
        assert lenient.decode(body)[1] == (() if b"null" in body else (path,))
    assert strict.decode(b'{"name": "neutral"}')[1] == ()
    for value in (b"2", b"true", b'"' + b"x" * 5000 + b'"'):
        with pytest.raises(ApiError, match="max is not supported: use count"):
            lenient.decode(b'{"max": %b}' % value)
    assert lenient.decode(b'{"max": 1.0, "count": 2}') == (Outer(count=2), ())


def test_refused_field_is_found_among_many_unknown_ones() -> None:
    decoder = BodyDecoder(Outer, {"max": refuse()})
    body = {**{f"x{index}": 1 for index in range(100)}, "max": 1}
    with pytest.raises(ApiError, match="max is not supported"):
        decoder.decode(json.dumps(body).encode())


def test_every_ignored_field_with_a_rule_has_its_own_label() -> None:
    for rules in (CHAT_RULES, COMPLETION_RULES, RULES):
        for path, rule in rules.items():
            assert rule.effect is Effect.REFUSED or field_label(path) == path.rpartition(".")[2]
    assert not KNOWN_FIELDS & HOSTED_TOOLS
    for path, label in {
        "messages[].content[].cache_control": "cache_control",
        "tools[web_search_2025_08_26]": "web_search",
        "made_up": "other",
        MORE: "other",
    }.items():
        assert field_label(path) == label


def test_schemas_and_template_variables_are_not_scanned() -> None:
    schema = {"type": "object", "properties": {"parsed": {"made_up": 1}}, "cache_control": 1}
    body = {
        "model": "m",
        "messages": [],
        "made_up": 1,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
        "guided_json": schema,
        "chat_template_kwargs": {"made_up": 1},
        "metadata": {"made_up": "1"},
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": schema, "title": 1},
        },
    }
    request, ignored = BodyDecoder(ChatRequest, {"metadata": UNUSED}).decode(json.dumps(body).encode())
    assert ignored == ("made_up", "response_format.json_schema.title", "metadata")
    assert request.tools is not None
    assert request.tools[0].function is not None
    assert request.tools[0].function.parameters == schema
    assert request.guided_json == schema
    assert request.chat_template_kwargs == {"made_up": 1}
