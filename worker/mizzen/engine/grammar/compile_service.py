# SPDX-License-Identifier: Apache-2.0
"""Compiles grammars in threads, caches compiled grammars, and remembers rejected ones.

A grammar is first compiled on trial in the sandbox. If it stays within the limits there, the same code
compiles it in this process, with the interpreter lock released. (A compiled grammar could be sent by the
sandbox, but reading it takes longer than compiling again.) A grammar that takes long moves to a slow lane,
which compiles one grammar at a time, so it does not delay quick grammars. In each lane, tenants share the
compile time; if the lane is full, the tenant with the most waiting grammars loses its newest one.
`PendingGrammars` uses `GrammarCompiler`.
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
from mizzen.engine.grammar.compile_sandbox import GrammarSandbox
from mizzen.engine.grammar.compiled import CompiledGrammar
from mizzen.engine.grammar.errors import CompilerUnavailable, CompileTimeout, GrammarError
from mizzen.engine.grammar.limits import GrammarLimits
from mizzen.engine.shared_time_queue import SharedTimeQueue

if TYPE_CHECKING:
    from mizzen.engine.grammar.xgrammar_backend import GrammarBuilder

OVERHEAD_BYTES = 4096
"""Assumed size, in bytes, of a cache entry, excluding the compiled grammar and its text."""


@dataclass(frozen=True, slots=True)
class CompileResult:
    """A compiled grammar, or the error that prevented it."""

    grammar: CompiledGrammar | None
    error: str = ""
    temporary: bool = False
    """Whether the error is due to the current load and not to the grammar, so that a retry may succeed."""
    bytes: int = OVERHEAD_BYTES
    """Size of the result in the cache, in bytes."""


@dataclass(slots=True, eq=False)
class CompileTask:
    """A grammar that waits to be compiled or is being compiled."""

    grammar: Grammar
    lane: CompileLane
    tenants: set[int]
    """Tenants that have requested the grammar."""
    future: Future[CompileResult | None] = field(default_factory=Future)
    """Result of the compilation; None if it took longer than the lane allows."""


class CompileLane:
    """Threads that compile grammars with a common time limit, and the queue of waiting grammars."""

    def __init__(self, workers: int, seconds: float, name: str) -> None:
        self.pool = ThreadPoolExecutor(workers, name)
        self.seconds = seconds
        """Time limit of a compilation in seconds."""
        self.lock = Lock()
        """Guards the builder, because only one thread at a time may use it."""
        self.builder: GrammarBuilder | None = None
        self.queue: SharedTimeQueue[CompileTask] = SharedTimeQueue()


class GrammarCompiler:
    """Compiles grammars for one model.

    Its public methods are called from one thread; only `close` blocks.
    """

    def __init__(
        self,
        folder: str,
        vocab_size: int,
        end_token_ids: tuple[int, ...],
        limits: GrammarLimits | None = None,
    ) -> None:
        """Configure the compiler; nothing is loaded before the first grammar or `start_loading`.

        Args:
            folder: Folder of the model.
            vocab_size: Size of the model's vocabulary.
            end_token_ids: Ids of the tokens at which the model ends its output.
            limits: Limits of compilation; the defaults if None.
        """
        self.limits = limits or GrammarLimits()
        self.counts = GrammarCounts()
        self._target = {"folder": folder, "vocab_size": vocab_size, "end_token_ids": end_token_ids}
        self._sandbox = GrammarSandbox(dict(self._target), self.limits)
        quick = min(self.limits.quick_seconds, self.limits.compile_seconds)
        self._quick_lane = CompileLane(self.limits.workers, quick, "mizzen-grammar")
        self._slow_lane = CompileLane(1, self.limits.compile_seconds, "mizzen-grammar-slow")
        self._lock = Lock()
        """Guards the queues of the lanes, the start of tasks, and `counts.compile_seconds`."""
        self._tasks: dict[Grammar, CompileTask] = {}
        self._slow_grammars: set[Grammar] = set()
        """Grammars of `_tasks` that are in the slow lane."""
        self._abandoned: set[Grammar] = set()
        """Grammars of `_tasks` for which no request waits any longer."""
        self._cache: OrderedDict[Grammar, CompileResult] = OrderedDict()
        """Compiled grammars, least recently used first."""
        self._cache_bytes = 0
        self._rejected: OrderedDict[Grammar, str] = OrderedDict()
        """Errors of rejected grammars, least recently used first."""

    def start_loading(self) -> None:
        """Load the vocabulary and start the sandbox in the background."""
        self._quick_lane.pool.submit(self._load_in_background)

    def find_or_compile(self, grammar: Grammar, tenant: int = 0) -> CompileResult | None:
        """Return the result of compiling a grammar, or None while the compilation is queued or running.

        The first call for a grammar queues it. The compile time is charged to one of its waiting tenants.
        """
        if grammar in self._cache:
            self._cache.move_to_end(grammar)
            return self._cache[grammar]
        if grammar in self._rejected:
            self._rejected.move_to_end(grammar)
            return CompileResult(None, self._rejected[grammar])
        task = self._tasks.get(grammar)
        self._abandoned.discard(grammar)
        if task is None:
            return self._start_compiling(grammar, tenant)
        if not task.future.done():
            if tenant not in task.tenants:
                self._add_tenant(task, tenant)
            return None
        outcome = task.future.result()
        del self._tasks[grammar]
        if outcome is None:
            return self._move_to_slow_lane(task, tenant)
        self._slow_grammars.discard(grammar)
        return self._store_result(grammar, outcome)

    def cancel(self, grammar: Grammar) -> None:
        """Record that no request waits for a grammar any longer; a compilation that has started goes on."""
        task = self._tasks.get(grammar)
        if task is None:
            return
        with self._lock:
            cancelled = task.future.cancel()
            if cancelled:
                task.lane.queue.remove(task)
        if cancelled:
            del self._tasks[grammar]
            self._slow_grammars.discard(grammar)
        else:
            self._abandoned.add(grammar)

    def close(self) -> None:
        """Stop the threads and the sandbox, and wait for them."""
        lanes = self._quick_lane, self._slow_lane
        for lane in lanes:
            lane.pool.shutdown(wait=False, cancel_futures=True)
        self._sandbox.close()
        for lane in lanes:
            lane.pool.shutdown(wait=True)

    def _start_compiling(self, grammar: Grammar, tenant: int) -> CompileResult | None:
        if not self._target["end_token_ids"]:
            text = "this model has no end token (eos_token_id), and nothing else ends a complete text"
            return self._store_result(grammar, CompileResult(None, text))
        size, limit = len(grammar.text.encode()), self.limits.text_bytes
        if size > limit:
            return self._store_result(
                grammar, CompileResult(None, f"the text has {size} bytes, more than the maximum of {limit}")
            )
        self._collect_abandoned()
        waiting = len(self._tasks)
        if waiting >= self.limits.max_waiting and not self._evict_from_queue(self._quick_lane, tenant):
            return CompileResult(
                None, f"{waiting} grammars wait to be compiled already: try again later", temporary=True
            )
        self._submit(CompileTask(grammar, self._quick_lane, {tenant}))
        return None

    def _move_to_slow_lane(self, task: CompileTask, tenant: int) -> CompileResult | None:
        """Move a grammar that took too long in the quick lane to the queue of the slow lane.

        Returns an error if the slow lane is full, else None.
        """
        limit = self.limits.max_slow_waiting
        if len(self._slow_grammars) >= limit and not self._evict_from_queue(self._slow_lane, tenant):
            text = f"{limit} slow grammars wait to be compiled already: try again later"
            return CompileResult(None, text, temporary=True)
        self._slow_grammars.add(task.grammar)
        self._submit(CompileTask(task.grammar, self._slow_lane, task.tenants))
        return None

    def _submit(self, task: CompileTask) -> None:
        self._tasks[task.grammar] = task
        with self._lock:
            for tenant in task.tenants:
                task.lane.queue.add_waiter(tenant, task)
        task.lane.pool.submit(self._compile_next, task.lane)

    def _add_tenant(self, task: CompileTask, tenant: int) -> None:
        """Add `tenant` to the tenants of a task.

        A task that has not started also joins this tenant's queue; it starts when any of its tenants is next.
        """
        task.tenants.add(tenant)
        with self._lock:
            if not task.future.running() and not task.future.done():
                task.lane.queue.add_waiter(tenant, task)

    def _evict_from_queue(self, lane: CompileLane, tenant: int) -> bool:
        """Make room for `tenant` in a lane: reject a grammar of the tenant with the most waiting grammars.

        The newest waiting grammar of that tenant is rejected. Returns False, without rejecting a grammar, if
        `tenant`, with one more waiting grammar, would have at least as many as that tenant.
        """
        with self._lock:
            task = lane.queue.newest_of_largest(tenant)
            if task is None:
                return False
            lane.queue.remove(task)
            task.future.set_running_or_notify_cancel()
        text = "too many grammars of one key wait to be compiled: try again later"
        task.future.set_result(CompileResult(None, text, temporary=True))
        self._slow_grammars.discard(task.grammar)
        return True

    def _collect_abandoned(self) -> None:
        """Store results for which no request waits, so that their tasks no longer count as waiting."""
        for grammar in [abandoned for abandoned in self._abandoned if self._tasks[abandoned].future.done()]:
            self._abandoned.remove(grammar)
            self._slow_grammars.discard(grammar)
            outcome = self._tasks.pop(grammar).future.result()
            if outcome is not None:
                self._store_result(grammar, outcome)

    def _store_result(self, grammar: Grammar, outcome: CompileResult) -> CompileResult:
        """Count the result of a grammar, store it in the cache or as rejected, and return the result."""
        if outcome.grammar is None:
            self.counts.refused += 1
            if not outcome.temporary and len(grammar.text) <= self.limits.text_bytes:
                self._rejected[grammar] = outcome.error
            if len(self._rejected) > self.limits.max_rejections:
                self._rejected.popitem(last=False)
            return outcome
        self.counts.compiled += 1
        self._cache[grammar] = outcome
        self._cache_bytes += outcome.bytes
        while self._cache_bytes > self.limits.cache_bytes and len(self._cache) > 1:
            self._cache_bytes -= self._cache.popitem(last=False)[1].bytes
        return outcome

    # ── in the threads ────────────────────────────────────────────────────────────────────────────────────

    def _load_in_background(self) -> None:
        try:
            self._sandbox.start()
            with self._quick_lane.lock:
                self._lane_builder(self._quick_lane)
        except (GrammarError, CompilerUnavailable, ImportError):
            pass  # the first request with a grammar gets the error

    def _compile_next(self, lane: CompileLane) -> None:
        """Compile the next grammar in the queue of a lane; runs in a thread of the lane."""
        with self._lock:
            popped = lane.queue.pop_next()
            if popped is None:
                return  # the grammar was cancelled or evicted
            tenant, task = popped
            task.future.set_running_or_notify_cancel()
        start_time = time.monotonic()
        try:
            task.future.set_result(self._compile(task.grammar, lane))
        except BaseException as error:
            task.future.set_exception(error)
        finally:
            with self._lock:
                lane.queue.charge(tenant, time.monotonic() - start_time)

    def _compile(self, grammar: Grammar, lane: CompileLane) -> CompileResult | None:
        """Compile a grammar; return None if it takes longer than the lane allows."""
        start_time, seconds = time.monotonic(), lane.seconds
        if (
            lane is self._quick_lane
            and len(self._tasks) - len(self._slow_grammars) > self.limits.busy_queue_length
        ):
            seconds = min(seconds, self.limits.busy_quick_seconds)
        try:
            rules = self._sandbox.check(grammar, seconds)
            with lane.lock:
                compiled = self._lane_builder(lane).compile(grammar, checked_rules=rules)
        except CompileTimeout:
            return None
        except GrammarError as error:
            return CompileResult(None, str(error))
        except CompilerUnavailable as error:
            return CompileResult(None, str(error), temporary=True)
        except ImportError as error:
            return CompileResult(None, f"this engine cannot compile grammars: {error}")
        finally:
            with self._lock:
                self.counts.compile_seconds += time.monotonic() - start_time
        size = compiled.memory_size_bytes + len(grammar.text.encode()) + OVERHEAD_BYTES
        return CompileResult(CompiledGrammar(grammar.kind, grammar.text, compiled), bytes=size)

    def _lane_builder(self, lane: CompileLane) -> GrammarBuilder:
        """Return the builder of a lane, and create it at first use. The caller holds the lock of the lane."""
        from mizzen.engine.grammar.compile_sandbox_worker import compile_threads
        from mizzen.engine.grammar.xgrammar_backend import GrammarBuilder, GrammarTarget

        if lane.builder is None:
            target = GrammarTarget(**self._target)  # type: ignore[arg-type]
            lane.builder = GrammarBuilder(target, threads=compile_threads(), nesting=self.limits.nesting)
        return lane.builder
