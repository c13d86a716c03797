"""Marks that tests of several files share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., object])

CONTROL_PLANE = [pytest.mark.cluster, pytest.mark.xdist_group("control-plane")]
"""Of tests that need the control plane which tests of the operator share: `pytestmark`."""


def in_cluster(test: Test) -> Test:
    """Mark such a test in a file whose other tests need less."""
    for mark in CONTROL_PLANE:
        test = mark(test)
    return test
