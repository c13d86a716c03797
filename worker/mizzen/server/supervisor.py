"""The engine pod's first process: starts the ranks, shows how they are, and ends the pod with a reason.

It imports no torch and takes no part in serving. What it knows of a rank comes from the status block and from
the kernel, so a rank that hangs, is stopped or dies is seen within a second.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

from mizzen.common.json_log import set_up_logging
from mizzen.server.clock_gaps import Awake
from mizzen.server.config import EngineConfig
from mizzen.server.config_check import check_config, open_keys
from mizzen.server.exit_reason import MISCONFIGURED, WRONG_CONFIGURATION, End
from mizzen.server.failed_rank import culprit
from mizzen.server.http import Health, HttpServer, Routes
from mizzen.server.metric_catalogue import Phase
from mizzen.server.metrics import EngineView, registry
from mizzen.server.nodes.follower_node import Follower
from mizzen.server.nodes.group import Others
from mizzen.server.nodes.group_watch import GroupWatch
from mizzen.server.nodes.leader_node import Leader
from mizzen.server.ranks.device_loss import device_lost
from mizzen.server.ranks.links import between_pods, create_links
from mizzen.server.ranks.phases import share_done
from mizzen.server.ranks.processes import RankProcess, kill_all, reap, spawn
from mizzen.server.serving_loop import Command
from mizzen.server.signals import SignalQueue
from mizzen.server.status_block import StatusReader, create_block

log = logging.getLogger(__name__)

TURN_SECONDS = 0.25
GRACE_SECONDS = 4.0
"""Beyond the drain timeout, for ranks to send their last frames and free the device."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR2)
DEVICE_LOST = 3
"""Exit code of an engine whose device is gone or broken."""
RANK_MODULE = "mizzen.server.ranks.leader"
FOLLOWER_MODULE = "mizzen.server.ranks.follower"
"""Runs the ranks behind the first."""


