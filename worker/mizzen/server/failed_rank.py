"""Find the rank whose failure made the other ranks of its group fail.

Called by the supervisor and by `LocalRanks` after at least one rank has exited.
"""

from __future__ import annotations

from collections.abc import Mapping

from mizzen.server.metric_catalogue import Phase
from mizzen.server.ranks.device_loss import is_device_lost
from mizzen.server.status_block import Snapshot


def failed_ranks(statuses: Mapping[int, Snapshot]) -> list[int]:
    """Return the ranks that reported a failure, earliest first."""
    ranks = [rank for rank, status in statuses.items() if status["phase"] == Phase.FAILED]
    return sorted(ranks, key=lambda rank: statuses[rank]["phase_since"])


def find_failed_rank(codes: Mapping[int, int], statuses: Mapping[int, Snapshot]) -> int:
    """Return the rank whose failure caused the exits of the others.

    The other ranks fail only because that rank is gone: their connections are closed. A rank reports its
    failure before it closes its own connections.

    Args:
        codes: Exit codes by rank of all ranks that exited unexpectedly, at least one; negative for a rank
            killed
            by a signal.
        statuses: Last status of every rank of this pod, by rank.
    """
    reported = failed_ranks(statuses)
    lost = [rank for rank in reported if is_device_lost(statuses[rank].text)]
    killed = [rank for rank, code in codes.items() if code < 0 and rank not in reported]
    return [*lost, *killed, *reported, *codes][0]
