# SPDX-License-Identifier: Apache-2.0
"""Paths of the playground, without the packages that serve it."""

from __future__ import annotations

PLAYGROUND_PATH = "/playground"
PUBLIC_PATHS = frozenset({PLAYGROUND_PATH, "/"})
"""Paths that `add_playground` adds; they need no API key."""
