# SPDX-License-Identifier: Apache-2.0
"""Reasons and exit codes with which an engine's supervisor exits."""

from __future__ import annotations

from dataclasses import dataclass

CONFIGURATION_EXIT_CODE = 2
"""Exit code of a rank or an engine with an invalid configuration, which a restart does not cure."""
MISCONFIGURED = "wrong configuration"
"""`ExitReason.kind` of an exit with `CONFIGURATION_EXIT_CODE`. The termination message starts with it, so
that the operator recognizes such an exit."""


@dataclass(frozen=True, slots=True)
class ExitReason:
    """Exit code, kind of failure and description of an engine's exit."""

    code: int
    kind: str = ""
    """Kind of failure; empty for a clean exit.

    One of device_lost, rank_died, rank_failed, watchdog, startup_timeout, signal or `MISCONFIGURED`. A group
    of several nodes also uses node_lost (on node 0), and leader_lost, group_failed and refused (on other
    nodes).
    """
    reason: str = ""
