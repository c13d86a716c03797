# SPDX-License-Identifier: Apache-2.0
"""The repository uses the terms of its field instead of the private words in `private_words.py`.

    python tests/repo/test_words.py               count the remaining private words by folder
    python tests/repo/test_words.py --list WORD   list the places of a word, and the term to use instead

Glossaries in docs/ and `private_words.py` itself are not searched.
"""

from __future__ import annotations

import argparse
import bisect
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from private_words import INFORMATION, PRIVATE, Private
from ratchets import ROOT, check, tracked

TEXTS = (".py", ".md", ".yaml", ".yml", ".tpl", ".txt", ".cu", ".toml", "Makefile", ".worker", ".operator")
LEFT_OUT = (
    "tests/repo/private_words.py",
    "tests/golden/data/",
    "tests/chart/mizzen-0.1.0/",
    "tests/repo/ratchets",
    "constraints.txt",
)
GLOSSARY = re.compile(r"^(#+) (?:Words|Glossary)\b.*?(?=^#{1,2} |\Z)", re.MULTILINE | re.DOTALL)
TOKEN = re.compile(
    r"""(?P<text>\"\"\"[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*\"\"\"|'(?!'')[^'\\\n]*(?:\\.[^'\\\n]*)*'"""
    r"""|\'\'\'[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*\'\'\'|"[^"\\\n]*(?:\\.[^"\\\n]*)*")"""
    r"""|(?P<comment>\#[^\n]*(?:\n[ \t]*\#[^\n]*)*)|(?P<name>[A-Za-z_][A-Za-z_0-9]*)""",
    re.DOTALL,
)
"""A string, a block of comment lines, or an identifier in Python source."""
CUDA_TOKEN = re.compile(
    r"(?P<comment>//[^\n]*(?:\n[ \t]*//[^\n]*)*|/\*.*?\*/)|(?P<name>[A-Za-z_][A-Za-z_0-9]*)", re.DOTALL
)
PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
COMMENT_MARK = re.compile(r"#|//")


class Hit(NamedTuple):
    """An occurrence of a private word."""

    private: Private
    path: Path
    line: int
    text: str


