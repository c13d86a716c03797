# SPDX-License-Identifier: Apache-2.0
"""Source files and folders stay small: a file has at most 400 lines, a folder at most 20 modules."""

from __future__ import annotations

from collections import Counter

import pytest
from ratchets import ROOT, check, tracked

MAX_MODULES = 20


@pytest.mark.parametrize(("ending", "most"), [(".py", 400), (".cu", 500)])
def test_no_source_file_is_too_long(ending: str, most: int) -> None:
    lengths = {str(path): len((ROOT / path).read_text().splitlines()) for path in tracked(ending)}
    long = {path: length for path, length in lengths.items() if length > most}
    check(f"long_files {ending}", long, [f"{path}: {length} lines" for path, length in long.items()])


def test_no_folder_has_too_many_modules() -> None:
    modules = Counter(str(path.parent) for path in tracked(".py") if path.name != "__init__.py")
    full = {folder: count for folder, count in modules.items() if count > MAX_MODULES}
    check("full_folders", full, [f"{folder}: {count} modules" for folder, count in full.items()])
