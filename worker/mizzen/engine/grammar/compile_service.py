"""Compiles grammars in threads of its own, keeps what it compiled, and remembers what it refused.

A grammar is tried in the sandbox first; what came through within its bounds is then compiled here, by the
same code, with the interpreter's lock released. What is not done soon goes on in a lane of its own, one at a
time: nobody's slow grammars hold up the quick ones of others. In each lane tenants share the time, and when
there is no room, whoever has most there gives some up. (Compiled grammars can be sent between processes, but
reading one takes longer than compiling it again.)
"""

from __future__ import annotations

import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING

from mizzen.core.outputs import GrammarCounts
from mizzen.core.sampling_params import Grammar
from mizzen.engine.grammar.compile_queue import Turns
from mizzen.engine.grammar.compiled import CompiledGrammar
from mizzen.engine.grammar.errors import CompilerDown, GrammarError, TooSlow
from mizzen.engine.grammar.limits import GrammarLimits
from mizzen.engine.grammar.sandbox import Sandbox

if TYPE_CHECKING:
    from mizzen.engine.grammar.xgrammar_backend import Builder

OVERHEAD_BYTES = 4096
"""Of a cached grammar beside what it holds."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A compiled grammar, or why there is none."""

    grammar: CompiledGrammar | None
    fault: str = ""
    passing: bool = False
    """The fault is of this moment, not of the grammar."""
    bytes: int = OVERHEAD_BYTES


@dataclass(slots=True, eq=False)
class Task:
    """A grammar that waits to be compiled, or is."""

    grammar: Grammar
    lane: Lane
    tenants: set[int]
    """Who has asked for it."""
    future: Future[Outcome | None] = field(default_factory=Future)
    """None: it takes longer than the lane gives it."""


class Lane:
    """Threads that compile, with a builder of their own once there is something to build."""

    def __init__(self, workers: int, seconds: float, name: str) -> None:
        self.pool = ThreadPoolExecutor(workers, name)
        self.seconds = seconds
        """What a compilation is given."""
        self.lock = Lock()
        """Of the builder."""
        self.builder: Builder | None = None
        self.turns: Turns[Task] = Turns()


