# SPDX-License-Identifier: Apache-2.0
"""Print the constraints of an image: the pins of a first file, some of them replaced by a second file.

python merge_constraints.py constraints.txt constraints-gpu.txt
"""

from __future__ import annotations

import sys
from pathlib import Path

from requirements import name_of


def merge(base: str, overrides: str) -> list[str]:
    """Return the pins of `base` that `overrides` does not replace, and the pins of `overrides`, sorted.

    Raises:
        ValueError: a line is neither a comment nor `name==version`, or a file pins a name twice.
    """
    pins = [_read(base), _read(overrides)]
    return sorted({**pins[0], **pins[1]}.values(), key=str.lower)


def _read(text: str) -> dict[str, str]:
    pins: dict[str, str] = {}
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if "==" not in line or name_of(line) in pins:
            raise ValueError(f"{line!r} is not the only pin of a distribution")
        pins[name_of(line)] = line.strip()
    return pins


if __name__ == "__main__":
    print("\n".join(merge(*(Path(path).read_text(encoding="utf-8") for path in sys.argv[1:3]))))
