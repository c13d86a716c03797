# SPDX-License-Identifier: Apache-2.0
"""Run an engine that simulates its device; wire, serving loop, scheduler and supervisor are the real ones.

    python -m mizzen.server.simulate --model FOLDER --wire-bind tcp://127.0.0.1:5557 --step-milliseconds 5

Tests of gateways, operators and clusters use it to choose the speed of an engine and to provoke failures. It
serves the tokenizer of a model folder; the folder need not contain weights. `SimulatedEngine` runs it in a
thread of the test's own process.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import threading
import time
import types
import typing
from types import TracebackType

from mizzen.common.options import flag
from mizzen.server.metric_catalogue import Phase
from mizzen.server.ranks.leader import serve_engine
from mizzen.server.ranks.rank_status import RankStatus
from mizzen.server.serving_loop import ControlCommand
from mizzen.server.simulate_config import SimulateConfig
from mizzen.server.status_block import Snapshot, StatusReader, StatusWriter, create_status_blocks
from mizzen.server.supervisor import run_engine
from mizzen.wire.limits import WireLimits

RANK_MODULE = "mizzen.server.ranks.simulated"


class SimulatedEngine:
    """Simulated engine in a thread of this process, as a context manager.

    Gateways connect to `endpoint`. `drain` and `stop` send the commands that a supervisor would send.
    """

    def __init__(self, config: SimulateConfig, limits: WireLimits | None = None) -> None:
        self._config = config
        self._limits = limits
        self._block = create_status_blocks(1)
        self._reader = StatusReader(self._block, 0)
        self._status = RankStatus(StatusWriter(self._block, 0))
        self._control, self._commands = os.pipe()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="simulated-engine", daemon=True)

    def _run(self) -> None:
        try:
            from mizzen.server.ranks.simulated import load_simulated

            serve_engine(self._config, self._status, self._control, load_simulated, self._limits)
        except BaseException as error:
            self._error = error

    def __enter__(self) -> SimulatedEngine:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        os.close(self._control)
        os.close(self._commands)
        os.close(self._block)

    @property
    def status(self) -> Snapshot:
        """Rank 0's current status snapshot, as a supervisor would read it."""
        return self._reader.read()

    @property
    def endpoint(self) -> str:
        """Endpoint that gateways connect to; reading it waits until the engine has started.

        Raises:
            RuntimeError: the startup failed.
            TimeoutError: the startup took longer than `startup_timeout_seconds`.
        """
        deadline = time.monotonic() + self._config.startup_timeout_seconds
        while time.monotonic() < deadline:
            if self._error:
                raise RuntimeError("the simulated engine failed") from self._error
            status = self.status
            if status["phase"] in (Phase.SERVING, Phase.DRAINING):
                return status.text
            time.sleep(0.005)
        raise TimeoutError("the simulated engine did not start in time")

    def drain(self) -> None:
        """Make the engine reject new requests; live requests continue."""
        os.write(self._commands, ControlCommand.DRAIN.value)

    def stop(self) -> None:
        """Make the engine drain and exit, and wait until it has exited."""
        if self._thread.is_alive():
            os.write(self._commands, ControlCommand.END.value)
            self._thread.join(self._config.drain_timeout_seconds + self._config.start_seconds + 10)


def parse_config(arguments: list[str]) -> SimulateConfig:
    """Return the configuration that a command line describes; each field is an option."""
    parser = argparse.ArgumentParser(prog="python -m mizzen.server.simulate", description=__doc__)
    parser.add_argument(
        "program", nargs="?", choices=["engine"], help="accepted as the first argument, as in an engine's pod"
    )
    types_of = typing.get_type_hints(SimulateConfig)
    for field in dataclasses.fields(SimulateConfig):
        required = field.default is dataclasses.MISSING
        parser.add_argument(
            flag(field.name),
            type=_converter(types_of[field.name]),
            required=required,
            default=argparse.SUPPRESS,
            help=str(field.metadata["help"]).replace("%", "%%"),
        )
    try:
        values = vars(parser.parse_args(arguments))
        del values["program"]
        return SimulateConfig(**values)
    except ValueError as error:
        parser.error(str(error))


def _converter(kind: object) -> type:
    if isinstance(kind, types.UnionType):
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    if kind is bool:
        return _BooleanOption
    assert isinstance(kind, type)
    return kind


class _BooleanOption:
    """Converts the value of a boolean option such as `--check-integrity true`."""

    def __new__(cls, text: str) -> bool:  # type: ignore[misc]
        if text not in ("true", "false"):
            raise ValueError(text)
        return text == "true"


if __name__ == "__main__":
    sys.exit(run_engine(parse_config(sys.argv[1:]), RANK_MODULE))