class GrammarCompiler:
    """Grammars of one model. Its methods are used from one thread and never wait."""

    def __init__(
        self,
        folder: str,
        vocab_size: int,
        end_token_ids: tuple[int, ...],
        limits: GrammarLimits | None = None,
    ) -> None:
        """Take the model; nothing is loaded before the first grammar comes, or `warm` is called."""
        self.limits = limits or GrammarLimits()
        self.counts = GrammarCounts()
        self._target = {"folder": folder, "vocab_size": vocab_size, "end_token_ids": end_token_ids}
        self._sandbox = Sandbox(dict(self._target), self.limits)
        quick = min(self.limits.quick_seconds, self.limits.compile_seconds)
        self._quick = Lane(self.limits.workers, quick, "mizzen-grammar")
        self._slow = Lane(1, self.limits.compile_seconds, "mizzen-grammar-slow")
        self._lock = Lock()
        """Of the lanes' turns, the starts of tasks, and the counted time."""
        self._running: dict[Grammar, Task] = {}
        self._slowly: set[Grammar] = set()
        """Of those that run, the ones in the slow lane."""
        self._forgotten: set[Grammar] = set()
        """Of those that run, the ones that nobody waits for."""
        self._kept: OrderedDict[Grammar, Outcome] = OrderedDict()
        """The least recently used first."""
        self._kept_bytes = 0
        self._refused: OrderedDict[Grammar, str] = OrderedDict()

    def warm(self) -> None:
        """Load what grammars need, in the background."""
        self._quick.pool.submit(self._warm)

    def find(self, grammar: Grammar, tenant: int = 0) -> Outcome | None:
        """Return what became of a grammar; None while it is compiled, which begins with the first call."""
        if grammar in self._kept:
            self._kept.move_to_end(grammar)
            return self._kept[grammar]
        if grammar in self._refused:
            self._refused.move_to_end(grammar)
            return Outcome(None, self._refused[grammar])
        task = self._running.get(grammar)
        self._forgotten.discard(grammar)
        if task is None:
            return self._begin(grammar, tenant)
        if not task.future.done():
            if tenant not in task.tenants:
                self._join(task, tenant)
            return None
        outcome = task.future.result()
        del self._running[grammar]
        if outcome is None:
            return self._go_on_slowly(task, tenant)
        self._slowly.discard(grammar)
        return self._settle(grammar, outcome)

    def forget(self, grammar: Grammar) -> None:
        """Note that nobody waits for a grammar any more; it is not compiled unless that has begun."""
        task = self._running.get(grammar)
        if task is None:
            return
        with self._lock:
            waited = task.future.cancel()
            if waited:
                task.lane.turns.remove(task)
        if waited:
            del self._running[grammar]
            self._slowly.discard(grammar)
        else:
            self._forgotten.add(grammar)

    def close(self) -> None:
        """End the threads and the sandbox."""
        lanes = self._quick, self._slow
        for lane in lanes:
            lane.pool.shutdown(wait=False, cancel_futures=True)
        self._sandbox.close()
        for lane in lanes:
            lane.pool.shutdown(wait=True)

    def _begin(self, grammar: Grammar, tenant: int) -> Outcome | None:
        if not self._target["end_token_ids"]:
            text = "this model has no end token (eos_token_id), and nothing else ends a complete text"
            return self._settle(grammar, Outcome(None, text))
        size, most = len(grammar.text.encode()), self.limits.text_bytes
        if size > most:
            return self._settle(grammar, Outcome(None, f"the text has {size} bytes; at most {most} may be"))
        self._take_forgotten()
        waiting = len(self._running)
        if waiting >= self.limits.waiting and not self._make_room(self._quick, tenant):
            return Outcome(
                None, f"{waiting} grammars wait to be compiled already: try again later", passing=True
            )
        self._submit(Task(grammar, self._quick, {tenant}))
        return None

    def _go_on_slowly(self, task: Task, tenant: int) -> Outcome | None:
        """Put a grammar that takes long into the slow lane."""
        most = self.limits.slow_waiting
        if len(self._slowly) >= most and not self._make_room(self._slow, tenant):
            text = f"{most} slow grammars wait to be compiled already: try again later"
            return Outcome(None, text, passing=True)
        self._slowly.add(task.grammar)
        self._submit(Task(task.grammar, self._slow, task.tenants))
        return None

    def _submit(self, task: Task) -> None:
        self._running[task.grammar] = task
        with self._lock:
            for tenant in task.tenants:
                task.lane.turns.add(tenant, task)
        task.lane.pool.submit(self._next, task.lane)

    def _join(self, task: Task, tenant: int) -> None:
        """Let a grammar that waits for others wait for a tenant too: whose turn is first has it compiled."""
        task.tenants.add(tenant)
        with self._lock:
            if not task.future.running() and not task.future.done():
                task.lane.turns.add(tenant, task)

    def _make_room(self, lane: Lane, tenant: int) -> bool:
        """Turn away the newest grammar of the tenant that has most in a lane; False when that is this one."""
        with self._lock:
            task = lane.turns.surplus(tenant)
            if task is None:
                return False
            lane.turns.remove(task)
            task.future.set_running_or_notify_cancel()
        text = "too many grammars of one key wait to be compiled: try again later"
        task.future.set_result(Outcome(None, text, passing=True))
        self._slowly.discard(task.grammar)
        return True

    def _take_forgotten(self) -> None:
        """Keep what became of grammars that nobody asks for any more, so that they hold no place."""
        for grammar in [one for one in self._forgotten if self._running[one].future.done()]:
            self._forgotten.remove(grammar)
            self._slowly.discard(grammar)
            outcome = self._running.pop(grammar).future.result()
            if outcome is not None:
                self._settle(grammar, outcome)

    def _settle(self, grammar: Grammar, outcome: Outcome) -> Outcome:
        """Count and keep what became of a grammar."""
        if outcome.grammar is None:
            self.counts.refused += 1
            if not outcome.passing and len(grammar.text) <= self.limits.text_bytes:
                self._refused[grammar] = outcome.fault
            if len(self._refused) > self.limits.refusals:
                self._refused.popitem(last=False)
            return outcome
        self.counts.compiled += 1
        self._kept[grammar] = outcome
        self._kept_bytes += outcome.bytes
        while self._kept_bytes > self.limits.cache_bytes and len(self._kept) > 1:
            self._kept_bytes -= self._kept.popitem(last=False)[1].bytes
        return outcome

    # ── in the threads ────────────────────────────────────────────────────────────────────────────────────

    def _warm(self) -> None:
        try:
            self._sandbox.start()
            with self._quick.lock:
                self._made(self._quick)
        except (GrammarError, CompilerDown, ImportError):
            pass  # the first grammar is told

    def _next(self, lane: Lane) -> None:
        """Compile what is next in a lane."""
        with self._lock:
            turn = lane.turns.take()
            if turn is None:
                return  # it was forgotten, or turned away
            tenant, task = turn
            task.future.set_running_or_notify_cancel()
        began = time.monotonic()
        try:
            task.future.set_result(self._compile(task.grammar, lane))
        except BaseException as error:
            task.future.set_exception(error)
        finally:
            with self._lock:
                lane.turns.charge(tenant, time.monotonic() - began)

    def _compile(self, grammar: Grammar, lane: Lane) -> Outcome | None:
        """Return what becomes of a grammar; None when it takes longer than this lane gives it."""
        began, seconds = time.monotonic(), lane.seconds
        if lane is self._quick and len(self._running) - len(self._slowly) > self.limits.patience:
            seconds = min(seconds, self.limits.hurried_seconds)
        try:
            tried = self._sandbox.check(grammar, seconds)
            with lane.lock:
                compiled = self._made(lane).compile(grammar, tried=tried)
        except TooSlow:
            return None
        except GrammarError as error:
            return Outcome(None, str(error))
        except CompilerDown as error:
            return Outcome(None, str(error), passing=True)
        except ImportError as error:
            return Outcome(None, f"this engine cannot compile grammars: {error}")
        finally:
            with self._lock:
                self.counts.compile_seconds += time.monotonic() - began
        held = compiled.memory_size_bytes + len(grammar.text.encode()) + OVERHEAD_BYTES
        return Outcome(CompiledGrammar(grammar.kind, grammar.text, compiled), bytes=held)

    def _made(self, lane: Lane) -> Builder:
        """Return a lane's builder, whose lock is held; the first caller makes it."""
        from mizzen.engine.grammar.sandbox_worker import threads
        from mizzen.engine.grammar.xgrammar_backend import Builder, Target

        if lane.builder is None:
            target = Target(**self._target)  # type: ignore[arg-type]
            lane.builder = Builder(target, threads=threads(), nesting=self.limits.nesting)
        return lane.builder
