# SPDX-License-Identifier: Apache-2.0
"""Find the rank whose failure made the other ranks of an engine fail.

Called by the supervisor and by `LocalRanks` after at least one rank has exited.
"""

from __future__ import annotations

from collections.abc import Mapping

from mizzen.server.metric_catalogue import Phase
from mizzen.server.ranks.device_loss import is_device_lost
from mizzen.server.status_block import Snapshot


def failed_ranks(statuses: Mapping[int, Snapshot]) -> list[int]:
    """Return the ranks that reported a failure, in the order of their failures."""
    ranks = [rank for rank, status in statuses.items() if status["phase"] == Phase.FAILED]
    return sorted(ranks, key=lambda rank: statuses[rank]["phase_since"])


def find_failed_rank(codes: Mapping[int, int], statuses: Mapping[int, Snapshot]) -> int:
    """Return the rank whose failure caused the exits of all other ranks.

    When a rank is gone, its connections are closed, and the other ranks fail. A rank reports its failure
    before it closes its connections, so the earliest report comes from the rank that failed first. A rank
    that was killed without a report, or that lost its device, takes precedence.

    Args:
        codes: Exit codes, by rank, of all ranks that exited unexpectedly; at least one. The code of a rank
            that was killed by a signal is negative.
        statuses: Last status of every rank of this pod, by rank.
    """
    reported = failed_ranks(statuses)
    lost = [rank for rank in reported if is_device_lost(statuses[rank].text)]
    killed = [rank for rank, code in codes.items() if code < 0 and rank not in reported]
    return [*lost, *killed, *reported, *codes][0]
