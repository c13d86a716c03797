# SPDX-License-Identifier: Apache-2.0
"""Fixture for tests of the Responses API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def model(thinking_model: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that starts an engine with a fixed answer."""
    return thinking_model
