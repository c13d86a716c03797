"""The repository speaks the language of its field.

    python tests/repo/test_words.py               how often each private word is left, by folder
    python tests/repo/test_words.py --list WORD   where a word is left, and what is said instead

The words are those of `private_words.py`. The glossaries of docs/ may name them, and so may that file.
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
LEFT_OUT = ("tests/repo/private_words.py", "tests/golden/data/", "tests/repo/ratchets", "constraints.txt")
GLOSSARY = re.compile(r"^(#+) (?:Words|Glossary)\b.*?(?=^#{1,2} |\Z)", re.MULTILINE | re.DOTALL)
TOKEN = re.compile(
    r"""(?P<text>\"\"\"[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*\"\"\"|'(?!'')[^'\\\n]*(?:\\.[^'\\\n]*)*'"""
    r"""|\'\'\'[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*\'\'\'|"[^"\\\n]*(?:\\.[^"\\\n]*)*")"""
    r"""|(?P<comment>\#[^\n]*(?:\n[ \t]*\#[^\n]*)*)|(?P<name>[A-Za-z_][A-Za-z_0-9]*)""",
    re.DOTALL,
)
"""A string, comment lines one below another, or a name of Python's."""
CUDA_TOKEN = re.compile(
    r"(?P<comment>//[^\n]*(?:\n[ \t]*//[^\n]*)*|/\*.*?\*/)|(?P<name>[A-Za-z_][A-Za-z_0-9]*)", re.DOTALL
)
PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
COMMENT_MARK = re.compile(r"#|//")


class Hit(NamedTuple):
    """A word that was found."""

    private: Private
    path: Path
    line: int
    text: str


class Source:
    """A file, with its identifiers and its prose: comments, strings and names of tests in small letters."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = (ROOT / path).read_text(encoding="utf-8")
        self.names: list[tuple[str, int]] = []
        self._ends = [match.start() for match in re.finditer("\n", self.text)]
        self._pieces = [0]
        """Where the pieces of the prose begin in it."""
        self._starts = [0]
        """Where they begin in the file."""
        if path.suffix in (".py", ".cu"):
            self.prose = self._prose()
        else:
            text = GLOSSARY.sub("", self.text) if path.suffix == ".md" else self.text
            self.prose = text.lower()

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
        return "\0".join(pieces).lower()

    def line_in_prose(self, at: int) -> int:
        """Return the number of the line of a position of the prose."""
        piece = bisect.bisect_right(self._pieces, at) - 1
        return self.line(self._starts[piece] + at - self._pieces[piece])

    def line(self, at: int) -> int:
        """Return the number of the line of a position of the file."""
        return bisect.bisect_left(self._ends, at) + 1


def sources() -> Iterator[Source]:
    """Yield all files that are read."""
    for path in tracked(*TEXTS):
        if not str(path).startswith(LEFT_OUT) and (ROOT / path).is_file():
            yield Source(path)


def within(path: Path, private: Private) -> bool:
    """Tell whether a word is a fault in a file."""
    return not private.scope or any(path.is_relative_to(folder) for folder in private.scope)


def hits(read: Iterable[Source]) -> Iterator[Hit]:
    """Yield all private words in some files."""
    known: dict[tuple[str, ...], dict[str, list[Private]]] = {}
    for source in read:
        here = [private for private in PRIVATE if within(source.path, private)]
        by_kind: dict[str, list[Private]] = defaultdict(list)
        for private in here:
            by_kind[private.kind].append(private)
        for private in by_kind["module"]:
            if source.path.suffix in (".py", ".cu") and private.pattern.fullmatch(source.path.stem):
                yield Hit(private, source.path, 1, source.path.name)
        matched = known.setdefault(tuple(private.label for private in here), {})
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
    """Return which private words an identifier is or holds."""
    parts = [part.lower() for part in PART.findall(name)]
    found = [private for private in names if private.pattern.fullmatch(name)]
    return found + [private for private in words if any(map(private.pattern.fullmatch, parts))]


def excerpt(text: str, match: re.Match[str]) -> str:
    """Return the words around a phrase, on one line."""
    before, after = text[max(0, match.start() - 40) : match.start()], text[match.end() : match.end() + 40]
    return " ".join((before.rpartition("\0")[2] + match[0] + after.partition("\0")[0]).split())


def folder(path: Path) -> str:
    """Return how a file's folder is called in the table."""
    return path.parts[0] if len(path.parts) > 1 else "top"


def test_glossaries_may_name_the_words() -> None:
    assert GLOSSARY.sub("", "# A\n## Words\ntold\n### x\ntold\n## B\ntold") == "# A\n## B\ntold"


def test_the_language_is_that_of_the_field() -> None:
    found = list(hits(sources()))
    counts = Counter(f"{folder(hit.path)}: {hit.private.label}" for hit in found)
    check("private_words", counts, ["python tests/repo/test_words.py --list WORD"])


def print_table() -> None:
    """Print how often each word is left, by folder."""
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
    print("\ntoo common to be a fault each:")
    for label, counts in sorted(common.items()):
        print(f"{label:50.50}", *(f"{counts[name] or '':>10}" for name in folders), f"{counts.total():>10}")
    print("\nmost in:", *(f"{count:6} {path}" for path, count in files.most_common(40)), sep="\n")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="private words that are left")
    parser.add_argument(
        "--list", metavar="WORD", help="where a word is left; its label, or the beginning of it"
    )
    parser.add_argument("--path", default="", help="with --list: only below this path")
    given = parser.parse_args()
    if given.list is None:
        print_table()
        return
    for hit in hits(sources()):
        if given.list in hit.private.label and str(hit.path).startswith(given.path):
            print(f"{hit.path}:{hit.line} {hit.text}   [{hit.private.instead}]")


if __name__ == "__main__":
    main()
