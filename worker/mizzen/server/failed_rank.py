"""Which rank ended the others of its group."""

from __future__ import annotations

from collections.abc import Mapping

from mizzen.server.metric_catalogue import Phase
from mizzen.server.ranks.device_loss import is_device_lost
from mizzen.server.status_block import Snapshot


def failed_ranks(statuses: Mapping[int, Snapshot]) -> list[int]:
    """Return the ranks that said why they cannot go on, the first to say so first."""
    ranks = [rank for rank, status in statuses.items() if status["phase"] == Phase.FAILED]
    return sorted(ranks, key=lambda rank: statuses[rank]["phase_since"])


def find_failed_rank(codes: Mapping[int, int], statuses: Mapping[int, Snapshot]) -> int:
    """Return the rank that is to blame, of a group of which some have ended.

    The others fail only because it is gone: they find their connections closed. A rank says that it fails
    before it closes its own.

    Args:
        codes: Exit codes of those that ended and should not have, by rank; minus the signal of one that was
            killed. At least one.
        statuses: What every rank of this pod showed last, by rank.
    """
    reported = failed_ranks(statuses)
    lost = [rank for rank in reported if is_device_lost(statuses[rank].text)]
    killed = [rank for rank, code in codes.items() if code < 0 and rank not in reported]
    return [*lost, *killed, *reported, *codes][0]
