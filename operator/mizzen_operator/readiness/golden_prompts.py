"""Golden prompts: has gateways ask groups that are held back, and judges what they answer.

A gateway keeps a pod with the readiness gate `mizzen.dev/verified` out of routing until that condition is
true; who makes it true is the operator, once all of `spec.rollout.verification.prompts` were answered right.
Nothing is kept here that matters: an operator that takes over asks again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

from mizzen_operator.api.key import Key
from mizzen_operator.api.types import Prompt, Verification
from mizzen_operator.metrics import Metrics

FIRST_PAUSE_SECONDS, MOST_PAUSE_SECONDS = 0.5, 15.0
"""Before a group is asked again that could not be asked, or lost the prompt."""
EXCERPT = 80
"""Characters of an expected or given text in a message."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a group's golden prompts; `refusal` is empty when all were answered right."""

    refusal: str = ""


class Asker(Protocol):
    """Whoever can put a prompt to an engine; see `GatewayListener.question`."""

    async def question(
        self, key: Key, uid: str, prompt: str, max_tokens: int, seconds: float
    ) -> tuple[int, dict[str, Any]]:
        """Returns HTTP status and answer."""
        ...


@dataclass(slots=True)
class _Trial:
    """The verification of one group by the prompts of one name."""

    name: str
    task: asyncio.Task[Verdict | None] | None = None
    tries: int = 0


class Verifier:
    """Asks groups their golden prompts, each group one prompt after another, and remembers the verdicts."""

    def __init__(self, asker: Asker, metrics: Metrics, on_change: Callable[[Key], None]) -> None:
        """Ask by `asker`; `on_change` is told the service of a group once there is a verdict, or none."""
        self._asker = asker
        self._metrics = metrics
        self._on_change = on_change
        self._trials: dict[Key, dict[str, _Trial]] = {}

    def keep(self, key: Key, uids: Collection[str]) -> None:
        """Forget all groups of a service but these."""
        trials = self._trials.get(key, {})
        for uid in [uid for uid in trials if uid not in uids]:
            _end(trials.pop(uid))
        if not trials:
            self._trials.pop(key, None)

    def verdict(self, key: Key, uid: str, name: str, verification: Verification) -> Verdict | None:
        """The verdict on a group; None while there is none, and then it is being asked.

        Args:
            key: the service.
            uid: of the group's pod, which a gateway can ask.
            name: of the golden prompts: a verdict by others does not count.
            verification: the golden prompts.
        """
        trials = self._trials.setdefault(key, {})
        trial = trials.get(uid)
        if trial is None or trial.name != name:
            if trial is not None:
                _end(trial)
            trial = trials[uid] = _Trial(name)
        if trial.task is not None and trial.task.done():
            found = trial.task.result()
            if found is not None:
                return found
            trial.task = None
        if trial.task is None:
            pause = min(MOST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**trial.tries) if trial.tries else 0.0
            trial.tries = min(trial.tries + 1, 10)
            trial.task = asyncio.create_task(self._ask(key, uid, verification, pause))
        return None

    async def close(self) -> None:
        """Ask nobody any more."""
        tasks = [one.task for trials in self._trials.values() for one in trials.values() if one.task]
        for key in list(self._trials):
            self.keep(key, ())
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, key: Key, uid: str, verification: Verification, pause: float) -> Verdict | None:
        await asyncio.sleep(pause)
        found: Verdict | None = Verdict()
        for number, prompt in enumerate(verification.prompts, 1):
            status, answer = await self._asker.question(
                key, uid, prompt.prompt, prompt.max_tokens, verification.timeout
            )
            found = judge(prompt, number, status, answer)
            if found is None or found.refusal:
                break
        result = "undecided" if found is None else "refused" if found.refusal else "passed"
        self._metrics.verifications.labels(result).inc()
        asyncio.get_running_loop().call_soon(self._on_change, key)
        return found


def judge(prompt: Prompt, number: int, status: int, answer: dict[str, Any]) -> Verdict | None:
    """Judge what a gateway says of one golden prompt; None when it says nothing of the engine.

    Args:
        prompt: the golden prompt.
        number: its number, from 1.
        status: HTTP status of the answer; 0 without one.
        answer: the body.
    """
    what = f"prompt {number} ({_excerpt(prompt.prompt)})"
    if status in (400, 504):
        error = answer.get("error")
        words = (error.get("message") if isinstance(error, dict) else error) or f"HTTP {status}"
        return Verdict(f"{what}: {str(words)[: 2 * EXCERPT]}")
    if status != 200 or not isinstance(answer.get("text"), str):
        return None
    text = answer["text"]
    if text.startswith(prompt.expected):
        return Verdict()
    short = "; it ended for want of maxTokens" if prompt.expected.startswith(text) and text else ""
    return Verdict(f"{what}: expected {_excerpt(prompt.expected)}, got {_excerpt(text)}{short}")


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= EXCERPT else f"{text[: EXCERPT - 1]}…")


def _end(trial: _Trial) -> None:
    if trial.task is not None:
        trial.task.cancel()
