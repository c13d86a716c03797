"""No request is lost and no status lies while services are rolled out, killed and hung: real processes.

`make soak` does the same at length, and `make e2e` on a cluster with containers.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from noloss.local import Site
from noloss.run import Run, Size

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1200),
    pytest.mark.xdist_group("no-loss"),  # else two workers may each make the run
]
SIZE = Size(
    requests=3000,
    rollouts=3,
    cycles=0,
    stream_seconds=5,
    share=0.15,
    probe_seconds=0.2,
    probe_deadline=2.0,
    pause=0.15,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    site = Site(tmp_path_factory.mktemp("noloss"))
    try:
        site.up()
        one = Run(site, SIZE)
        asyncio.run(one.short())
        print(json.dumps(one.report(), indent=1))
        yield one
    finally:
        site.down()


def test_no_request_is_lost(run: Run) -> None:
    counts = run.counts
    assert counts["failed"] == 0, counts
    assert counts["started"] == counts["ok"] >= SIZE.requests
    assert counts["streams"] > 100


def test_everything_was_done_that_a_request_must_survive(run: Run) -> None:
    done = run.report()
    assert done["changes"]["rollouts"] == 3
    assert done["changes"]["loaded_kills"] >= 10
    assert done["changes"]["hung_engine"] >= 2
    assert len({"409", "429", "500", "latency", "cut"} & done["api"].keys()) >= 3, done["api"]


def test_the_status_told_the_truth(run: Run) -> None:
    assert not run.over()
    assert {wrong.cause for name in run.watcher.faults for wrong in run.watcher.wrongs(name)}, (
        "no fault was felt"
    )
