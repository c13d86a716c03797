# SPDX-License-Identifier: Apache-2.0
"""Supervisor: the first process of an engine's pod, which starts the ranks, monitors them and reports
failures.

It never imports torch and takes no part in serving. It observes ranks only through shared memory and the
kernel, so it works even if a rank hangs, is stopped or dies.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

from mizzen.common.json_log import set_up_logging
from mizzen.server.clock_gaps import ClockGapMeter
from mizzen.server.config import EngineConfig
from mizzen.server.config_check import check_config, open_keys
from mizzen.server.exit_reason import CONFIGURATION_EXIT_CODE, MISCONFIGURED, ExitReason
from mizzen.server.failed_rank import find_failed_rank
from mizzen.server.http import Health, HttpServer, Routes
from mizzen.server.metric_catalogue import Phase
from mizzen.server.metrics import EngineView, build_registry
from mizzen.server.nodes.follower_node import FollowerNode
from mizzen.server.nodes.group import NodeGroup
from mizzen.server.nodes.group_watch import GroupMonitor
from mizzen.server.nodes.leader_node import LeaderNode
from mizzen.server.ranks.device_loss import is_device_lost
from mizzen.server.ranks.links import connect_pods, create_rank_links
from mizzen.server.ranks.phases import phase_progress
from mizzen.server.ranks.processes import RankProcess, kill_ranks, reap_ranks, spawn_rank
from mizzen.server.serving_loop import ControlCommand
from mizzen.server.signals import SignalQueue
from mizzen.server.status_block import StatusReader, create_status_blocks
from mizzen.server.tracing.trace_export import start_trace_export

log = logging.getLogger(__name__)

POLL_SECONDS = 0.25
GRACE_SECONDS = 4.0
"""Seconds that ranks have after the drain timeout to send their last frames and free the device."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR2)
DEVICE_LOST_EXIT_CODE = 3
"""Exit code of an engine whose device is gone or broken."""
RANK_MODULE = "mizzen.server.ranks.leader"
FOLLOWER_MODULE = "mizzen.server.ranks.follower"
"""Module that the processes of ranks 1 and up run."""


