# SPDX-License-Identifier: Apache-2.0
"""Golden prompts: verdicts on answers, and the effect of a wrong answer on a rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from marks import in_cluster
from mizzen_operator.api.key import ServiceKey
from mizzen_operator.api.types import Prompt, Verification
from mizzen_operator.metrics import Metrics
from mizzen_operator.readiness.golden_prompts import Verdict, Verifier, judge_answer

KEY = ServiceKey("llm", "demo")
PROMPT = Prompt("2 + 2 =", " 4", 16)
ENGINES = "mizzen.dev/component=engine"
GOLDEN = {"prompts": [{"prompt": "2 + 2 =", "expected": "4"}]}


@pytest.mark.parametrize(
    ("status", "answer", "failure"),
    [
        (200, {"text": " 4, of course"}, ""),
        (200, {"text": " 5"}, "prompt 2 ('2 + 2 ='): expected ' 4', got ' 5'"),
        (200, {"text": " "}, "expected ' 4', got ' '; it was cut off by maxTokens"),
        (200, {"text": "x" * 100}, f"got '{'x' * 79}…'"),
        (400, {"error": {"message": "the prompt is too long"}}, "('2 + 2 ='): the prompt is too long"),
        (504, {"error": {"message": "no answer in 30 s"}}, "no answer in 30 s"),
        (504, {}, "HTTP 504"),
        (400, {"error": "Bad Request"}, "Bad Request"),  # this response does not come from the gateway itself
    ],
)
def test_an_answer_is_judged_by_the_expected_text(status: int, answer: dict[str, Any], failure: str) -> None:
    verdict = judge_answer(PROMPT, 2, status, answer)
    assert verdict is not None
    assert (verdict.failure == "") == (failure == "")
    assert failure in verdict.failure


@pytest.mark.parametrize(
    ("status", "answer"), [(0, {}), (401, {}), (404, {}), (409, {}), (503, {}), (200, {})]
)
def test_an_answer_that_says_nothing_about_the_engine_is_not_a_verdict(
    status: int, answer: dict[str, Any]
) -> None:
    assert judge_answer(PROMPT, 1, status, answer) is None


def test_without_an_expected_text_any_answer_passes() -> None:
    assert judge_answer(Prompt("a", "", 1), 1, 200, {"text": ""}) == Verdict()


class Scripted:
    """A fake client that answers prompts with the entries of a script; the last entry is repeated."""

    def __init__(self, *answers: tuple[int, str]) -> None:
        self.answers, self.prompts = list(answers), list[str]()

    async def ask_prompt(
        self, key: ServiceKey, uid: str, prompt: str, max_tokens: int, seconds: float
    ) -> tuple[int, dict[str, Any]]:
        self.prompts.append(prompt)
        status, text = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return status, {"text": text}


async def verdict(client: Scripted, verification: Verification) -> Verdict:
    """Let a verifier send the golden prompts through a client, and return its verdict."""
    changed = asyncio.Event()
    verifier = Verifier(client, Metrics(), lambda key: changed.set())
    try:
        async with asyncio.timeout(60):
            while (found := verifier.get_verdict(KEY, "uid", "name", verification)) is None:
                await changed.wait()
                changed.clear()
        return found
    finally:
        await verifier.close()


async def test_prompts_are_asked_in_order_until_one_answer_is_wrong() -> None:
    prompts = (PROMPT, Prompt("3 + 3 =", " 6", 16), Prompt("never", "", 16))
    client = Scripted((200, " 4"), (200, " 7"))
    found = await verdict(client, Verification(prompts, "Rollback", 30))
    assert found.failure == "prompt 2 ('3 + 3 ='): expected ' 6', got ' 7'"
    assert client.prompts == ["2 + 2 =", "3 + 3 ="]
    assert await verdict(Scripted((200, " 4")), Verification((PROMPT,), "Rollback", 30)) == Verdict()


async def test_an_attempt_without_an_answer_is_repeated() -> None:
    client = Scripted((503, ""), (0, ""), (200, " 4"))
    assert await verdict(client, Verification((PROMPT,), "Rollback", 30)) == Verdict()
    assert len(client.prompts) == 3


async def test_another_verification_starts_over_and_a_deleted_group_is_not_asked() -> None:
    changed, client = asyncio.Event(), Scripted((200, " 5"))
    verifier = Verifier(client, Metrics(), lambda key: changed.set())
    given = Verification((PROMPT,), "Rollback", 30)
    async with asyncio.timeout(60):
        assert verifier.get_verdict(KEY, "uid", "one", given) is None
        await changed.wait()
        found = verifier.get_verdict(KEY, "uid", "one", given)
        assert found is not None
        assert found.failure
        assert verifier.get_verdict(KEY, "uid", "two", given) is None
    verifier.retain(KEY, ())
    await asyncio.sleep(0)
    assert verifier.get_verdict(KEY, "uid", "two", given) is None, "a dropped verification starts over"
    await verifier.close()


@pytest.fixture
def body(
    api: Any, node: Any, operators: Any, namespace: str, minimal: Callable[..., Any]
) -> Iterator[Callable[..., dict[str, Any]]]:
    def make(**spec: Any) -> dict[str, Any]:
        given = minimal(**{"engine": {"device": "CPU"}, "gateway": {"replicas": 1}, **spec})
        given["metadata"]["namespace"] = namespace
        return api.create(given)

    yield make
    node.behaviour = type(node.behaviour)()
    api.delete("InferenceService", namespace, "demo")


class Demo:
    """A service with golden prompts, and queries about it."""

    def __init__(self, api: Any, namespace: str, eventually: Any) -> None:
        self.api, self.namespace, self.eventually = api, namespace, eventually

    def status(self) -> dict[str, Any]:
        return self.api.get("InferenceService", self.namespace, "demo").get("status", {})

    def condition(self, name: str) -> tuple[str, str, str]:
        found = [one for one in self.status().get("conditions", []) if one["type"] == name]
        return (found[0]["status"], found[0]["reason"], found[0]["message"]) if found else ("", "", "")

    def until(self, name: str, status: str, reason: str = "") -> None:
        self.eventually(
            lambda: self.condition(name)[0] == status and reason in ("", self.condition(name)[1]),
            expectation=f"{name} is {status}",
        )

    def patch(self, **spec: Any) -> None:
        self.api.patch("InferenceService", self.namespace, "demo", {"spec": spec})

    def live(self) -> list[dict[str, Any]]:
        pods = self.api.list("Pod", self.namespace, ENGINES)
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def revisions(self) -> set[str]:
        return {pod["metadata"]["labels"]["mizzen.dev/revision"] for pod in self.live()}


@pytest.fixture
def demo(api: Any, namespace: str, eventually: Any, body: Any) -> Demo:
    return Demo(api, namespace, eventually)


@in_cluster
def test_the_first_revision_serves_once_its_groups_pass(node: Any, body: Any, demo: Demo) -> None:
    node.behaviour.no_golden_prompts.add(demo.namespace)
    body(replicas=2, rollout={"verification": GOLDEN})
    demo.eventually(lambda: [g["state"] for g in demo.status().get("groups", [])] == ["Verifying"] * 2)
    assert demo.condition("Available")[0] == "False"
    node.behaviour.no_golden_prompts.clear()
    demo.until("Ready", "True")
    names = {pod["metadata"]["name"] for pod in demo.live()}
    assert {(name, "2 + 2 =") for name in names} <= set(node.golden_prompts), "every group was asked"


@in_cluster
def test_a_first_revision_that_fails_is_abandoned_until_the_spec_changes(
    node: Any, body: Any, demo: Demo
) -> None:
    node.behaviour.answers[demo.namespace] = "5"
    body(rollout={"verification": GOLDEN})
    demo.until("Failed", "True", "VerificationFailed")
    assert "expected '4', got '5'" in demo.condition("Failed")[2]
    demo.eventually(lambda: not demo.live(), expectation="the group is gone")
    node.behaviour.answers.clear()
    demo.patch(rollout={"progressDeadlineSeconds": 3000})
    demo.until("Ready", "True")
    assert "givenUp" not in demo.status()


@in_cluster
def test_a_revision_that_fails_is_rolled_back_without_an_outage(node: Any, body: Any, demo: Demo) -> None:
    node.behaviour.answers["/other"] = "5"
    body(replicas=2, rollout={"verification": GOLDEN})
    demo.until("Ready", "True")
    [old] = demo.revisions()
    node.reset_lowest(demo.namespace)
    demo.patch(model={"source": "file:///other"}, rollout={"maxSurge": 0, "maxUnavailable": 1})
    demo.until("Failed", "True", "VerificationFailed")
    new = demo.status()["updateRevision"]
    demo.eventually(
        lambda: demo.status()["availableReplicas"] == 2 and demo.revisions() == {old},
        expectation="the former revision is whole again",
    )
    status = demo.status()
    assert (status["currentRevision"], status["givenUp"]["revision"]) == (old, new)
    assert f"revision {old} continues to serve" in status["givenUp"]["message"]
    assert demo.condition("Progressing")[:2] == ("False", "VerificationFailed")
    assert demo.condition("Available")[0] == "True"
    assert node.lowest[demo.namespace] == 1, "never fewer than the spec allows"
    demo.patch(model={"source": "file:///opt/mizzen/models/demo"})
    demo.until("Ready", "True")
    assert demo.revisions() == {old}


@in_cluster
def test_on_failure_pause_keeps_the_failed_group_without_requests(node: Any, body: Any, demo: Demo) -> None:
    node.behaviour.answers["/other"] = "5"
    body(rollout={"verification": {**GOLDEN, "onFailure": "Pause"}})
    demo.until("Ready", "True")
    [old] = demo.revisions()
    demo.patch(model={"source": "file:///other"})
    demo.until("Failed", "True", "VerificationFailed")
    status = demo.status()
    states = {group["revision"]: (group["state"], group.get("reason")) for group in status["groups"]}
    assert states == {old: ("Serving", None), status["updateRevision"]: ("Failed", "VerificationFailed")}
    demo.patch(rollout={"verification": None})
    demo.until("Ready", "True")
    assert demo.revisions() == {status["updateRevision"]}, "without golden prompts it is let through"
