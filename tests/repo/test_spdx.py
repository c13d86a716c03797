# SPDX-License-Identifier: Apache-2.0
"""Every source file has an SPDX header with its license; run as a program, this file adds missing headers."""

from __future__ import annotations

from pathlib import Path

from ratchets import ROOT, tracked

IDENTIFIER = "SPDX-License-Identifier: Apache-2.0"
HASH = (".py", ".pyi", ".sh", ".toml")
SLASHES = (".go", ".cu")
NAMES = {"Dockerfile.worker": "#", "Makefile": "#", ".ci/run": "#"}


def comment_mark(name: str) -> str:
    """Return the characters that begin a comment in a source file; empty if the file needs no header."""
    if name in NAMES:
        return NAMES[name]
    return "#" if name.endswith(HASH) else "//" if name.endswith(SLASHES) else ""


def sources() -> list[tuple[Path, str]]:
    """Return the paths of all source files with content, and the marks of their comments."""
    marked = [(ROOT / path, comment_mark(str(path))) for path in tracked("")]
    return [(path, mark) for path, mark in marked if mark and path.stat().st_size]


def has_header(text: str, mark: str) -> bool:
    """Return whether the header is in the first line, or in the second line of a script."""
    lines = text.split("\n", 2)
    return f"{mark} {IDENTIFIER}" in (lines[1:2] if text.startswith("#!") else lines[:1])


def add_header(text: str, mark: str) -> str:
    """Return the text of a source file with the header, which follows the interpreter line of a script."""
    first, rest = ("", text)
    if text.startswith("#!"):
        first, _, rest = text.partition("\n")
        first += "\n"
    return f"{first}{mark} {IDENTIFIER}\n{rest}"


def test_every_source_file_names_its_license() -> None:
    found = sources()
    assert len(found) > 1000
    assert not [
        str(path.relative_to(ROOT)) for path, mark in found if not has_header(path.read_text("utf-8"), mark)
    ]


def test_a_header_is_added_once_and_after_the_interpreter_line() -> None:
    for text, mark in (("#!/bin/sh\nset -eu\n", "#"), ('"""Module."""\n', "#"), ("package main\n", "//")):
        added = add_header(text, mark)
        assert not has_header(text, mark)
        assert has_header(added, mark)
        assert added.replace(f"{mark} {IDENTIFIER}\n", "") == text


if __name__ == "__main__":
    for source, begin in sources():
        content = source.read_text("utf-8")
        if not has_header(content, begin):
            source.write_text(add_header(content, begin), "utf-8")
            print(source.relative_to(ROOT))
