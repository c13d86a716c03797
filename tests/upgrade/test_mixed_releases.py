# SPDX-License-Identifier: Apache-2.0
"""No request fails while engines and gateway of the previous release are replaced, one by one.

Programs of the previous release run from the archive in this folder. `mixed_releases.py` is also a program,
which runs the long version with the demo model, and the way back.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from mixed_releases import Rollout
from previous_release import CURRENT, Release

from mizzen.wire.messages import OLDEST_PROTOCOL, PROTOCOL

REQUESTS = 50
"""Minimum number of answers of each pair of a gateway and an engine of different releases."""
OLD_TO_NEW, NEW_TO_OLD = "current gateway, previous engine", "previous gateway, current engine"


@pytest.mark.timeout(900)
async def test_no_request_fails_while_one_release_replaces_the_other(
    previous: Release, tmp_path: Path
) -> None:
    """Each gateway also loses an engine of the other release in mid-stream."""
    rollout = Rollout(tmp_path, previous, CURRENT, simulated=True, short=True)
    await rollout.run(REQUESTS)
    report = rollout.report()
    assert report["failures"] == []
    assert report["failed"] == 0
    assert min(report["pairs"][OLD_TO_NEW], report["pairs"][NEW_TO_OLD]) >= REQUESTS
    assert report["streams"] > 0
    assert report["killed"] == {"previous": 1, "current": 1}
    assert min(report["resumed"][OLD_TO_NEW], report["resumed"][NEW_TO_OLD]) >= 1
    assert report["protocols"][OLD_TO_NEW] == OLDEST_PROTOCOL
    assert report["protocols"]["current gateway, current engine"] == PROTOCOL
