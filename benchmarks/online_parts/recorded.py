# SPDX-License-Identifier: Apache-2.0
"""Reads recorded traces: validates their lines and turns them into requests."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from online_parts.trace import Prompt, Session, Texts, TimedRequest

NEEDS = "needs at, max_tokens, and prompt or input_length"


@dataclass(frozen=True, slots=True)
class Entry:
    """A request in a trace: one line of the file."""

    at: float
    """Time in the unit of the trace."""
    output: int
    """Number of tokens to generate."""
    prompt: Prompt | None
    """Prompt of the request; None if the trace has only its length."""
    length: int
    """Number of prompt tokens if the trace has only the length; otherwise unused."""
    hash_ids: tuple[int | str, ...]
    """Ids of the blocks that the prompt starts with; blocks with the same id have the same tokens."""


def first_of(values: dict[str, Any], *names: str) -> Any:
    """Return the value of the first field in `names` that is present and not null; else None."""
    return next((values[name] for name in names if values.get(name) is not None), None)


def parse_number(name: str, value: Any) -> float:
    """Check that the value of a field is a finite number, and return it.

    Raises:
        ValueError: the value is not a finite number; the message names the field.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}, not a number")
    return float(value)


def parse_integer(name: str, value: Any, least: int) -> int:
    """Check that the value of a field is an integer of at least `least`, and return it.

    Raises:
        ValueError: the value is not such an integer; the message names the field.
    """
    number = parse_number(name, value)
    if number != int(number) or number < least:
        raise ValueError(f"{name} is {value!r}, not an integer of at least {least}")
    return int(number)


def prompt_of(value: Any) -> Prompt:
    """Check that a value is a prompt (text or a list of token ids), and return it.

    Raises:
        ValueError: the value is neither text nor a list of token ids, or it is empty.
    """
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(token) is int and token >= 0 for token in value):
        return value
    raise ValueError("prompt is neither text nor a list of token ids, or it is empty")


def parse_hash_ids(value: Any, length: int, block: int) -> tuple[int | str, ...]:
    """Check the `hash_ids` of a prompt of `length` tokens in blocks of `block` tokens, and return them.

    Raises:
        ValueError: the value is not a list of ids, or their number does not match the prompt's length.
    """
    if not isinstance(value, list) or not all(isinstance(hash_id, int | str) for hash_id in value):
        raise ValueError("hash_ids is not a list of numbers or strings")
    if value and abs(len(value) * block - length) > block:
        raise ValueError(
            f"{len(value)} hash_ids of --hash-block {block} tokens are {len(value) * block} tokens, but "
            f"input_length is {length}: give the trace's --hash-block (about {-(-length // len(value))}; "
            "Mooncake's is 512)"
        )
    return tuple(value)


def parse_line(line: str, block: int) -> Entry:
    """Parse a line of a trace.

    Raises:
        ValueError: the line is invalid; the message says why.
    """
    try:
        values = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not a JSON object: {error}") from None
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    at, prompt = first_of(values, "at", "timestamp"), values.get("prompt")
    output = first_of(values, "max_tokens", "output_length")
    length = first_of(values, "input_length", "prompt_tokens")
    if at is None or output is None or (prompt is None and length is None):
        raise ValueError(NEEDS)
    begin, tokens = parse_number("at", at), max(parse_integer("max_tokens", output, 0), 1)
    if prompt is not None:
        return Entry(begin, tokens, prompt_of(prompt), 0, ())
    size = parse_integer("input_length", length, 1)
    return Entry(begin, tokens, None, size, parse_hash_ids(values.get("hash_ids") or [], size, block))


def read_trace(path: Path, *, block: int) -> list[Entry]:
    """Read a trace with one JSON object (a request) per line; return the entries in order of time.

    The fields are `at` or `timestamp`; `max_tokens` or `output_length`; and either `prompt` (text or token
    ids) or `input_length`. With `input_length` there may be `hash_ids`, one for each block of the prompt;
    blocks with the same id have the same tokens. Blank lines are skipped.

    Args:
        path: the file.
        block: the number of tokens in a block.

    Raises:
        ValueError: a line is invalid (the message names the line and the reason), or the file has no request.
    """
    entries: list[Entry] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                entries.append(parse_line(line.decode(), block))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
    if not entries:
        raise ValueError(f"{path} contains no requests")
    return sorted(entries, key=lambda entry: entry.at)


def trace_requests(
    entries: Iterable[Entry], texts: Texts, *, unit: float, block: int
) -> Iterator[TimedRequest]:
    """Yield the requests of a trace, with generated prompts where the trace has only lengths.

    Args:
        entries: the entries, in the order in which prompts are generated.
        texts: the generator of prompts that the trace does not contain.
        unit: the unit of the trace's times, in seconds.
        block: the number of tokens in a block.
    """
    blocks: dict[int | str, Prompt] = {}
    for entry in entries:
        prompt = entry.prompt
        if prompt is None:
            parts: list[Prompt] = []
            for hash_id in entry.hash_ids[: entry.length // block]:
                if hash_id not in blocks:
                    blocks[hash_id] = texts.generate(block)
                parts.append(blocks[hash_id])
            rest = entry.length - len(parts) * block
            prompt = texts.join([*parts, *([texts.generate(rest)] if rest > 0 else [])])
        yield TimedRequest(entry.at * unit, prompt, entry.output)


def trace_sessions(requests: Iterable[TimedRequest], speed: float) -> list[Session]:
    """Return one session per request, in order of time; times start at 0 and are divided by `speed`."""
    ordered = sorted(requests, key=lambda request: request.after)
    begin = ordered[0].after
    return [
        Session((TimedRequest((request.after - begin) / speed, request.prompt, request.output),))
        for request in ordered
    ]
