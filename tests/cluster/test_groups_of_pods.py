# SPDX-License-Identifier: Apache-2.0
"""Groups of several pods as real processes: ranks find each other by DNS name, and fail as one group."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import yaml

from demo_model import QUESTION, trained_answer

ROOT = Path(__file__).parents[2]
NAME = "pair"
SECONDS = 240.0

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("cluster-demo")]


def wait_until(check: Callable[[], Any], expectation: str) -> Any:
    deadline = time.monotonic() + SECONDS
    while not (value := check()):
        assert time.monotonic() < deadline, f"still not: {expectation}"
        time.sleep(0.1)
    return value


class Pairs:
    """A service with groups of two pods, and queries about it."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster

    def pods(self) -> dict[str, dict[str, Any]]:
        selector = f"mizzen.dev/service={NAME},mizzen.dev/component=engine"
        items = self.cluster.get("pods", "-l", selector)["items"]
        return {pod["metadata"]["name"]: pod for pod in items}

    def settled(self, groups: int) -> bool:
        now = self.cluster.get("infsvc", NAME)
        status = now.get("status", {})
        ready = [c for c in status.get("conditions", []) if c["type"] == "Ready"]
        return bool(
            ready
            and ready[0]["status"] == "True"
            and status["observedGeneration"] == now["metadata"]["generation"]
            and status["availableReplicas"] == groups
            and len(self.pods()) == 2 * groups
        )

    def ask(self) -> str | None:
        client = openai.OpenAI(
            base_url=self.cluster.url(NAME), api_key="none", max_retries=0, timeout=SECONDS
        )
        answer = client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": QUESTION}], temperature=0
        )
        return answer.choices[0].message.content

    def rank(self, pod: dict[str, Any]) -> psutil.Process:
        """Return the process that executes a shard of the model in a pod."""
        folder = f"{self.cluster.dir}/pods/{pod['metadata']['uid']}/"
        ranks = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                of_pod = process.environ().get("MIZZEN_LOCAL_MARK", "").startswith(folder)
                if of_pod and {"mizzen.server.ranks.leader", "mizzen.server.ranks.follower"} & set(
                    process.cmdline()
                ):
                    ranks.append(process)
        [rank] = ranks
        return rank


@pytest.fixture
def pairs(cluster: Any) -> Iterator[Pairs]:
    service = copy.deepcopy(yaml.safe_load((ROOT / "examples/inferenceservice.yaml").read_text()))
    service["metadata"]["name"] = NAME
    service["spec"] |= {"replicas": 2, "parallelism": {"tensor": 2}, "accelerator": {"perPod": 1}}
    service["spec"]["engine"]["extraArgs"] = ["--threads", "1"]
    cluster.apply(service)
    yield Pairs(cluster)
    cluster.kubectl("delete", "infsvc", NAME, "--ignore-not-found", "--wait=true", "--timeout=60s")


def test_if_a_rank_of_a_worker_pod_is_killed_its_group_is_replaced_while_the_other_group_answers(
    pairs: Pairs,
) -> None:
    wait_until(lambda: pairs.settled(2), "two groups of two pods serve")
    assert pairs.ask() == trained_answer(QUESTION)
    before = pairs.pods()
    leader, worker = sorted(
        name for name in before if before[name]["metadata"]["labels"]["mizzen.dev/group"] == "0"
    )
    assert before[worker]["status"]["podIP"] != before[leader]["status"]["podIP"]
    pairs.rank(before[worker]).kill()
    answers = []
    deadline = time.monotonic() + SECONDS
    while {leader, worker} & set(pairs.pods()) or not answers:
        answers.append(pairs.ask())
        assert time.monotonic() < deadline, "the group is not deleted"
    assert set(answers) == {trained_answer(QUESTION)}
    wait_until(lambda: pairs.settled(2), "two whole groups again")
    after = pairs.pods()
    new = sorted(set(after) - set(before))
    assert new == sorted(f"{leader[:-1]}1{end}" for end in ("", "-1"))
    status = pairs.cluster.get("infsvc", NAME)["status"]
    assert [failure["name"] for failure in status.get("recentFailures", [])] == [leader], status
    assert "rank_died: rank 1" in pairs.cluster.logs(
        worker
    ) or "was killed by signal 9" in pairs.cluster.logs(worker)
    assert "node 1: rank 1 (process" in pairs.cluster.logs(leader)
    assert pairs.ask() == trained_answer(QUESTION)
