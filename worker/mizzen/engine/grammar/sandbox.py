"""The engine's side of the process that tries grammars: starts it, asks it, and outlives its death."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
from dataclasses import asdict

from mizzen.core.sampling_params import Grammar
from mizzen.engine.grammar.errors import CompilerDown, GrammarError, TooSlow
from mizzen.engine.grammar.limits import GrammarLimits

log = logging.getLogger(__name__)

SPARE_SECONDS = 5.0
"""Beyond a child's own deadline, for forks and answers."""
ENDING_SECONDS = 0.2
"""After the end of a child, for that of its parent to show."""
SINGLE_RANK = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""A process that forks should have no threads."""


class Sandbox:
    """Tries grammars elsewhere. Safe to use from several threads."""

    def __init__(self, target: dict[str, object], limits: GrammarLimits) -> None:
        """Take the fields of `mizzen.engine.grammar.xgrammar_backend.Target`; nothing is started yet."""
        self._target = target
        self._limits = limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._closed = False

    def start(self) -> None:
        """Start the process, unless it runs, and wait until it is ready.

        Raises:
            CompilerDown: it does not come up.
            GrammarError: the model has no tokenizer that can be used.
        """
        with self._lock:
            self._ready()

    def check(self, grammar: Grammar, seconds: float) -> str:
        """Try a grammar, for so many seconds; return what `Builder.compile` takes as `tried`.

        Raises:
            GrammarError: it cannot be used; says why.
            TooSlow: it takes longer, and may be given more time.
            CompilerDown: there is no process to try it in.
        """
        try:
            reply = self._ask(grammar, seconds)
        except ConnectionError:  # the process was killed; the next one is fresh
            try:
                reply = self._ask(grammar, seconds)
            except ConnectionError:
                raise CompilerDown("the process that tries grammars is gone: try again") from None
        if not reply:
            if seconds < self._limits.compile_seconds:
                raise TooSlow
            raise GrammarError(
                f"to compile it takes more than {self._limits.compile_seconds:g} s or "
                f"{self._limits.compile_bytes >> 20} MiB: make it smaller"
            )
        verdict = json.loads(reply)
        if verdict["fault"]:
            raise GrammarError(verdict["fault"])
        return verdict["tried"]

    def close(self) -> None:
        """End the process, also one that is still starting."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()  # whoever waits for it holds the lock
        with self._lock:
            self._drop()

    def _ask(self, grammar: Grammar, seconds: float) -> bytes:
        ours, theirs = socket.socketpair()
        with ours:
            with theirs, self._lock:
                socket.send_fds(self._ready(), [b"j"], [theirs.fileno()])
                process = self._process
            ours.settimeout(seconds + SPARE_SECONDS)
            try:
                ours.sendall(json.dumps([grammar.kind, grammar.text, seconds]).encode())
                ours.shutdown(socket.SHUT_WR)
                with ours.makefile("rb") as file:
                    reply = file.read()
            except TimeoutError:
                return b""
            except (BrokenPipeError, ConnectionResetError):  # it was ended before it had read all
                reply = b""
        if not reply and process is not None and has_ended(process):
            raise ConnectionError  # it took along whoever tried the grammar
        return reply

    def _ready(self) -> socket.socket:
        """Return the control socket of a process that runs."""
        if self._closed:
            raise CompilerDown("the engine is shutting down")
        if self._process is not None and self._process.poll() is not None:
            log.warning("the process that tries grammars ended with %d", self._process.returncode)
            self._drop()
        if self._control is None:
            self._control = self._spawn()
        return self._control

    def _spawn(self) -> socket.socket:
        control, theirs = socket.socketpair()
        control.set_inheritable(False)
        words = ["--fd", str(theirs.fileno()), "--target", json.dumps(self._target)]
        words += ["--limits", json.dumps(asdict(self._limits))]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mizzen.engine.grammar.sandbox_worker", *words],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**os.environ, **SINGLE_RANK, "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"},
            )
        control.settimeout(self._limits.start_seconds)
        try:
            answer = control.recv(4096)
        except TimeoutError:
            answer = b""
        if answer[:1] != b"r":
            control.close()
            self._drop()
            if not answer:  # killed, or late on a busy machine: that says nothing of the grammar
                raise CompilerDown("the process that tries grammars does not start: try again")
            raise GrammarError(json.loads(answer)["fault"])
        control.settimeout(SPARE_SECONDS)
        return control

    def _drop(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Tell whether a process has ended, or does at this moment."""
    try:
        process.wait(ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True