class Supervisor:
    """Supervisor of one engine; `run` may be called once."""

    def __init__(self, config: EngineConfig, rank_module: str = RANK_MODULE) -> None:
        self._config = config
        self._rank_module = rank_module
        self._started = time.monotonic()
        self._node_group: NodeGroup | None = None
        self._first_rank = config.node_rank * config.local_ranks
        self._links = create_rank_links(config) if config.tensor > 1 else None
        self._block = self._links.status if self._links else create_status_blocks(1)
        self._readers = [StatusReader(self._block, rank) for rank in range(config.local_ranks)]
        self._monitor = GroupMonitor(config, self._links) if self._links else None
        self._clock_gaps = ClockGapMeter()
        self._heartbeat = 0.0
        """Time of the last iteration of rank 0's loop, plus the lengths of all clock gaps since then."""
        self._traces = start_trace_export(config)
        self._ranks: list[RankProcess] = []
        self._exit: ExitReason | None = None
        self._draining = False
        self._terminating_since: float | None = None

    def run(self) -> int:
        """Serve until a signal or a failure; return the exit code."""
        config = self._config
        with SignalQueue(*SIGNALS) as signals:
            metrics = build_registry(self._model, self._metrics_view, config.page_size)
            routes = Routes(self._liveness, self._readiness, self._drain, metrics)
            http: HttpServer | None = None
            try:
                http = HttpServer(config.http_host, config.http_port, routes)
                address = f"{http.server_name}:{http.server_port}"
                log.info("engine starts", extra={"fields": {"http": address, "model": config.model}})
                self._node_group = _node_group(config, self._started)
                while (end := self._exit) is None:
                    if not self._ranks and (self._node_group is None or self._node_group.started):
                        self._spawn()
                    self._poll(signals.wait(POLL_SECONDS))
                self._report_exit(end)
            finally:
                kill_ranks(self._ranks)
                if self._node_group:
                    self._node_group.close(
                        self._exit or ExitReason(1, "rank_failed", "the supervisor failed")
                    )
                if http:
                    http.stop()
                if self._traces:
                    self._traces.close()
                if self._links:
                    self._links.close()
                else:
                    os.close(self._block)
        return end.code

    def _spawn(self) -> None:
        """Start the processes of this node's ranks."""
        config = self._config
        if self._links and self._node_group:
            self._links = connect_pods(self._links, config, self._node_group.group, self._node_group.key)
        for rank in range(self._first_rank, self._first_rank + config.local_ranks):
            module = FOLLOWER_MODULE if rank else self._rank_module
            traces = self._traces.descriptor if self._traces and not rank else None
            self._ranks.append(spawn_rank(module, rank, config, self._block, self._links, traces=traces))
        if self._traces:
            self._traces.release_descriptor()

    @property
    def _is_leader(self) -> bool:
        """Whether this node runs rank 0."""
        return self._config.node_rank == 0

    @property
    def _model(self) -> str:
        return self._config.served_name or Path(self._config.model).resolve().name

    # ── one poll ──────────────────────────────────────────────────────────────────────────────────────────

    def _poll(self, signals: list[int]) -> None:
        reap_ranks(self._ranks)
        for number in signals:
            if number in (signal.SIGTERM, signal.SIGINT):
                self._on_signal(number)
            elif number == signal.SIGUSR2:
                self._profile()
        now = time.monotonic()
        self._record_heartbeat(now)
        exit_reason = self._exit or self._check_exited_ranks() or self._check_deadlines(now)
        if self._node_group is not None:
            self._node_group.exchange_reports(
                self._monitor.build_reports(self._readers, now) if self._monitor else [],
                exit_reason,
                self._terminating_since is not None,
                now,
            )
            if self._node_group.exit_requested and self._terminating_since is None:
                log.info("exiting because another node of the group was asked to exit")
                self._terminate()
            exit_reason = self._node_group.decide_exit(self._exit or exit_reason, now)
        self._exit = exit_reason

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._terminating_since is not None:
            self._exit = ExitReason(128 + number, "signal", f"ended at once by a second signal ({name})")
            return
        log.info("exit requested", extra={"fields": {"signal": name}})
        self._terminate()

    def _terminate(self) -> None:
        """Drain, then exit; a node other than node 0 only waits until node 0 has drained."""
        self._terminating_since = time.monotonic()
        if not self._is_leader and self._node_group and self._node_group.group:
            return
        if self._phase() < Phase.SERVING:
            self._exit = ExitReason(0)  # no request can be running yet
            return
        self._draining = True
        for rank in self._ranks:
            rank.send_command(ControlCommand.END)

    def _profile(self) -> None:
        """Make rank 0 take a trace, by forwarding SIGUSR2, unless the signal would kill the rank."""
        if not self._is_leader or not self._config.profile or self._phase() < Phase.SERVING:
            log.warning(
                "SIGUSR2 ignored: a trace needs a serving engine that was started with --profile FOLDER"
            )
            return
        self._ranks[0].signal(signal.SIGUSR2)

    def _check_exited_ranks(self) -> ExitReason | None:
        ended = [process for process in self._ranks if process.code is not None]
        if not ended:
            return None
        is_expected = self._terminating_since is not None or not self._is_leader
        if is_expected and all(process.code == 0 for process in ended):
            return ExitReason(0) if len(ended) == len(self._ranks) else None
        codes = {process.rank: process.code or 0 for process in ended if process.code != 0 or not is_expected}
        statuses = {rank: reader.read() for rank, reader in enumerate(self._readers, self._first_rank)}
        rank = find_failed_rank(codes, statuses)
        message = statuses[rank].text
        if statuses[rank]["phase"] != Phase.FAILED:
            return ExitReason(1, "rank_died", self._ranks[rank - self._first_rank].describe_exit())
        if is_device_lost(message):
            return ExitReason(DEVICE_LOST_EXIT_CODE, "device_lost", f"rank {rank} failed: {message}")
        # The rank that reported first need not be the one that exited first.
        if self._ranks[rank - self._first_rank].wait_for_exit() == CONFIGURATION_EXIT_CODE:
            return ExitReason(CONFIGURATION_EXIT_CODE, MISCONFIGURED, f"rank {rank} failed: {message}")
        return ExitReason(1, "rank_failed", f"rank {rank} failed: {message}")

    def _check_deadlines(self, now: float) -> ExitReason | None:
        config, since = self._config, self._terminating_since
        if since is not None and now - since > config.drain_timeout_seconds + GRACE_SECONDS:
            return ExitReason(1, "watchdog", "the ranks did not exit after the drain timeout")
        if self._node_group is not None and not self._node_group.started:
            if now - self._started <= config.startup_timeout_seconds:
                return None
            limit = f"--startup-timeout-seconds {config.startup_timeout_seconds:g}"
            return ExitReason(
                1, "startup_timeout", f"not started within {limit}: {self._node_group.describe_wait()}"
            )
        for rank, reader in enumerate(self._readers, self._first_rank):
            status = reader.read()
            if status["phase"] < Phase.SERVING:
                if now - self._started > config.startup_timeout_seconds:
                    phase = Phase(int(status["phase"])).name.lower()
                    reason = (
                        f"rank {rank} did not start within --startup-timeout-seconds "
                        f"{config.startup_timeout_seconds:g}; it was in phase {phase}"
                    )
                    return ExitReason(1, "startup_timeout", reason)
            elif rank or status["phase"] > Phase.DRAINING:
                continue  # ranks 1 and up are monitored through their heartbeats
            elif (silence := self._silence()) > config.watchdog_seconds:
                reason = (
                    f"rank {rank} made no progress for {silence:.1f} s "
                    f"(--watchdog-seconds {config.watchdog_seconds:g}) with {status['live']:.0f} requests"
                )
                return ExitReason(1, "watchdog", reason)
        if not self._monitor or not self._is_leader:
            return None
        fault = self._monitor.find_fault(
            self._node_group.read_heartbeats(now) if self._node_group else [], now
        )
        return ExitReason(1, "watchdog", fault) if fault else None

    def _report_exit(self, end: ExitReason) -> None:
        if not end.kind:
            log.info("engine exited")
            return
        log.error("engine failed", extra={"fields": {"kind": end.kind, "reason": end.reason}})
        _write_termination_message(self._config, f"{end.kind}: {end.reason}")

    # ── callbacks of the HTTP server, called from its threads ─────────────────────────────────────────────

    def _phase(self) -> Phase:
        """Return the earliest phase that any rank is in."""
        phases = [Phase(int(reader.read()["phase"])) for reader in self._readers]
        return min(phases + (self._node_group.phases if self._node_group else []))

    def _state(self) -> str:
        phase = self._phase()
        if self._exit and self._exit.kind:
            return "failed"
        if phase < Phase.SERVING:
            return "starting"
        return "draining" if self._draining or phase != Phase.SERVING else "serving"

    def _silence(self) -> float:
        """Return the seconds since the last iteration of rank 0's loop, or 0 if another node runs rank 0."""
        if not self._is_leader:
            return 0.0
        return time.monotonic() - max(self._heartbeat, self._readers[0].read()["heartbeat"])

    def _record_heartbeat(self, now: float) -> None:
        """Record rank 0's heartbeat, moved forward by the time in which this process itself did not run."""
        heartbeat = max(self._heartbeat, self._readers[0].read()["heartbeat"])
        self._heartbeat = min(now, heartbeat + self._clock_gaps.measure(now))

    def _liveness(self) -> Health:
        state = self._state()
        if state in ("serving", "draining") and self._silence() > self._config.watchdog_seconds:
            return Health(False, {"state": state, "reason": f"no progress for {self._silence():.1f} s"})
        return Health(state != "failed", {"state": state})

    def _readiness(self) -> Health:
        state = self._state()
        phase = self._phase()
        body: dict[str, Any] = {"state": state, "phase": phase.name.lower()}
        share = phase_progress((reader.read() for reader in self._readers), phase)
        if share is not None:
            body["progress"] = round(share, 3)
        if self._node_group and not self._node_group.started:
            body["reason"] = self._node_group.describe_wait()
        if state == "serving" and self._is_leader:
            body["wire"] = self._readers[0].read().text
        return Health(state == "serving", body)

    def _drain(self) -> dict[str, Any]:
        if self._is_leader and self._phase() >= Phase.SERVING:
            self._draining = True
            for rank in self._ranks:
                rank.send_command(ControlCommand.DRAIN)
        return {"state": self._state(), "requests": int(self._readers[0].read()["live"])}

    def _metrics_view(self) -> EngineView:
        uptime = time.monotonic() - self._started
        kind = self._exit.kind if self._exit else ""
        dropped = self._traces.dropped if self._traces else 0
        return EngineView(self._readers[0].read(), self._state(), kind, uptime, dropped)