class Supervisor:
    """Supervises one engine. `run` once."""

    def __init__(self, config: EngineConfig, rank_module: str = RANK_MODULE) -> None:
        self._config = config
        self._module = rank_module
        self._started = time.monotonic()
        self._others: Others | None = None
        self._first = config.node_rank * config.local_ranks
        self._links = create_links(config) if config.tensor > 1 else None
        self._block = self._links.status if self._links else create_block(1)
        self._readers = [StatusReader(self._block, rank) for rank in range(config.local_ranks)]
        self._watch = GroupWatch(config, self._links) if self._links else None
        self._awake = Awake()
        self._heartbeat = 0.0
        """When rank 0's loop last turned, as far as can be blamed on it."""
        self._ranks: list[RankProcess] = []
        self._end: End | None = None
        self._draining = False
        self._terminating_since: float | None = None

    def run(self) -> int:
        """Serve until a signal or a failure; return the exit code."""
        config = self._config
        with SignalQueue(*SIGNALS) as signals:
            metrics = registry(self._model, self._view, config.page_size)
            routes = Routes(self._healthy, self._ready, self._drain, metrics)
            http: HttpServer | None = None
            try:
                http = HttpServer(config.http_host, config.http_port, routes)
                address = f"{http.server_name}:{http.server_port}"
                log.info("engine starts", extra={"fields": {"http": address, "model": config.model}})
                self._others = _others(config, self._started)
                while (end := self._end) is None:
                    if not self._ranks and (self._others is None or self._others.began):
                        self._spawn()
                    self._turn(signals.wait(TURN_SECONDS))
                self._record(end)
            finally:
                kill_all(self._ranks)
                if self._others:
                    self._others.close(self._end or End(1, "rank_failed", "the supervisor failed"))
                if http:
                    http.stop()
                if self._links:
                    self._links.close()
                else:
                    os.close(self._block)
        return end.code

    def _spawn(self) -> None:
        """Start this node's ranks."""
        config = self._config
        if self._links and self._others:
            self._links = between_pods(self._links, config, self._others.group, self._others.key)
        for rank in range(self._first, self._first + config.local_ranks):
            module = FOLLOWER_MODULE if rank else self._module
            self._ranks.append(spawn(module, rank, config, self._block, self._links))

    @property
    def _leads(self) -> bool:
        """Whether rank 0 is here."""
        return self._config.node_rank == 0

    @property
    def _model(self) -> str:
        return self._config.served_name or Path(self._config.model).resolve().name

    # ── one turn ──────────────────────────────────────────────────────────────────────────────────────────

    def _turn(self, signals: list[int]) -> None:
        reap(self._ranks)
        for number in signals:
            if number in (signal.SIGTERM, signal.SIGINT):
                self._on_signal(number)
            elif number == signal.SIGUSR2:
                self._profile()
        now = time.monotonic()
        self._hear(now)
        own = self._end or self._ended_rank() or self._late(now)
        if self._others is not None:
            self._others.turn(
                self._watch.reports(self._readers, now) if self._watch else [],
                own,
                self._terminating_since is not None,
                now,
            )
            if self._others.asked and self._terminating_since is None:
                log.info("another node was asked to end, so all do")
                self._terminate()
            own = self._others.verdict(self._end or own, now)
        self._end = own

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._terminating_since is not None:
            self._end = End(128 + number, "signal", f"ended at once by a second signal ({name})")
            return
        log.info("asked to end", extra={"fields": {"signal": name}})
        self._terminate()

    def _terminate(self) -> None:
        """Drain, then end; another node than 0 has node 0 do so, and ends with it."""
        self._terminating_since = time.monotonic()
        if not self._leads and self._others and self._others.group:
            return
        if self._phase() < Phase.SERVING:
            self._end = End(0)  # nothing runs yet
            return
        self._draining = True
        for rank in self._ranks:
            rank.tell(Command.END)

    def _profile(self) -> None:
        """Let rank 0 take a trace; where none can be, the signal would end it."""
        if not self._leads or not self._config.profile or self._phase() < Phase.SERVING:
            log.warning(
                "SIGUSR2 takes a trace of an engine that serves, and was started with --profile FOLDER"
            )
            return
        self._ranks[0].signal(signal.SIGUSR2)

    def _ended_rank(self) -> End | None:
        ended = [rank for rank in self._ranks if rank.code is not None]
        if not ended:
            return None
        over = self._terminating_since is not None or not self._leads
        if over and all(rank.code == 0 for rank in ended):
            return End(0) if len(ended) == len(self._ranks) else None
        codes = {rank.number: rank.code or 0 for rank in ended if rank.code != 0 or not over}
        statuses = {number: reader.read() for number, reader in enumerate(self._readers, self._first)}
        number = culprit(codes, statuses)
        words = statuses[number].text
        if statuses[number]["phase"] != Phase.FAILED:
            return End(1, "rank_died", self._ranks[number - self._first].obituary())
        if device_lost(words):
            return End(DEVICE_LOST, "device_lost", f"rank {number} failed: {words}")
        if codes.get(number) == WRONG_CONFIGURATION:
            return End(WRONG_CONFIGURATION, MISCONFIGURED, f"rank {number} failed: {words}")
        return End(1, "rank_failed", f"rank {number} failed: {words}")

    def _late(self, now: float) -> End | None:
        config, since = self._config, self._terminating_since
        if since is not None and now - since > config.drain_timeout_seconds + GRACE_SECONDS:
            return End(1, "watchdog", "the ranks did not end after the drain timeout")
        if self._others is not None and not self._others.began:
            if now - self._started <= config.startup_timeout_seconds:
                return None
            limit = f"--startup-timeout-seconds {config.startup_timeout_seconds:g}"
            return End(1, "startup_timeout", f"not started within {limit}: {self._others.waits_for()}")
        for number, reader in enumerate(self._readers, self._first):
            status = reader.read()
            if status["phase"] < Phase.SERVING:
                if now - self._started > config.startup_timeout_seconds:
                    phase = Phase(int(status["phase"])).name.lower()
                    reason = (
                        f"rank {number} did not start within --startup-timeout-seconds "
                        f"{config.startup_timeout_seconds:g}; it was in phase {phase}"
                    )
                    return End(1, "startup_timeout", reason)
            elif number or status["phase"] > Phase.DRAINING:
                continue  # the pulses tell of ranks behind the first
            elif (silence := self._silence()) > config.watchdog_seconds:
                reason = (
                    f"rank {number} made no progress for {silence:.1f} s "
                    f"(--watchdog-seconds {config.watchdog_seconds:g}) with {status['live']:.0f} requests"
                )
                return End(1, "watchdog", reason)
        if not self._watch or not self._leads:
            return None
        fault = self._watch.look(self._others.pulses(now) if self._others else [], now)
        return End(1, "watchdog", fault) if fault else None

    def _record(self, end: End) -> None:
        if not end.kind:
            log.info("engine ended")
            return
        log.error("engine failed", extra={"fields": {"kind": end.kind, "reason": end.reason}})
        _leave_words(self._config, f"{end.kind}: {end.reason}")

    # ── what HTTP shows; called from its threads ──────────────────────────────────────────────────────────

    def _phase(self) -> Phase:
        """Return the phase of the rank that is furthest behind."""
        phases = [Phase(int(reader.read()["phase"])) for reader in self._readers]
        return min(phases + (self._others.phases if self._others else []))

    def _state(self) -> str:
        phase = self._phase()
        if self._end and self._end.kind:
            return "failed"
        if phase < Phase.SERVING:
            return "starting"
        return "draining" if self._draining or phase != Phase.SERVING else "serving"

    def _silence(self) -> float:
        """Return the seconds since the last turn of rank 0's loop, where it is here."""
        if not self._leads:
            return 0.0
        return time.monotonic() - max(self._heartbeat, self._readers[0].read()["heartbeat"])

    def _hear(self, now: float) -> None:
        """Note rank 0's heartbeat; time in which this process did not run either does not count."""
        heard = max(self._heartbeat, self._readers[0].read()["heartbeat"])
        self._heartbeat = min(now, heard + self._awake.slept(now))

    def _healthy(self) -> Health:
        state = self._state()
        if state in ("serving", "draining") and self._silence() > self._config.watchdog_seconds:
            return Health(False, {"state": state, "reason": f"no progress for {self._silence():.1f} s"})
        return Health(state != "failed", {"state": state})

    def _ready(self) -> Health:
        state = self._state()
        phase = self._phase()
        body: dict[str, Any] = {"state": state, "phase": phase.name.lower()}
        share = share_done((reader.read() for reader in self._readers), phase)
        if share is not None:
            body["progress"] = round(share, 3)
        if self._others and not self._others.began:
            body["reason"] = self._others.waits_for()
        if state == "serving" and self._leads:
            body["wire"] = self._readers[0].read().text
        return Health(state == "serving", body)

    def _drain(self) -> dict[str, Any]:
        if self._leads and self._phase() >= Phase.SERVING:
            self._draining = True
            for rank in self._ranks:
                rank.tell(Command.DRAIN)
        return {"state": self._state(), "requests": int(self._readers[0].read()["live"])}

    def _view(self) -> EngineView:
        uptime = time.monotonic() - self._started
        kind = self._end.kind if self._end else ""
        return EngineView(self._readers[0].read(), self._state(), kind, uptime)


