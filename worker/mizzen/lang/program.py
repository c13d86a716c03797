# SPDX-License-Identifier: Apache-2.0
"""Programs: expressions, states that grow by them, and the runtime whose background thread does the work."""

from __future__ import annotations

import asyncio
import enum
import json
import threading
import uuid
from collections import ChainMap
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from mizzen.core.sampling_params import Grammar, GrammarKind, SamplingParams, choice_grammar
from mizzen.gateway.text.common_beginning import count_common_tokens
from mizzen.lang.backends import HttpBackend, LlmBackend, Prompt

if TYPE_CHECKING:
    from mizzen.offline import LLM

Backend = LlmBackend | HttpBackend


class SelectMethod(enum.StrEnum):
    """Rule by which `select` chooses."""

    TOKEN_NORMALIZED = "token-normalized"
    """The highest mean log probability of a choice's tokens."""
    UNCONDITIONAL = "unconditional"
    """The highest mean gain in log probability over the choice's tokens without the text before them."""
    GRAMMAR = "grammar"
    """Greedy decoding that allows only the choices. It is the fastest, but the first tokens decide."""


class Output(NamedTuple):
    """Text that a model produces after the turns of a session, and its name in the state."""

    name: str
    produce: Callable[[Backend, Prompt, str], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Expression:
    """A sequence of parts; `+` joins expressions and texts."""

    parts: tuple[tuple[str, tuple[str | Output, ...]], ...]
    """Roles and contents of messages; contents outside of messages have an empty role."""

    def __add__(self, other: str | Expression) -> Expression:
        return Expression(self.parts + to_expression(other).parts)

    def __radd__(self, other: str) -> Expression:
        return to_expression(other) + self


def to_expression(value: str | Output | Expression) -> Expression:
    """Return text as an expression, and an expression unchanged."""
    if not isinstance(value, str | Output | Expression):
        raise TypeError(f"a state is extended by text, gen, select or messages, not {type(value).__name__}")
    return value if isinstance(value, Expression) else Expression((("", (value,)),))


def gen(
    name: str,
    *,
    max_tokens: int | None = 256,
    stop: str | Sequence[str] = (),
    regex: str | None = None,
    json_schema: Mapping[str, Any] | None = None,
    **sampling_params: Any,
) -> Expression:
    """Generate text that ends before `stop` and matches `regex` or `json_schema`; keep it under a name."""
    if regex is not None:
        sampling_params["grammar"] = Grammar(GrammarKind.REGEX, regex)
    if json_schema is not None:
        sampling_params["grammar"] = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(json_schema))
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    params = SamplingParams(max_tokens=max_tokens, stop=stops, **sampling_params)
    return to_expression(Output(name, partial(generate, params=params)))


def select(
    name: str, choices: Sequence[str], method: SelectMethod | str = SelectMethod.TOKEN_NORMALIZED
) -> Expression:
    """Let the model choose one of several texts, and keep the text under a name.

    Raises:
        ValueError: there are no choices, one of them is empty, or the method is unknown.
    """
    if not choices or not all(choices):
        raise ValueError("choices must hold at least one text, and no empty one")
    if SelectMethod(method) is SelectMethod.GRAMMAR:
        return gen(name, max_tokens=None, temperature=0.0, grammar=choice_grammar(choices))
    by_gain, texts = method == SelectMethod.UNCONDITIONAL, tuple(dict.fromkeys(choices))
    return to_expression(Output(name, partial(choose, choices=texts, by_gain=by_gain)))


def system(content: str) -> Expression:
    """Return a message of the system."""
    return Expression((("system", (content,)),))


def user(content: str) -> Expression:
    """Return a message of the user."""
    return Expression((("user", (content,)),))


def assistant(content: str | Expression) -> Expression:
    """Return a message of the assistant, which may contain generated and selected text, but no message."""
    parts = to_expression(content).parts
    if any(role for role, _ in parts):
        raise ValueError("a message cannot contain a message: join them with +")
    return Expression((("assistant", tuple(content for _, contents in parts for content in contents)),))


