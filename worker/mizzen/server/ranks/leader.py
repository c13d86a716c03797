# SPDX-License-Identifier: Apache-2.0
"""Process of rank 0: loads its shard of the model, plans steps for all ranks, and serves gateways.

    python -m mizzen.server.ranks.leader --rank 0 --status-fd N --control-fd N --parent PID \\
        --config JSON [--links JSON] [--traces-fd N]

The supervisor starts it. The processes of the other ranks run `mizzen.server.ranks.follower`.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, Protocol, TypeVar

from mizzen.common.child_process import set_parent_death_signal
from mizzen.common.json_log import set_up_logging
from mizzen.server.config import EngineConfig
from mizzen.server.engine_api import EngineProtocol
from mizzen.server.image_model import RulesImageModel
from mizzen.server.metric_catalogue import Phase
from mizzen.server.model_files import read_model_files, tokenizer_hash
from mizzen.server.ranks.heartbeat import HeartbeatWriter
from mizzen.server.ranks.links import RankLinks
from mizzen.server.ranks.plan_channel import open_plan_channel
from mizzen.server.ranks.rank_status import RankStatus
from mizzen.server.serving_loop import ServingLoop, SupervisorGone
from mizzen.server.status_block import StatusWriter
from mizzen.server.tracing.live_traces import LiveTraces
from mizzen.wire.curve_keys import KeyFolder
from mizzen.wire.endpoint import require_safe
from mizzen.wire.limits import WireLimits
from mizzen.wire.messages import PROTOCOL, Welcome
from mizzen.wire.server.engine_server import WireServer

log = logging.getLogger(__name__)

ConfigT = TypeVar("ConfigT", bound=EngineConfig)


class StartupReporter(Protocol):
    """Receiver of an engine's startup progress."""

    def begin_phase(self, name: str) -> None:
        """Record that a phase starts: config, weights, kv, graphs or warmup."""
        ...

    def report_progress(self, done: int, total: int) -> None:
        """Record the finished and total work of the current phase, in bytes or items."""
        ...


EngineLoader = Callable[[ConfigT, StartupReporter], EngineProtocol]
"""Function that loads the engine for a configuration and reports the progress of its startup."""


class TraceableEngine(EngineProtocol, Protocol):
    """Engine that can write a trace of its steps."""

    def profile(self) -> None:
        """Trace the next steps; safe to call from a signal handler."""
        ...


def engine_name(config: EngineConfig) -> str:
    """Return the engine's configured name, or else the host name and the supervisor's process id."""
    return config.engine_id or f"{socket.gethostname()}-{os.getppid()}"


def build_welcome(config: EngineConfig, engine: EngineProtocol, files: dict[str, bytes]) -> Welcome:
    """Return the message that describes the engine to gateways.

    `files` are the contents of the model's files that gateways may fetch, by name.
    """
    info = engine.info
    return Welcome(
        protocol=PROTOCOL,
        engine=engine_name(config),
        incarnation=secrets.token_hex(8),
        revision=config.revision,
        model=config.served_name or Path(config.model).resolve().name,
        tokenizer_hash=tokenizer_hash(files),
        files={name: len(content) for name, content in files.items()},
        context_length=info.context_length,
        vocab_size=info.vocab_size,
        end_token_ids=tuple(info.end_token_ids),
        page_size=info.page_size,
        max_running_requests=config.max_running_requests,
        draining=False,
        generates=info.generates,
        quantization=info.quantization,
        task=str(info.task),
        labels=info.labels,
        score_activation=str(info.score_activation),
        pooling=info.pooling,
        expert_groups=info.expert_groups,
        images=info.images,
    )


def open_wire_keys(config: EngineConfig) -> KeyFolder | None:
    """Return the configured CURVE keys, or None; check that the endpoint is not exposed without keys.

    Raises:
        ValueError: other machines can reach the endpoint but no keys are configured, the endpoint is
            malformed, or a key file is unusable.
    """
    keys = KeyFolder(Path(config.keys), "engine") if config.keys else None
    require_safe(config.wire_bind, keys)
    return keys


