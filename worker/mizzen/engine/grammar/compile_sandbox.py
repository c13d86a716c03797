# SPDX-License-Identifier: Apache-2.0
"""The engine's side of the sandbox process: starts it, sends grammars to it, and restarts it if it dies.

`GrammarCompiler` calls it from its threads. `mizzen.engine.grammar.compile_sandbox_worker` is the process.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
from dataclasses import asdict

from mizzen.common.child_process import SINGLE_THREADED
from mizzen.core.sampling_params import Grammar
from mizzen.engine.grammar.errors import CompilerUnavailable, CompileTimeout, GrammarError
from mizzen.engine.grammar.limits import SPARE_SECONDS, GrammarLimits

log = logging.getLogger(__name__)

EXIT_NOTICE_SECONDS = 0.2
"""Time to wait, after a child has ended without a reply, to see whether the sandbox process exits too."""


class GrammarSandbox:
    """Compiles grammars on trial in another process, with limits on time and memory; thread-safe."""

    def __init__(self, target: dict[str, object], limits: GrammarLimits) -> None:
        """Configure the sandbox; the process starts later.

        Args:
            target: Fields of `xgrammar_backend.GrammarTarget`.
            limits: Limits of compilation.
        """
        self._target = target
        self._limits = limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._closed = False

    def start(self) -> None:
        """Start the process if it is not running, and wait until it is ready.

        Raises:
            CompilerUnavailable: The process does not start.
            GrammarError: The model has no usable tokenizer.
        """
        with self._lock:
            self._running_control()

    def check(self, grammar: Grammar, seconds: float) -> str:
        """Compile a grammar on trial, with at most `seconds` of CPU time.

        Returns:
            Rules of the grammar in xgrammar's JSON form, for the `checked_rules` argument of
            `GrammarBuilder.compile`.

        Raises:
            GrammarError: The grammar cannot be used; the message gives the reason.
            CompileTimeout: The grammar takes longer than `seconds`, but may be tried again with more time.
            CompilerUnavailable: The machine is too busy to compile the grammar now, or the sandbox process
                does not start, or died twice.
        """
        try:
            reply = self._run_job(grammar, seconds)
        except ConnectionError:  # the process died; try once more in a new one
            try:
                reply = self._run_job(grammar, seconds)
            except ConnectionError:
                raise CompilerUnavailable("the grammar sandbox process died: try again") from None
        if reply is None and seconds >= self._limits.compile_seconds:
            raise CompilerUnavailable("the machine is too busy to compile the grammar: try again later")
        if not reply:
            if seconds < self._limits.compile_seconds:
                raise CompileTimeout
            raise GrammarError(
                f"compiling it takes more than {self._limits.compile_seconds:g} s of CPU time or "
                f"{self._limits.compile_bytes >> 20} MiB: make it smaller"
            )
        verdict = json.loads(reply)
        if verdict["fault"]:
            raise GrammarError(verdict["fault"])
        return verdict["rules"]

    def close(self) -> None:
        """Kill the process, even while it is starting."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()  # without the lock, which the thread that waits for the process holds
        with self._lock:
            self._kill()

    def _run_job(self, grammar: Grammar, seconds: float) -> bytes | None:
        """Return the reply of a child process.

        The reply is empty if the child exceeded its limits, and None if it did not end in time.
        """
        engine_end, sandbox_end = socket.socketpair()
        with engine_end:
            with sandbox_end, self._lock:
                socket.send_fds(self._running_control(), [b"j"], [sandbox_end.fileno()])
                process = self._process
            engine_end.settimeout(seconds * self._limits.wall_factor + SPARE_SECONDS)
            try:
                engine_end.sendall(json.dumps([grammar.kind, grammar.text, seconds]).encode())
                engine_end.shutdown(socket.SHUT_WR)
                with engine_end.makefile("rb") as file:
                    reply = file.read()
            except TimeoutError:
                return None
            except (BrokenPipeError, ConnectionResetError):  # the child ended before it had read everything
                reply = b""
        if not reply and process is not None and has_exited(process):
            raise ConnectionError  # the sandbox process died, not only the child
        return reply

    def _running_control(self) -> socket.socket:
        """Return the control socket of the process; start the process if it is not running."""
        if self._closed:
            raise CompilerUnavailable("the engine is shutting down")
        if self._process is not None and self._process.poll() is not None:
            log.warning("the grammar sandbox process exited with code %d", self._process.returncode)
            self._kill()
        if self._control is None:
            self._control = self._spawn()
        return self._control

    def _spawn(self) -> socket.socket:
        control, sandbox_end = socket.socketpair()
        control.set_inheritable(False)
        words = ["--fd", str(sandbox_end.fileno()), "--target", json.dumps(self._target)]
        words += ["--limits", json.dumps(asdict(self._limits))]
        with sandbox_end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "mizzen.engine.grammar.compile_sandbox_worker", *words],
                pass_fds=(sandbox_end.fileno(),),
                stdin=subprocess.DEVNULL,
                env={
                    **os.environ,
                    **SINGLE_THREADED,  # the sandbox process forks
                    "CUDA_VISIBLE_DEVICES": "",
                    "TOKENIZERS_PARALLELISM": "false",
                },
            )
        control.settimeout(self._limits.start_seconds)
        try:
            answer = control.recv(4096)
        except TimeoutError:
            answer = b""
        if answer[:1] != b"r":
            control.close()
            self._kill()
            if not answer:  # the process was killed, or the machine is busy: not the grammar's fault
                raise CompilerUnavailable("the grammar sandbox process does not start: try again")
            raise GrammarError(json.loads(answer)["fault"])
        control.settimeout(SPARE_SECONDS)
        return control

    def _kill(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def has_exited(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a process has exited or exits within EXIT_NOTICE_SECONDS."""
    try:
        process.wait(EXIT_NOTICE_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True
