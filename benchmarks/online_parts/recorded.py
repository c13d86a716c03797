"""A recorded trace: its lines, checked, and the requests that they stand for."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from online_parts.trace import Ask, Prompt, Session, Texts

NEEDS = "needs at, max_tokens, and prompt or input_length"


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of a trace."""

    at: float
    """In units of the trace."""
    output: int
    prompt: Prompt | None
    """None where the trace holds no more than its length."""
    length: int
    names: tuple[int | str, ...]
    """Of blocks that it begins with: those of one name hold the same tokens."""


def first_of(values: dict[str, Any], *names: str) -> Any:
    """Return the first of these fields that is there."""
    return next((values[name] for name in names if values.get(name) is not None), None)


def amount(name: str, value: Any) -> float:
    """Return a finite number.

    Raises:
        ValueError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}, no number")
    return float(value)


def count(name: str, value: Any, least: int) -> int:
    """Return a whole number of at least `least`.

    Raises:
        ValueError: it is none.
    """
    number = amount(name, value)
    if number != int(number) or number < least:
        raise ValueError(f"{name} is {value!r}, no whole number of at least {least}")
    return int(number)


def prompt_of(value: Any) -> Prompt:
    """Return a prompt, text or ids.

    Raises:
        ValueError: it is neither, or empty.
    """
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(token) is int and token >= 0 for token in value):
        return value
    raise ValueError("prompt is neither text nor a list of token ids, or it is empty")


def names_of(value: Any, length: int, block: int) -> tuple[int | str, ...]:
    """Return the names of a prompt's blocks.

    Raises:
        ValueError: they are no names, or not as many as the prompt has blocks.
    """
    if not isinstance(value, list) or not all(isinstance(name, int | str) for name in value):
        raise ValueError("hash_ids is no list of names of blocks")
    if value and abs(len(value) * block - length) > block:
        raise ValueError(
            f"{len(value)} hash_ids of --hash-block {block} tokens are {len(value) * block} tokens, but "
            f"input_length is {length}: give the trace's --hash-block (about {-(-length // len(value))}; "
            "Mooncake's is 512)"
        )
    return tuple(value)


def entry_of(line: str, block: int) -> Entry:
    """Read a line.

    Raises:
        ValueError: says what it lacks.
    """
    try:
        values = json.loads(line)
    except ValueError as error:
        raise ValueError(f"no JSON object: {error}") from None
    if not isinstance(values, dict):
        raise ValueError("no JSON object")
    at, prompt = first_of(values, "at", "timestamp"), values.get("prompt")
    output = first_of(values, "max_tokens", "output_length")
    length = first_of(values, "input_length", "prompt_tokens")
    if at is None or output is None or (prompt is None and length is None):
        raise ValueError(NEEDS)
    begin, tokens = amount("at", at), max(count("max_tokens", output, 0), 1)
    if prompt is not None:
        return Entry(begin, tokens, prompt_of(prompt), 0, ())
    size = count("input_length", length, 1)
    return Entry(begin, tokens, None, size, names_of(values.get("hash_ids") or [], size, block))


def read(path: Path, *, block: int) -> list[Entry]:
    """Read a recorded trace: a JSON object a line, each a request; return them in order of time.

    Fields: `at` or `timestamp`; `max_tokens` or `output_length`; `prompt` (text or ids), or `input_length`,
    with `hash_ids` where prompts share blocks: those of one name hold the same tokens. Blank lines are
    passed over.

    Args:
        path: the file.
        block: tokens in a block.

    Raises:
        ValueError: names the line and what it lacks, or there is none.
    """
    found: list[Entry] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                found.append(entry_of(line.decode(), block))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
    if not found:
        raise ValueError(f"{path} holds no request")
    return sorted(found, key=lambda entry: entry.at)


def asked(entries: Iterable[Entry], texts: Texts, *, unit: float, block: int) -> Iterator[Ask]:
    """Make requests of a trace's lines.

    Args:
        entries: in the order in which their prompts are made.
        texts: makes prompts that the trace does not hold.
        unit: seconds that 1 of a time stands for.
        block: tokens in a block.
    """
    blocks: dict[int | str, Prompt] = {}
    for entry in entries:
        prompt = entry.prompt
        if prompt is None:
            parts: list[Prompt] = []
            for name in entry.names[: entry.length // block]:
                if name not in blocks:
                    blocks[name] = texts.make(block)
                parts.append(blocks[name])
            rest = entry.length - len(parts) * block
            prompt = texts.joined([*parts, *([texts.make(rest)] if rest > 0 else [])])
        yield Ask(entry.at * unit, prompt, entry.output)


def recorded(asks: Iterable[Ask], speed: float) -> list[Session]:
    """Return a trace's requests in order of time, the first at 0, `speed` times as fast."""
    ordered = sorted(asks, key=lambda ask: ask.after)
    begin = ordered[0].after
    return [Session((Ask((ask.after - begin) / speed, ask.prompt, ask.output),)) for ask in ordered]
