# SPDX-License-Identifier: Apache-2.0
"""The programs of the previous release."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from previous_release import Release, unpack_previous


@pytest.fixture(scope="session")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Release:
    return unpack_previous(tmp_path_factory.mktemp("previous"))
