# SPDX-License-Identifier: Apache-2.0
"""Configures Hypothesis for all tests: no deadlines, and the same examples in every run."""

from __future__ import annotations

try:
    from hypothesis import HealthCheck, settings
except ModuleNotFoundError:  # tests on a GPU and on a real cluster run without Hypothesis
    pass
else:
    # No deadline, because the duration of an example depends on the load of the machine.
    settings.register_profile("fuzz", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    # The same examples in every run, so a failure comes from the change under test. `make fuzz` tries others.
    settings.register_profile("same", settings.get_profile("fuzz"), derandomize=True)
    settings.load_profile("same")