def _leave_words(config: EngineConfig, words: str) -> None:
    """Write the termination message: what Kubernetes shows of an engine that has ended."""
    path = Path(config.termination_message)
    # Kubernetes mounts the file in /dev; where it did not, nothing of ours belongs there.
    if path.is_file() or (path.parent.is_dir() and path.parent != Path("/dev")):
        try:
            path.write_text(f"{words}\n")
        except OSError as error:
            log.warning("no termination message", extra={"fields": {"reason": str(error)}})


def _others(config: EngineConfig, now: float) -> Others | None:
    """Return the other nodes of a configuration, if there are some.

    Raises:
        ValueError: an endpoint cannot be used, or only with keys.
    """
    if config.nodes == 1:
        return None
    keys = open_keys(config)
    return Leader(config, keys) if config.node_rank == 0 else Follower(config, keys, now)


def run(config: EngineConfig, rank_module: str = RANK_MODULE) -> int:
    """Run an engine in the foreground until it ends; return the exit code.

    0 after a drain; 1 after a failure; 2 for a configuration that cannot work; 3 when a device is lost, so
    that a restart in its place does not help; 128 + n when a second signal n ended it at once. Except after
    0, the reason is in the log and in the termination message.
    """
    set_up_logging(process="supervisor")
    try:
        if config.tensor > 1 and rank_module != RANK_MODULE:
            raise ValueError(f"--tensor must be 1 where nothing is computed, not {config.tensor}")
        check_config(config, computes=rank_module == RANK_MODULE)
    except ValueError as error:
        log.error(MISCONFIGURED, extra={"fields": {"reason": str(error)}})
        _leave_words(config, f"{MISCONFIGURED}: {error}")
        return WRONG_CONFIGURATION
    try:
        return Supervisor(config, rank_module).run()
    except ValueError as error:
        log.error("cannot start", extra={"fields": {"reason": str(error)}})
        _leave_words(config, f"cannot start: {error}")
        return 1
    except OSError as error:
        log.error("cannot start", extra={"fields": {"reason": str(error), "http_port": config.http_port}})
        _leave_words(config, f"cannot start with --http-port {config.http_port}: {error}")
        return 1