def _write_termination_message(config: EngineConfig, message: str) -> None:
    """Write the termination message, which Kubernetes reports as the reason for the container's exit."""
    path = Path(config.termination_message)
    # Kubernetes mounts the file into /dev. If it is not mounted there, do not create it.
    if path.is_file() or (path.parent.is_dir() and path.parent != Path("/dev")):
        try:
            path.write_text(f"{message}\n")
        except OSError as error:
            log.warning("cannot write the termination message", extra={"fields": {"reason": str(error)}})


def _node_group(config: EngineConfig, now: float) -> NodeGroup | None:
    """Return this node's connection to the other nodes, or None if the configuration has a single node.

    Raises:
        ValueError: an endpoint cannot be bound, or it needs keys and none are configured.
    """
    if config.nodes == 1:
        return None
    keys = open_keys(config)
    return LeaderNode(config, keys) if config.node_rank == 0 else FollowerNode(config, keys, now)


def run_engine(config: EngineConfig, rank_module: str = RANK_MODULE) -> int:
    """Run an engine in the foreground until it exits; return the exit code.

    The code is 0 after a drain; 1 after a failure; 2 for an invalid configuration; 3 if a device is lost (a
    restart on the same device would not help); 128 + n if a second signal, with number n, ended the engine at
    once. For all codes except 0, the log and the termination message contain the reason.
    """
    set_up_logging(process="supervisor")
    try:
        if config.tensor > 1 and rank_module != RANK_MODULE:
            raise ValueError(f"--tensor must be 1 for a simulated engine, not {config.tensor}")
        check_config(config, loads_model=rank_module == RANK_MODULE)
    except ValueError as error:
        log.error(MISCONFIGURED, extra={"fields": {"reason": str(error)}})
        _write_termination_message(config, f"{MISCONFIGURED}: {error}")
        return CONFIGURATION_EXIT_CODE
    try:
        return Supervisor(config, rank_module).run()
    except ValueError as error:
        log.error("cannot start", extra={"fields": {"reason": str(error)}})
        _write_termination_message(config, f"cannot start: {error}")
        return 1
    except OSError as error:
        log.error("cannot start", extra={"fields": {"reason": str(error), "http_port": config.http_port}})
        _write_termination_message(config, f"cannot start with --http-port {config.http_port}: {error}")
        return 1
