# SPDX-License-Identifier: Apache-2.0
"""Pytest marks that several test files share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., object])

CONTROL_PLANE = [pytest.mark.cluster, pytest.mark.xdist_group("control-plane")]
"""`pytestmark` of files whose tests all need the operator tests' shared control plane."""


def in_cluster(test: Test) -> Test:
    """Mark one test that needs the shared control plane, in a file whose other tests do not."""
    for mark in CONTROL_PLANE:
        test = mark(test)
    return test
