# SPDX-License-Identifier: Apache-2.0
"""Messages of the previous release and of this one mean the same to both.

The frames of the previous release are recorded; its own code, from the archive, decodes today's frames.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from previous_codec import fields_of, run_codec
from previous_release import MESSAGES, Release

from message_samples import filled, least
from mizzen.core.kv.block_hashes import block_hashes
from mizzen.wire import codec, messages
from mizzen.wire.messages import OLDEST_PROTOCOL, PROTOCOL, Hello

RECORDED: dict[str, Any] = json.loads(MESSAGES.read_text())
FRAMES: dict[str, dict[str, Any]] = RECORDED["encoded"]
DIRECTIONS = {"engine": messages.ToEngine, "gateway": messages.ToGateway}
CASES = [(tag, kind) for tag in FRAMES for kind in ("filled", "least")]


def current_kinds() -> Iterator[tuple[str, Any]]:
    """Yield the receiver (`engine` or `gateway`) and the class of each message of this release."""
    for receiver, union in DIRECTIONS.items():
        for kind in typing.get_args(union):
            yield receiver, kind


RECEIVERS = {kind.__struct_config__.tag: receiver for receiver, kind in current_kinds()}


def common_fields(fields: Any, known: Any) -> Any:
    """Return the parts of `fields` that `known`, the fields of an older message, has as well."""
    if isinstance(known, dict) and isinstance(fields, dict):
        return {name: common_fields(fields.get(name), part) for name, part in known.items()}
    if isinstance(known, list) and isinstance(fields, list) and len(known) == len(fields):
        return [common_fields(part, old) for part, old in zip(fields, known, strict=True)]
    return fields


@pytest.mark.parametrize(("tag", "kind"), CASES)
def test_recorded_frames_are_decoded_with_the_same_meaning(tag: str, kind: str) -> None:
    decode = codec.engine_decoder() if RECEIVERS[tag] == "engine" else codec.gateway_decoder()
    message = decode(bytes.fromhex(FRAMES[tag][kind]["hex"]))
    assert message.__struct_config__.tag == tag
    fields, recorded = fields_of(message), FRAMES[tag][kind]["fields"]
    assert common_fields(fields, recorded) == recorded
    for struct in (message, *getattr(message, "finished", ()), *getattr(message, "logprobs", ())):
        defaults = {field.name: field.default for field in msgspec.structs.fields(type(struct))}
        for name in fields_of(struct).keys() - known_fields(tag, struct, message, recorded):
            assert getattr(struct, name) == defaults[name], f"{name}: later fields have their defaults"


def known_fields(tag: str, struct: Any, message: Any, recorded: dict[str, Any]) -> set[str]:
    """Return the names of the fields that a struct of a message had in the previous release."""
    if struct is message:
        return set(recorded)
    (part, *_) = [name for name in ("finished", "logprobs") if struct in getattr(message, name)]
    return set(recorded[part][0])


def test_the_previous_release_decodes_todays_messages_with_the_same_meaning(previous: Release) -> None:
    """It reads every field that it knows, and ignores the others."""
    sent = [
        (receiver, kind.__struct_config__.tag, message)
        for receiver, kind in current_kinds()
        if kind.__struct_config__.tag in FRAMES
        for message in (filled(kind), least(kind))
    ]
    frames = [(receiver, codec.encode(message).hex()) for receiver, _, message in sent]
    result = run_codec(previous, frames)
    assert {name: result[name] for name in RECORDED} == RECORDED, "the archive encodes what is recorded"
    for (_, tag, message), read in zip(sent, result["decoded"], strict=True):
        assert read.get("tag") == tag, read
        assert read["fields"] == common_fields(fields_of(message), read["fields"])
    assert {tag for _, tag, _ in sent} == FRAMES.keys(), "every message of the previous release still exists"


def test_todays_greeting_is_the_previous_versions_for_an_older_engine(previous: Release) -> None:
    """An engine of the previous release compares `Hello.protocol` with its own version."""
    hello = codec.encode(Hello(OLDEST_PROTOCOL, "g", PROTOCOL)).hex()
    (read,) = run_codec(previous, [("engine", hello)])["decoded"]
    assert read == {"tag": "Hello", "fields": {"protocol": OLDEST_PROTOCOL, "gateway": "g"}}


def test_cached_prefixes_have_the_same_hashes() -> None:
    assert list(block_hashes(np.arange(200, dtype=np.int32), b"salt")) == RECORDED["block_hashes"]
