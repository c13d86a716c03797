# SPDX-License-Identifier: Apache-2.0
"""No request is lost and no status is wrong while real processes are rolled out, killed and hung.

`make soak` makes the same changes and faults for longer; `make e2e` makes them on a cluster with containers.
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
    pytest.mark.xdist_group("no-loss"),  # one worker, so that the run happens once
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
        run = Run(site, SIZE)
        asyncio.run(run.run_short())
        print(json.dumps(run.report(), indent=1))
        yield run
    finally:
        site.down()


def test_no_request_is_lost(run: Run) -> None:
    counts = run.counts
    assert counts["failed"] == 0, counts
    assert counts["started"] == counts["ok"] >= SIZE.requests
    assert counts["streams"] > 100


def test_the_run_did_all_rollouts_kills_and_api_faults(run: Run) -> None:
    report = run.report()
    assert report["changes"]["rollouts"] == 3
    assert report["changes"]["loaded_kills"] >= 10
    assert report["changes"]["hung_engine"] >= 2
    assert len({"409", "429", "500", "latency", "cut"} & report["api"].keys()) >= 3, report["api"]


def test_no_status_was_wrong_for_longer_than_allowed(run: Run) -> None:
    assert not run.violations()
    assert {wrong.cause for name in run.watcher.faults for wrong in run.watcher.wrong_statuses(name)}, (
        "no fault had an effect on a status"
    )
