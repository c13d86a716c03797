# SPDX-License-Identifier: Apache-2.0
"""Process of a rank other than 0: loads its shard of the model, then runs the step plans that rank 0 sends.

    python -m mizzen.server.ranks.follower --rank 1 --links JSON --parent PID --config JSON

The supervisor or `mizzen.offline` starts it. It exits when rank 0 ends the stream of plans, or when its
parent dies; it does not receive commands from the supervisor.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import signal
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from mizzen.common.child_process import set_parent_death_signal
from mizzen.common.json_log import set_up_logging
from mizzen.engine.config import EngineOptions
from mizzen.server.metric_catalogue import Phase
from mizzen.server.ranks.heartbeat import HeartbeatWriter
from mizzen.server.ranks.links import RankLinks
from mizzen.server.ranks.phases import PhaseStatus
from mizzen.server.status_block import StatusWriter
from mizzen.wire.curve_keys import find_pair
from mizzen.wire.ranks.plan_ring import RingReader
from mizzen.wire.ranks.plan_tcp import PlanClient

log = logging.getLogger(__name__)


def run_follower(rank: int, links: RankLinks, options: EngineOptions, keys: str, status: PhaseStatus) -> None:
    """Load a rank's shard, and run step plans until rank 0 ends the stream of plans.

    Args:
        rank: Rank of this process, at least 1.
        links: Links to the other ranks.
        options: Options of the engine.
        keys: Folder with CURVE keys; empty if no keys are configured.
        status: Receiver of phases and progress.

    Raises:
        Exception: loading or a step failed.
    """
    from mizzen.engine.loading.loader import load_follower
    from mizzen.engine.loading.placement import pin_to_near_cpus, rank_placement
    from mizzen.parallel.process_group import RankGroup

    placement = rank_placement(options, rank, links.rendezvous, links.address)
    pin_to_near_cpus(placement)
    plans = open_plan_receiver(rank, links, keys)
    heartbeat = HeartbeatWriter(links.heartbeats, rank - links.first_rank)
    heartbeat.start()
    follower = load_follower(
        options, lambda: RankGroup(placement), status.begin_phase, status.report_progress
    )
    gc.collect()
    gc.freeze()  # exempt torch's many objects from garbage collection, which would delay steps
    heartbeat.mark_serving()
    status.enter_phase(Phase.SERVING)
    follower.run_plans(plans, heartbeat)
    heartbeat.close()
    follower.close()
    status.enter_phase(Phase.ENDED)


def open_plan_receiver(rank: int, links: RankLinks, keys: str) -> RingReader | PlanClient:
    """Open a rank's end of the plan channel: shared memory in rank 0's pod, TCP in any other pod."""
    if not links.first_rank:
        return RingReader(links.ring, rank - 1)
    return PlanClient(
        links.plan_endpoint,
        find_pair(Path(keys), "engine", links.public_key) if links.public_key else None,
        rank,
    )


def select_engine_options(values: dict[str, Any]) -> EngineOptions:
    """Return the engine options among a process's options; others, such as ports, are ignored."""
    return EngineOptions(**{f.name: values[f.name] for f in fields(EngineOptions) if f.name in values})


def main() -> int:
    """Run the process and return its exit code; the command line is meant only for the parent process."""
    parser = argparse.ArgumentParser(description="a rank; started by rank 0 or by the supervisor")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--links", type=RankLinks.from_json, required=True)
    parser.add_argument("--config", type=json.loads, required=True)
    for name in ("status-fd", "control-fd"):
        parser.add_argument(f"--{name}", type=int, help="ignored; only rank 0 uses it")
    args = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # the supervisor, or rank 0's process, handles them
    set_parent_death_signal(args.parent)
    set_up_logging(process=f"rank{args.rank}")
    status = PhaseStatus(StatusWriter(args.links.status, args.rank - args.links.first_rank))
    status.enter_phase(Phase.IMPORT)
    try:
        run_follower(
            args.rank, args.links, select_engine_options(args.config), args.config.get("keys") or "", status
        )
    except BaseException as error:
        status.fail(f"{type(error).__name__}: {error}")
        log.exception("rank failed", extra={"fields": {"reason": str(error)}})
        return status.exit_code(error)
    return 0


def exit_process(code: int) -> NoReturn:
    """Exit without finalizing the interpreter: once torch is imported, finalization takes seconds."""
    logging.shutdown()
    os._exit(code)


if __name__ == "__main__":
    exit_process(main())
