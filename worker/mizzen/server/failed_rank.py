"""Which rank ended the others of its group."""

from __future__ import annotations

from collections.abc import Mapping

from mizzen.server.metric_catalogue import Phase
from mizzen.server.ranks.device_loss import device_lost
from mizzen.server.status_block import Snapshot


def failed(statuses: Mapping[int, Snapshot]) -> list[int]:
    """Return the ranks that said why they cannot go on, the first to say so first."""
    found = [rank for rank, status in statuses.items() if status["phase"] == Phase.FAILED]
    return sorted(found, key=lambda rank: statuses[rank]["phase_since"])


def culprit(codes: Mapping[int, int], statuses: Mapping[int, Snapshot]) -> int:
    """Return the rank that is to blame, of a group of which some have ended.

    The others fail only because it is gone: they find their connections closed. A rank says that it fails
    before it closes its own.

    Args:
        codes: Exit codes of those that ended and should not have, by rank; minus the signal of one that was
            killed. At least one.
        statuses: What every rank of this pod showed last, by rank.
    """
    said = failed(statuses)
    lost = [rank for rank in said if device_lost(statuses[rank].text)]
    killed = [rank for rank, code in codes.items() if code < 0 and rank not in said]
    return [*lost, *killed, *said, *codes][0]
