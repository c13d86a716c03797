"""The engine pod's first process: starts the ranks, shows how they are, and ends the pod with a reason.

It imports no torch and takes no part in serving. What it knows of a rank comes from the status block and from
the kernel, so a rank that hangs, is stopped or dies is seen within a second.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mizzen.models.registry import read_config
from mizzen.models.shares import check_shares
from mizzen.server.catalogue import Phase
from mizzen.server.config import EngineConfig
from mizzen.server.files import ModelFolderError
from mizzen.server.http import Health, HttpServer, Routes
from mizzen.server.links import Links, create_links
from mizzen.server.loop import Command
from mizzen.server.metrics import EngineView, registry
from mizzen.server.pulse import PulseReader, RankWatch
from mizzen.server.ranks import RankProcess, reap, spawn
from mizzen.server.signals import SignalQueue
from mizzen.server.status import StatusReader, create_block
from mizzen.wire.endpoint import require_safe
from mizzen.wire.keys import load_ring
from mizzen.wire.log import set_up_logging

log = logging.getLogger(__name__)

TURN_SECONDS = 0.25
GRACE_SECONDS = 4.0
"""Beyond the drain timeout, for ranks to send their last frames and free the device."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR2)
RANK_MODULE = "mizzen.server.rank"
FOLLOWER_MODULE = "mizzen.server.follower"
"""Runs the ranks behind the first."""


@dataclass(frozen=True, slots=True)
class End:
    """How the engine ended."""

    code: int
    kind: str = ""
    """rank_died, rank_failed, watchdog, startup_timeout or signal; empty for a clean end."""
    reason: str = ""


class GroupWatch:
    """Looks after the ranks of a group from outside."""

    def __init__(self, config: EngineConfig, links: Links) -> None:
        """Take the configuration's deadlines; a step on cpu may take as long as the watchdog allows."""
        ranks, seconds = config.rank_deadline_seconds, config.watchdog_seconds
        steps = min(ranks, seconds) if config.device == "cuda" else seconds
        self._pulses = PulseReader(links.pulses, links.size)
        self._watch = RankWatch(links.size, ranks, steps)

    def look(self, now: float) -> str | None:
        """Return which rank holds up the others, and how, if one does."""
        return self._watch.look(self._pulses.read(), now)