def serve_engine(
    config: ConfigT,
    status: RankStatus,
    control: int,
    load: EngineLoader[ConfigT],
    limits: WireLimits | None = None,
    traces: LiveTraces | None = None,
) -> None:
    """Load an engine and serve gateways until the supervisor stops the engine.

    Args:
        config: Configuration of the engine.
        status: Receiver of phases, progress and counters.
        control: Read end of the supervisor's control pipe.
        load: Function that loads the engine.
        limits: Limits of the wire; the defaults if None.
        traces: Receiver of traced requests, which this function closes; None if tracing is off.

    Raises:
        Exception: loading or a step failed; requests have been ended with an error, and the status block
            contains the reason.
    """
    wire: WireServer | None = None
    engine: EngineProtocol | None = None
    try:
        status.enter_phase(Phase.CONFIG)
        keys, files = open_wire_keys(config), read_model_files(Path(config.model))
        engine = load(config, status)
        greeting = build_welcome(config, engine, files)
        waiting = config.max_waiting_requests
        wire = WireServer(
            config.wire_bind,
            keys,
            greeting,
            files,
            max_waiting=waiting,
            limits=limits,
            traces=traces is not None,
            images=RulesImageModel(engine.image_rules) if engine.image_rules is not None else None,
        )
        status.set_memory(engine.info)
        status.enter_serving(wire.endpoint)
        log.info("serving", extra={"fields": {"wire": wire.endpoint, "model": greeting.model}})
        ServingLoop(engine, wire, status, control, config.drain_timeout_seconds, traces).run()
        status.enter_phase(Phase.ENDED)
    except BaseException as error:
        status.fail(f"{type(error).__name__}: {error}")  # first, because closing may hang
        if wire:
            wire.out.end_all(0, "the engine failed")
        raise
    finally:
        if wire:
            wire.close()
        if traces:
            traces.close()
        if engine:
            engine.close()


def main(config_type: type[ConfigT], importer: Callable[[RankLinks | None], EngineLoader[ConfigT]]) -> int:
    """Run the process of rank 0 and return its exit code; the command line is meant only for the supervisor.

    Args:
        config_type: Class of the engine's configuration.
        importer: Function that performs the slow imports and returns the function that loads the engine.
            `importer` receives the links to the other ranks, or None if there are no other ranks.
    """
    parser = argparse.ArgumentParser(description="a rank; started by the supervisor")
    for name in ("rank", "status-fd", "control-fd", "parent"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--traces-fd", type=int)
    parser.add_argument("--config", type=json.loads, required=True)
    parser.add_argument("--links", type=RankLinks.from_json)
    args = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # the supervisor receives and handles them
    set_parent_death_signal(args.parent)
    set_up_logging(process=f"rank{args.rank}")
    status = RankStatus(StatusWriter(args.status_fd, args.rank))
    status.enter_phase(Phase.IMPORT)
    traces = None if args.traces_fd is None else LiveTraces(args.traces_fd, status.count_dropped_spans)
    try:
        load = _freeze_after_load(importer(args.links))
        serve_engine(config_type(**args.config), status, args.control_fd, load, traces=traces)
    except SupervisorGone:
        return 1
    except Exception as error:
        log.exception("rank failed", extra={"fields": {"reason": str(error)}})
        return status.exit_code(error)
    return 0


def _freeze_after_load(load: EngineLoader[ConfigT]) -> EngineLoader[ConfigT]:
    """Return a loader that exempts the loaded objects from garbage collection, which would delay steps."""

    def load_and_freeze(config: ConfigT, startup: StartupReporter) -> EngineProtocol:
        engine = load(config, startup)
        gc.collect()
        gc.freeze()
        return engine

    return load_and_freeze


def exit_process(code: int) -> NoReturn:
    """Exit without finalizing the interpreter: once torch is imported, finalization takes seconds."""
    logging.shutdown()
    os._exit(code)


def _trace_on_signal(config: EngineConfig, engine: TraceableEngine) -> EngineProtocol:
    """If --profile is set, make the engine write a trace on SIGUSR2, which the supervisor forwards."""
    if config.profile:
        signal.signal(signal.SIGUSR2, lambda number, frame: engine.profile())
    return engine


def import_engine(links: RankLinks | None) -> EngineLoader[EngineConfig]:
    """Import the real engine and return the function that loads it; torch is imported only here."""
    from mizzen.engine.loading.loader import load_engine

    if links is None:
        return lambda config, startup: _trace_on_signal(
            config, load_engine(config, startup.begin_phase, startup.report_progress)
        )
    from mizzen.engine.execution.tp_worker import FollowerRanks
    from mizzen.engine.loading.placement import pin_to_near_cpus, rank_placement
    from mizzen.parallel.process_group import RankGroup

    def load(config: EngineConfig, startup: StartupReporter) -> EngineProtocol:
        placement = rank_placement(config, 0, links.rendezvous, links.address)
        pin_to_near_cpus(placement)
        heartbeat = HeartbeatWriter(links.heartbeats, 0)
        heartbeat.start()
        plans = open_plan_channel(config, links)
        followers = FollowerRanks(join_group=lambda: RankGroup(placement), plans=plans, heartbeat=heartbeat)
        engine = load_engine(config, startup.begin_phase, startup.report_progress, followers=followers)
        plans.wait_for_ranks(placement.timeout_seconds)
        heartbeat.mark_serving()
        return _trace_on_signal(config, engine)

    return load


if __name__ == "__main__":
    exit_process(main(EngineConfig, import_engine))
