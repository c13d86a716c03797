"""The programs of the previous release."""

from __future__ import annotations

import pytest

from previous_release import Release, unpack_previous


@pytest.fixture(scope="session")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Release:
    return unpack_previous(tmp_path_factory.mktemp("previous"))
