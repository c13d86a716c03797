# SPDX-License-Identifier: Apache-2.0
"""Show or set the version of the next release, in all files that contain it.

    python scripts/release/set_version.py          # show the version; fail if the files disagree
    python scripts/release/set_version.py 0.2.0    # set it

The package's version is `__version__` in worker/mizzen/__init__.py, from which pyproject.toml takes it. The
charts, the Dockerfile and commands in the documentation repeat it, because they are read without Python.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
NUMBER = r"\d+\.\d+\.\d+"
SOURCE = "worker/mizzen/__init__.py"
CHART = (r"^(version: )({number})$", r"^(appVersion: )({number})$")
PLACES = {
    SOURCE: (r'^(__version__ = ")({number})"',),
    "charts/mizzen/Chart.yaml": CHART,
    "charts/mizzen-models/Chart.yaml": CHART,
    "Dockerfile.worker": (r"^(ARG VERSION=)({number})$",),
}
"""Patterns that must match in a file; the first group stays, the second is the version."""
PAGES = ("README.md", "docs/*.md")
IN_PAGES = (
    r"(\bmizzen/(?:engine-cpu|engine|gateway|operator):)({number})\b",
    r"(\bVERSION=)({number})\b",
    r"(/charts/mizzen\S* --version )({number})\b",
    r"(\bmizzen(?:-models)?-)({number})(?=\.tgz|\.tar\.gz|-py3)",
)
"""Patterns of the version in pages of the documentation, where they may match any number of times."""


class Mention(NamedTuple):
    """A version that a file contains, as found by the pattern at `line`."""

    path: str
    line: int
    version: str


def find_mentions(root: Path) -> Iterator[Mention]:
    """Yield every place under `root` that contains the version.

    Raises:
        ValueError: a file lacks a place that it must have.
    """
    for path, patterns in _files(root):
        text = (root / path).read_text(encoding="utf-8")
        for pattern in patterns:
            matches = list(re.finditer(pattern, text, re.MULTILINE))
            if path in PLACES and len(matches) != 1:
                raise ValueError(f"{path}: {pattern} matches {len(matches)} times, not once")
            for match in matches:
                yield Mention(path, text.count("\n", 0, match.start()) + 1, match[2])


def _files(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each file that contains the version, with its patterns."""
    for path, patterns in PLACES.items():
        yield path, [pattern.format(number=NUMBER) for pattern in patterns]
    for glob in PAGES:
        for page in sorted(root.glob(glob)):
            relative = page.relative_to(root).as_posix()
            yield relative, [pattern.format(number=NUMBER) for pattern in IN_PAGES]


def read_version(root: Path = ROOT) -> str:
    """Return the package's version.

    Raises:
        ValueError: another file contains another version; the message names the places.
    """
    mentions = list(find_mentions(root))
    version = next(mention.version for mention in mentions if mention.path == SOURCE)
    other = [f"{path}:{line} has {found}" for path, line, found in mentions if found != version]
    if other:
        raise ValueError(f"the version of the package is {version}, but {', '.join(other)}")
    return version


def write_version(version: str, root: Path = ROOT) -> list[str]:
    """Write a version to all places under `root`; return the paths of the files that changed.

    Raises:
        ValueError: the version does not consist of three numbers, or a file lacks its place.
    """
    if not re.fullmatch(NUMBER, version):
        raise ValueError(f"{version!r}: a version consists of three numbers, such as 0.2.0")
    list(find_mentions(root))  # raises before the first file is written
    changed = []
    for path, patterns in _files(root):
        text = old = (root / path).read_text(encoding="utf-8")
        for pattern in patterns:
            text = re.sub(
                pattern, lambda match: match[0].replace(match[2], version), text, flags=re.MULTILINE
            )
        if text != old:
            (root / path).write_text(text, encoding="utf-8")
            changed.append(path)
    return changed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", nargs="?")
    options = parser.parse_args()
    try:
        if options.version is None:
            print(read_version())
            return
        changed = write_version(options.version)
    except ValueError as error:
        sys.exit(str(error))
    subprocess.run([sys.executable, str(ROOT / "scripts/chart_reference.py")], check=True)
    print("\n".join(changed))
    print(f"Add the section {options.version} to CHANGELOG.md.")


if __name__ == "__main__":
    main()
