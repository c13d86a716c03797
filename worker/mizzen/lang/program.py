# SPDX-License-Identifier: Apache-2.0
"""States of programs, and the runtime whose background thread does their work."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Coroutine, Generator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from mizzen.lang.backends import Backend, HttpBackend, LlmBackend, RoleText
from mizzen.lang.expressions import Content, Expression, Generation, RoleMessage, Selection, to_expression
from mizzen.lang.selection import choose

if TYPE_CHECKING:
    from mizzen.offline import LLM


class Runtime:
    """Runs programs on a model: on an `LLM` of this process, or on a service with Mizzen's HTTP API."""

    def __init__(self, target: LLM | str, *, model: str | None = None, api_key: str | None = None) -> None:
        """Start the background thread.

        Args:
            target: An `LLM`, which only the runtime may use until it is closed; or the URL of a service.
            model: Name of the service's model; by default the first one that it lists.
            api_key: API key of the service.
        """
        self.backend: Backend = (
            HttpBackend(target, model, api_key) if isinstance(target, str) else LlmBackend(target)
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mizzen-lang", daemon=True)
        self._thread.start()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the work of all states, and end the thread; an `LLM` stays open."""
        self.submit(self._close_backend()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close_backend(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.backend.close()

    def state(self) -> State:
        """Return an empty state."""
        return State(self, uuid.uuid4().hex, None)

    def submit(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        """Start a coroutine in the background, and return its future."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)


class State:
    """Text or conversation that grows by `+=`; the model's work is done in the background, in order.

    Reading waits for all that was added before, and raises the error with which it failed. A coroutine waits
    with `await state` before it reads.
    """

    def __init__(self, runtime: Runtime, session: str, parent: State | None) -> None:
        """Create an empty state or a fork of `parent`; requests of one `session` prefer the same engine."""
        self._runtime, self._session, self._parent = runtime, session, parent
        self._turns: tuple[RoleText, ...] = ()
        self._values: dict[str, Any] = {}
        self._own_names: dict[str, None] = {}
        self._work = runtime.submit(self._copy(parent, parent and parent._work))

    def __iadd__(self, expression: str | Expression) -> State:
        self._work = self._runtime.submit(self._extend(self._work, to_expression(expression)))
        return self

    def __await__(self) -> Generator[Any, None, State]:
        yield from asyncio.wrap_future(self._work).__await__()
        return self

    def __getitem__(self, name: str) -> Any:
        """Return the value with a name: a text or, after `join`, a list with a value of each fork."""
        self._work.result()
        if name not in self._values:
            raise KeyError(f"{name!r}; the state holds {', '.join(self._values) or 'no values'}")
        return self._values[name]

    def text(self) -> str:
        """Return the text, or the text of the last message."""
        self._work.result()
        return self._turns[-1].text if self._turns else ""

    def messages(self) -> list[dict[str, str]]:
        """Return the conversation as messages of the chat API."""
        self._work.result()
        return [{"role": turn.role, "content": turn.text} for turn in self._turns if turn.role]

    def fork(self, count: int) -> list[State]:
        """Return copies of the state that grow independently; the model computes their prefix once."""
        return [State(self._runtime, self._session, self) for _ in range(count)]

    def join(self, forks: Sequence[State]) -> None:
        """Wait for forks in the background; each name's value becomes the list of the forks' values."""
        if any(fork._parent is not self for fork in forks):
            raise ValueError("join needs forks of this state")
        self._work = self._runtime.submit(self._merge(self._work, forks, [fork._work for fork in forks]))

    async def _copy(self, parent: State | None, before: Future[None] | None) -> None:
        if parent is not None and before is not None:
            await asyncio.wrap_future(before)
            self._turns, self._values = parent._turns, dict(parent._values)

    async def _merge(
        self, before: Future[None], forks: Sequence[State], works: Sequence[Future[None]]
    ) -> None:
        await asyncio.gather(*map(asyncio.wrap_future, (before, *works)))
        for name in dict.fromkeys(name for fork in forks for name in fork._own_names):
            self._keep(name, [fork._values[name] for fork in forks if name in fork._own_names])

    async def _extend(self, before: Future[None], expression: Expression) -> None:
        await asyncio.wrap_future(before)
        for part in expression.parts:
            if not isinstance(part, RoleMessage):
                await self._add("", part)
                continue
            self._turns += (RoleText(part.role, ""),)
            for content in part.content:
                await self._add(part.role, content)

    async def _add(self, role: str, part: Content) -> None:
        """Add text, given or produced by the model, to the last turn."""
        if not self._turns:
            self._turns = (RoleText("", ""),)
        if (self._turns[0].role == "") != (role == ""):
            raise ValueError("a state holds either text or messages: put text and gen into user or assistant")
        if isinstance(part, str):
            text = part
        else:
            text = await self._produce(part)
            self._keep(part.name, text)
        self._turns = (*self._turns[:-1], RoleText(role, self._turns[-1].text + text))

    async def _produce(self, part: Generation | Selection) -> str:
        backend = self._runtime.backend
        if isinstance(part, Generation):
            return await backend.generate(await backend.encode(self._turns), part.params, self._session)
        return await choose(backend, self._turns, part, self._session)

    def _keep(self, name: str, value: Any) -> None:
        self._values[name] = value
        self._own_names[name] = None
