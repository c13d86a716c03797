"""Marks of tests in files whose other tests need less."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., object])


def in_cluster(test: Test) -> Test:
    """Mark a test that needs the control plane which tests of the operator share."""
    for mark in (pytest.mark.cluster, pytest.mark.xdist_group("control-plane"), pytest.mark.timeout(300)):
        test = mark(test)
    return test
