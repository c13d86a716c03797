"""The product on a real cluster. `make e2e` (tests/e2e/run.py) makes the images and runs these tests.

They walk through the life of one installation in the order of `run.py`, and stop at the first failure.
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
        """Keep the times of the whole run."""
        config.stash[TIMELINE] = Timeline()

    @pytest.fixture(scope="session")
    def timeline(request: pytest.FixtureRequest) -> Timeline:
        """Times that the run took to converge."""
        return request.config.stash[TIMELINE]

    @pytest.fixture(scope="session")
    def product() -> Iterator[Product]:
        """What is installed, by the environment of this run."""
        reader = Reader()
        yield Product.of(os.environ, reader)
        reader.close()

    @pytest.fixture(scope="session")
    def before() -> set[str]:
        """What the cluster held before anything of ours."""
        return everything()

    @pytest.fixture(autouse=True)
    def no_unprovoked_restart(product: Product) -> Iterator[None]:
        """After every step, no container may have ended that the step did not end."""
        yield
        assert not product.restarts.unprovoked()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
        """Keep what the cluster knows when a step failed."""
        report = yield
        if report.failed:
            report.sections.append(("cluster", collect(Path(os.environ["E2E_OUT"]))))
        return report

    def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
        """Print the times."""
        lines = config.stash[TIMELINE].lines()
        if lines:
            terminalreporter.section("times to converge")
        for line in lines:
            terminalreporter.write_line(line)