class Runtime(AbstractContextManager["Runtime"]):
    """Runs programs in a background thread on a `target`: an `LLM`, or the URL of a service.

    Only the runtime may use the `LLM` until it is closed; `model` is by default the first one of the service.
    """

    def __init__(self, target: LLM | str, *, model: str | None = None, api_key: str | None = None) -> None:
        self.backend = HttpBackend(target, model, api_key) if isinstance(target, str) else LlmBackend(target)
        self._loop = asyncio.new_event_loop()
        self.submit: Callable[..., Future[Any]] = partial(asyncio.run_coroutine_threadsafe, loop=self._loop)
        self._thread = threading.Thread(target=self._loop.run_forever, name="mizzen-lang", daemon=True)
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the work of all states, and end the thread; an `LLM` stays open."""
        self.submit(self._cancel_work()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _cancel_work(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.backend.close()

    def state(self) -> State:
        """Return an empty state."""
        return State(self)


class State:
    """Text or conversation that grows by `+=`; the model's work is done in the background, in order.

    Reading waits for all that was added before, and raises the error with which it failed. A coroutine waits
    with `await state` before it reads.
    """

    def __init__(self, runtime: Runtime, parent: State | None = None) -> None:
        self._runtime, self._parent = runtime, parent
        self._session: str = parent._session if parent else uuid.uuid4().hex
        self._turns: Prompt = []
        self._values: ChainMap[str, Any] = ChainMap()  # its first map: values of this state only
        self._work = runtime.submit(self._copy(parent, parent._work) if parent else asyncio.sleep(0))

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
        return self._turns[-1]["content"] if self._turns else ""

    def messages(self) -> list[dict[str, str]]:
        """Return the conversation as messages of the chat API."""
        self._work.result()
        return [dict(turn) for turn in self._turns if turn["role"]]

    def fork(self, count: int) -> list[State]:
        """Return copies of the state that grow independently; the model computes their prefix once."""
        return [State(self._runtime, self) for _ in range(count)]

    def join(self, forks: Sequence[State]) -> None:
        """Wait for forks in the background; each name's value becomes the list of the forks' values."""
        if any(fork._parent is not self for fork in forks):
            raise ValueError("join needs forks of this state")
        self._work = self._runtime.submit(self._merge(forks, [self._work, *(fork._work for fork in forks)]))

    async def _copy(self, parent: State, before: Future[None]) -> None:
        await asyncio.wrap_future(before)
        self._turns, self._values = [dict(turn) for turn in parent._turns], ChainMap({}, dict(parent._values))

    async def _merge(self, forks: Sequence[State], before: Sequence[Future[None]]) -> None:
        await asyncio.gather(*map(asyncio.wrap_future, before))
        added = [fork._values.maps[0] for fork in forks]
        for name in ChainMap(*added):
            self._values[name] = [values[name] for values in added if name in values]

    async def _extend(self, before: Future[None], expression: Expression) -> None:
        await asyncio.wrap_future(before)
        for role, contents in expression.parts:
            if self._turns and (self._turns[0]["role"] == "") != (role == ""):
                raise ValueError("a state holds either text or messages: put all into user or assistant")
            if role or not self._turns:
                self._turns.append({"role": role, "content": ""})
            for content in contents:
                if isinstance(content, str):
                    text = content
                else:
                    text = await content.produce(self._runtime.backend, self._turns, self._session)
                    self._values[content.name] = text
                self._turns[-1]["content"] += text


async def generate(backend: Backend, turns: Prompt, session: str, params: SamplingParams) -> str:
    """Return text that the model generates after the turns."""
    [prompt] = await backend.encode([turns])
    return await backend.generate(prompt, params, session)


async def choose(backend: Backend, turns: Prompt, session: str, choices: Sequence[str], by_gain: bool) -> str:
    """Return the most probable choice after the turns, with which each choice is tokenized.

    All are compared from the first token on at which one differs from the turns alone, so that a token across
    the boundary counts for all.
    """
    *before, last = turns
    endings = [{**last, "content": last["content"] + text} for text in ("", *choices)]
    base, *prompts = await backend.encode([[*before, ending] for ending in endings])
    start = max(1, count_common_tokens([base, *prompts]))
    scores = await asyncio.gather(*(backend.score(prompt, start, session) for prompt in prompts))
    if by_gain:
        alone = [[prompt[0], *prompt[start:]] for prompt in prompts]
        priors = await asyncio.gather(*(backend.score(prompt, 1, session) for prompt in alone))
        scores = [score - prior for score, prior in zip(scores, priors, strict=True)]
    means = [score / max(1, len(prompt) - start) for score, prompt in zip(scores, prompts, strict=True)]
    return choices[means.index(max(means))]
