# SPDX-License-Identifier: Apache-2.0
"""Sends golden prompts, through gateways, to groups that await verification, and judges the answers.

If a pod has the readiness gate `mizzen.dev/verified`, gateways do not route to it until its condition of that
name is True. The operator sets the condition to True once the group has answered all of
`spec.rollout.verification.prompts` correctly.
Verdicts are only cached here: after a change of leader, the prompts are sent again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

from mizzen_operator.api.key import ServiceKey
from mizzen_operator.api.types import Prompt, Verification
from mizzen_operator.metrics import Metrics

FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.5, 15.0
"""Bounds of the back-off before prompts are sent again to a group that was unreachable or did not answer."""
MAX_EXCERPT = 80
"""Maximum number of characters that a message quotes from a prompt or an answer."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a group's golden prompts; `failure` is empty unless an answer was wrong."""

    failure: str = ""


class PromptClient(Protocol):
    """Client that sends a prompt to one engine through a gateway; see `GatewayWatch.ask_prompt`."""

    async def ask_prompt(
        self, key: ServiceKey, uid: str, prompt: str, max_tokens: int, seconds: float
    ) -> tuple[int, dict[str, Any]]:
        """Return the HTTP status and body of the response; the status is 0 if there was no response."""
        ...


@dataclass(slots=True)
class _GroupVerification:
    """Verification of one group by the golden prompts with the id `verification_id`; `task` sends them."""

    verification_id: str
    task: asyncio.Task[Verdict | None] | None = None
    attempts: int = 0


class Verifier:
    """Sends golden prompts to groups, one at a time to each group, and caches the verdicts."""

    def __init__(
        self, client: PromptClient, metrics: Metrics, on_change: Callable[[ServiceKey], None]
    ) -> None:
        """Create a verifier that sends prompts through `client`.

        After each attempt to verify a group, it calls `on_change` with the group's service.
        """
        self._client = client
        self._metrics = metrics
        self._on_change = on_change
        self._verifications: dict[ServiceKey, dict[str, _GroupVerification]] = {}

    def retain(self, key: ServiceKey, uids: Collection[str]) -> None:
        """Cancel the verifications of all groups of a service except `uids`, and drop their verdicts.

        Args:
            key: the service's key.
            uids: uids of the groups whose verifications continue.
        """
        verifications = self._verifications.get(key, {})
        for uid in [uid for uid in verifications if uid not in uids]:
            _cancel(verifications.pop(uid))
        if not verifications:
            self._verifications.pop(key, None)

    def get_verdict(
        self, key: ServiceKey, uid: str, verification_id: str, verification: Verification
    ) -> Verdict | None:
        """Return the verdict on a group. Before the first verdict, start to send prompts, and return None.

        Args:
            key: key of the group's service.
            uid: uid of the group's pod, which a gateway can send prompts to.
            verification_id: id of the golden prompts; a verdict for another id does not count.
            verification: the golden prompts.
        """
        verifications = self._verifications.setdefault(key, {})
        current = verifications.get(uid)
        if current is None or current.verification_id != verification_id:
            if current is not None:
                _cancel(current)
            current = verifications[uid] = _GroupVerification(verification_id)
        if current.task is not None and current.task.done():
            verdict = current.task.result()
            if verdict is not None:
                return verdict
            current.task = None
        if current.task is None:
            pause = 0.0
            if current.attempts:
                pause = min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**current.attempts)
            current.attempts = min(current.attempts + 1, 10)
            current.task = asyncio.create_task(self._ask(key, uid, verification, pause))
        return None

    async def close(self) -> None:
        """Cancel all verifications, and wait until their tasks have ended."""
        tasks = [
            verification.task
            for verifications in self._verifications.values()
            for verification in verifications.values()
            if verification.task
        ]
        for key in list(self._verifications):
            self.retain(key, ())
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(
        self, key: ServiceKey, uid: str, verification: Verification, pause: float
    ) -> Verdict | None:
        await asyncio.sleep(pause)
        verdict: Verdict | None = Verdict()
        for number, prompt in enumerate(verification.prompts, 1):
            status, answer = await self._client.ask_prompt(
                key, uid, prompt.prompt, prompt.max_tokens, verification.timeout
            )
            verdict = judge_answer(prompt, number, status, answer)
            if verdict is None or verdict.failure:
                break
        result = "undecided" if verdict is None else "refused" if verdict.failure else "passed"
        self._metrics.verifications.labels(result).inc()
        asyncio.get_running_loop().call_soon(self._on_change, key)
        return verdict


def judge_answer(prompt: Prompt, number: int, status: int, answer: dict[str, Any]) -> Verdict | None:
    """Judge a gateway's response to one golden prompt; return None if it says nothing about the engine.

    Args:
        prompt: the golden prompt.
        number: number of the prompt, from 1.
        status: HTTP status of the response; 0 if there was no response.
        answer: body of the response.
    """
    label = f"prompt {number} ({_excerpt(prompt.prompt)})"
    if status in (400, 504):
        error = answer.get("error")
        message = (error.get("message") if isinstance(error, dict) else error) or f"HTTP {status}"
        return Verdict(f"{label}: {str(message)[: 2 * MAX_EXCERPT]}")
    if status != 200 or not isinstance(answer.get("text"), str):
        return None
    text = answer["text"]
    if text.startswith(prompt.expected):
        return Verdict()
    truncated = prompt.expected.startswith(text) and text
    hint = "; it was cut off by maxTokens" if truncated else ""
    return Verdict(f"{label}: expected {_excerpt(prompt.expected)}, got {_excerpt(text)}{hint}")


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= MAX_EXCERPT else f"{text[: MAX_EXCERPT - 1]}…")


def _cancel(verification: _GroupVerification) -> None:
    if verification.task is not None:
        verification.task.cancel()
