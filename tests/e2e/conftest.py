# SPDX-License-Identifier: Apache-2.0
"""Fixtures and hooks of the end-to-end tests, which `make e2e` (tests/e2e/run.py) runs on a real cluster.

The tests follow the life of one installation, in the order of `run.py`, and stop at the first failure.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
if "E2E_TAG" not in os.environ:
    collect_ignore_glob = ["test_*.py"]
else:
    from evidence import collect
    from product import Product, everything

    from cluster import Reader, Timeline

    TIMELINE = pytest.StashKey[Timeline]()

    def pytest_configure(config: pytest.Config) -> None:
        """Create the timeline of the whole run."""
        config.stash[TIMELINE] = Timeline()

    @pytest.fixture(scope="session")
    def timeline(request: pytest.FixtureRequest) -> Timeline:
        """Return the timeline of the whole run."""
        return request.config.stash[TIMELINE]

    @pytest.fixture(scope="session")
    def product() -> Iterator[Product]:
        """The installation under test, from the environment variables that `run.py` sets."""
        reader = Reader()
        yield Product.of(os.environ, reader)
        reader.close()

    @pytest.fixture(scope="session")
    def before() -> set[str]:
        """Names of the objects that the cluster contained before the installation."""
        return everything()

    @pytest.fixture(autouse=True)
    def no_unprovoked_restart(product: Product) -> Iterator[None]:
        """Check after each test that no container has restarted unless a test provoked the restart."""
        yield
        assert not product.restarts.unprovoked()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
        """Collect objects, events and logs of the cluster if a test failed."""
        report = yield
        if report.failed:
            report.sections.append(("cluster", collect(Path(os.environ["E2E_OUT"]))))
        return report

    def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
        """Print the timeline."""
        lines = config.stash[TIMELINE].lines()
        if lines:
            terminalreporter.section("times to converge")
        for line in lines:
            terminalreporter.write_line(line)