class Source:
    """A file's identifiers (`names`, with positions) and its prose: comments, strings and names of tests.

    `prose` joins these pieces in lower case, separated by NUL characters.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = (ROOT / path).read_text(encoding="utf-8")
        self.names: list[tuple[str, int]] = []
        self._ends = [match.start() for match in re.finditer("\n", self.text)]
        self._pieces = [0]
        """Positions in `prose` at which its pieces begin."""
        self._starts = [0]
        """Positions in the file at which the pieces of `prose` begin."""
        if path.suffix in (".py", ".cu"):
            self.prose = self._prose()
        else:
            text = GLOSSARY.sub("", self.text) if path.suffix == ".md" else self.text
            self.prose = text

    def _prose(self) -> str:
        pieces, at = [], 0
        for match in (TOKEN if self.path.suffix == ".py" else CUDA_TOKEN).finditer(self.text):
            name = match["name"]
            if name and not name.startswith("test_"):
                self.names.append((name, match.start()))
                continue
            if name:
                piece = name.replace("_", " ")
            else:
                piece = COMMENT_MARK.sub(lambda mark: " " * len(mark[0]), match[0])
            pieces.append(piece)
            self._pieces.append(at)
            self._starts.append(match.start())
            at += len(piece) + 1
        return "\0".join(pieces)

    def line_in_prose(self, at: int) -> int:
        """Return the line number of a position in `prose`."""
        piece = bisect.bisect_right(self._pieces, at) - 1
        return self.line(self._starts[piece] + at - self._pieces[piece])

    def line(self, at: int) -> int:
        """Return the line number of a position in the file."""
        return bisect.bisect_left(self._ends, at) + 1


def sources() -> Iterator[Source]:
    """Yield all files that are searched."""
    for path in tracked(*TEXTS):
        if not str(path).startswith(LEFT_OUT) and (ROOT / path).is_file():
            yield Source(path)


def within(path: Path, private: Private) -> bool:
    """Return whether the scope of a private word contains a file."""
    return not private.scope or any(path.is_relative_to(folder) for folder in private.scope)


def hits(read: Iterable[Source]) -> Iterator[Hit]:
    """Yield all occurrences of private words in the given files."""
    by_scope: dict[tuple[str, ...], dict[str, list[Private]]] = {}
    for source in read:
        in_scope = [private for private in PRIVATE if within(source.path, private)]
        by_kind: dict[str, list[Private]] = defaultdict(list)
        for private in in_scope:
            by_kind[private.kind].append(private)
        for private in by_kind["module"]:
            if source.path.suffix in (".py", ".cu") and private.pattern.fullmatch(source.path.stem):
                yield Hit(private, source.path, 1, source.path.name)
        matched = by_scope.setdefault(tuple(private.label for private in in_scope), {})
        for name, at in source.names:
            if name not in matched:
                matched[name] = matching(name, by_kind["name"], by_kind["word"])
            for private in matched[name]:
                yield Hit(private, source.path, source.line(at), name)
        for private in by_kind["phrase"]:
            for match in private.pattern.finditer(source.prose):
                line = source.line_in_prose(match.start())
                yield Hit(private, source.path, line, excerpt(source.prose, match))


def matching(name: str, names: Iterable[Private], words: Iterable[Private]) -> list[Private]:
    """Return the private words that an identifier equals or contains."""
    parts = [part.lower() for part in PART.findall(name)]
    whole_names = [private for private in names if private.pattern.fullmatch(name)]
    return whole_names + [private for private in words if any(map(private.pattern.fullmatch, parts))]


def excerpt(text: str, match: re.Match[str]) -> str:
    """Return a match with up to 40 characters of context on each side, on one line."""
    before, after = text[max(0, match.start() - 40) : match.start()], text[match.end() : match.end() + 40]
    return " ".join((before.rpartition("\0")[2] + match[0] + after.partition("\0")[0]).split())


def folder(path: Path) -> str:
    """Return the top-level folder of a file, or "top" for files in the root."""
    return path.parts[0] if len(path.parts) > 1 else "top"


def test_glossaries_are_not_searched_for_private_words() -> None:
    assert GLOSSARY.sub("", "# A\n## Words\ntold\n### x\ntold\n## B\ntold") == "# A\n## B\ntold"


def test_no_private_words_are_added() -> None:
    all_hits = list(hits(sources()))
    counts = Counter(f"{folder(hit.path)}: {hit.private.label}" for hit in all_hits)
    check("private_words", counts, ["python tests/repo/test_words.py --list WORD"])


def print_table() -> None:
    """Print the number of occurrences of each word, by folder."""
    table: dict[str, Counter[str]] = defaultdict(Counter)
    files: Counter[str] = Counter()
    for hit in hits(sources()):
        table[hit.private.label][folder(hit.path)] += 1
        files[str(hit.path)] += 1
    common: dict[str, Counter[str]] = defaultdict(Counter)
    for source in sources():
        for name, _ in source.names:
            for part in {part.lower() for part in PART.findall(name)} & set(INFORMATION):
                common[f"({part})"][folder(source.path)] += 1
    folders = sorted({name for counts in table.values() for name in counts})
    print(f"{'':50.50}", *(f"{name:>10.10}" for name in [*folders, "all"]))
    for label, counts in sorted(table.items(), key=lambda item: -item[1].total()):
        print(f"{label:50.50}", *(f"{counts[name] or '':>10}" for name in folders), f"{counts.total():>10}")
    everything = sum(table.values(), Counter())
    print(f"{'all':50}", *(f"{everything[name]:>10}" for name in folders), f"{everything.total():>10}")
    print("\ntoo common to be violations:")
    for label, counts in sorted(common.items()):
        print(f"{label:50.50}", *(f"{counts[name] or '':>10}" for name in folders), f"{counts.total():>10}")
    print("\nmost in:", *(f"{count:6} {path}" for path, count in files.most_common(40)), sep="\n")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="find private words")
    parser.add_argument(
        "--list", metavar="WORD", help="list the places of a word, given by its label or a part of that"
    )
    parser.add_argument("--path", default="", help="with --list: only below this path")
    arguments = parser.parse_args()
    if arguments.list is None:
        print_table()
        return
    for hit in hits(sources()):
        if arguments.list in hit.private.label and str(hit.path).startswith(arguments.path):
            print(f"{hit.path}:{hit.line} {hit.text}   [{hit.private.instead}]")


if __name__ == "__main__":
    main()
