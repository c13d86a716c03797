"""How Hypothesis tries its examples in all tests."""

from __future__ import annotations

try:
    from hypothesis import HealthCheck, settings
except ModuleNotFoundError:  # tests on a GPU and on a real cluster do without
    pass
else:
    # Nothing is measured by it: how long an example takes depends on what else the machine does.
    settings.register_profile("fuzz", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    # The same examples at every run: what fails was broken by the change at hand. `make fuzz` finds the rest.
    settings.register_profile("same", settings.get_profile("fuzz"), derandomize=True)
    settings.load_profile("same")