class Supervisor:
    """Supervises one engine. `run` once."""

    def __init__(self, config: EngineConfig, rank_module: str = RANK_MODULE) -> None:
        self._config = config
        self._module = rank_module
        self._started = time.monotonic()
        self._links = create_links(config.tensor) if config.tensor > 1 else None
        self._block = self._links.status if self._links else create_block(1)
        self._readers = [StatusReader(self._block, rank) for rank in range(config.tensor)]
        self._watch = GroupWatch(config, self._links) if self._links else None
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
            http = HttpServer(config.http_host, config.http_port, routes)
            address = f"{http.server_name}:{http.server_port}"
            log.info("engine starts", extra={"fields": {"http": address, "model": config.model}})
            try:
                for rank in range(config.tensor):
                    module = FOLLOWER_MODULE if rank else self._module
                    self._ranks.append(spawn(module, rank, config, self._block, self._links))
                while self._end is None:
                    self._turn(signals.wait(TURN_SECONDS))
                self._record(self._end)
            finally:
                for rank in self._ranks:
                    rank.kill()
                http.stop()
                if self._links:
                    self._links.close()
                else:
                    os.close(self._block)
        return self._end.code

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
        self._end = self._end or self._ended_rank() or self._late(time.monotonic())

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._terminating_since is not None:
            self._end = End(128 + number, "signal", f"ended at once by a second signal ({name})")
            return
        self._terminating_since = time.monotonic()
        log.info("asked to end", extra={"fields": {"signal": name}})
        if self._phase() < Phase.SERVING:
            self._end = End(0)  # nothing runs yet
            return
        self._draining = True
        for rank in self._ranks:
            rank.tell(Command.END)

    def _profile(self) -> None:
        """Let rank 0 take a trace; where none can be, the signal would end it."""
        if not self._config.profile or self._phase() < Phase.SERVING:
            log.warning(
                "SIGUSR2 takes a trace of an engine that serves, and was started with --profile FOLDER"
            )
            return
        self._ranks[0].signal(signal.SIGUSR2)

    def _ended_rank(self) -> End | None:
        ended = [rank for rank in self._ranks if rank.code is not None]
        if not ended:
            return None
        if self._terminating_since is not None and all(rank.code == 0 for rank in ended):
            return End(0) if len(ended) == len(self._ranks) else None
        # One that was killed took the others along: they find their connections closed.
        killed = [rank for rank in ended if rank.code is not None and rank.code < 0]
        wrong = [rank for rank in ended if rank.code != 0 or self._terminating_since is None]
        rank = [*killed, *wrong][0]
        snapshot = self._readers[rank.number].read()
        if snapshot["phase"] == Phase.FAILED:
            return End(1, "rank_failed", f"rank {rank.number} failed: {snapshot.text}")
        return End(1, "rank_died", rank.obituary())

    def _late(self, now: float) -> End | None:
        config, since = self._config, self._terminating_since
        if since is not None and now - since > config.drain_timeout_seconds + GRACE_SECONDS:
            return End(1, "watchdog", "the ranks did not end after the drain timeout")
        for number, reader in enumerate(self._readers):
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
            elif now - status["heartbeat"] > config.watchdog_seconds:
                reason = (
                    f"rank {number} made no progress for {now - status['heartbeat']:.1f} s "
                    f"(--watchdog-seconds {config.watchdog_seconds:g}) with {status['live']:.0f} requests"
                )
                return End(1, "watchdog", reason)
        fault = self._watch.look(now) if self._watch else None
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
        return Phase(min(int(reader.read()["phase"]) for reader in self._readers))

    def _state(self) -> str:
        phase = self._phase()
        if self._end and self._end.kind:
            return "failed"
        if phase < Phase.SERVING:
            return "starting"
        return "draining" if self._draining or phase != Phase.SERVING else "serving"

    def _silence(self) -> float:
        """Return the seconds since the last turn of rank 0's loop."""
        return time.monotonic() - self._readers[0].read()["heartbeat"]

    def _healthy(self) -> Health:
        state = self._state()
        if state in ("serving", "draining") and self._silence() > self._config.watchdog_seconds:
            return Health(False, {"state": state, "reason": f"no progress for {self._silence():.1f} s"})
        return Health(state != "failed", {"state": state})

    def _ready(self) -> Health:
        state = self._state()
        body: dict[str, Any] = {"state": state, "phase": self._phase().name.lower()}
        if state == "serving":
            body["wire"] = self._readers[0].read().text
        return Health(state == "serving", body)

    def _drain(self) -> dict[str, Any]:
        if self._phase() >= Phase.SERVING:
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


def check_config(config: EngineConfig) -> None:
    """Check what can be checked before anything is started.

    Raises:
        ValueError: names the option or file and what would be right.
    """
    if not Path(config.model).is_dir():
        raise ModelFolderError(f"--model {config.model} is no folder")
    if config.tensor > 1:
        check_shares(read_config(Path(config.model)), config.tensor)
    keys = load_ring(Path(config.keys), "engine") if config.keys else None
    require_safe(config.wire_bind, keys)


def run(config: EngineConfig, rank_module: str = RANK_MODULE) -> int:
    """Run an engine in the foreground until it ends; return the exit code.

    0 after a drain; 1 after a failure; 2 for a configuration that cannot work; 128 + n when a second signal n
    ended it at once. Except after 0, the reason is in the log and in the termination message.
    """
    set_up_logging(process="supervisor")
    try:
        if config.tensor > 1 and rank_module != RANK_MODULE:
            raise ValueError(f"--tensor must be 1 where nothing is computed, not {config.tensor}")
        check_config(config)
    except ValueError as error:
        log.error("wrong configuration", extra={"fields": {"reason": str(error)}})
        _leave_words(config, f"wrong configuration: {error}")
        return 2
    try:
        return Supervisor(config, rank_module).run()
    except OSError as error:
        log.error("cannot start", extra={"fields": {"reason": str(error), "http_port": config.http_port}})
        _leave_words(config, f"cannot start with --http-port {config.http_port}: {error}")
        return 1
