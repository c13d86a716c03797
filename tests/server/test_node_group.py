# SPDX-License-Identifier: Apache-2.0
"""Supervisors of a group of nodes: real sockets and keys, no ranks, a simulated clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_process import DEMO, SECONDS
from mizzen.server.config import EngineConfig
from mizzen.server.config_check import check_config
from mizzen.server.exit_reason import ExitReason
from mizzen.server.metric_catalogue import Phase
from mizzen.server.nodes.follower_node import FollowerNode
from mizzen.server.nodes.group import describe_differences, shared_settings
from mizzen.server.nodes.leader_node import LeaderNode
from mizzen.server.ranks.plan_memory import plan_memory_bytes
from mizzen.wire.curve_keys import KeyFolder, find_pair, write_keys
from mizzen.wire.endpoint import UnsafeEndpoint
from mizzen.wire.ranks.node_messages import PROTOCOL, Join, NodeClient, NodeRefused, RankReport
from mizzen.wire.ranks.plan_ring import CAPACITY
from ports import free_ports

LEADER = "127.0.0.2"


class LocalGroup:
    """Node 0 and other nodes in one process, with a simulated clock (`now`, in seconds)."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.now = folder, free_ports(LEADER, 3), 100.0
        self.nodes: list[LeaderNode | FollowerNode] = []

    def config(self, rank: int, nodes: int = 2, **options: Any) -> EngineConfig:
        address = LEADER if rank == 0 else f"127.0.0.{3 + rank}"
        settings = {"tensor": nodes, "nodes": nodes, "ranks_port": self.port, "node_rank": rank, **options}
        return EngineConfig(model=str(DEMO), ranks_address=address, leader_address=LEADER, **settings)

    def leader(self, keys: Path | None = None, **options: Any) -> LeaderNode:
        self.nodes.append(LeaderNode(self.config(0, **options), KeyFolder(keys, "engine") if keys else None))
        return self.nodes[-1]  # type: ignore[return-value]

    def follower(self, rank: int = 1, keys: Path | None = None, **options: Any) -> FollowerNode:
        folder = KeyFolder(keys, "engine") if keys else None
        self.nodes.append(FollowerNode(self.config(rank, **options), folder, self.now))
        return self.nodes[-1]  # type: ignore[return-value]

    def exchange_reports(
        self, *nodes: LeaderNode | FollowerNode, own: ExitReason | None = None, exit_requested: bool = False
    ) -> None:
        for node in nodes:
            last = node is nodes[-1]
            node.exchange_reports([RANK], own if last else None, exit_requested and last, self.now)

    def until(self, condition: Callable[[], Any], *nodes: LeaderNode | FollowerNode, **report: Any) -> Any:
        """Let nodes exchange messages until a condition is true; return its value. The clock stands still."""
        deadline = time.monotonic() + SECONDS
        while not (value := condition()):
            assert time.monotonic() < deadline
            self.exchange_reports(*nodes, **report)
            time.sleep(0.01)
        return value

    def start_group(self, **options: Any) -> tuple[LeaderNode, FollowerNode]:
        leader, follower = self.leader(**options), self.follower(**options)
        self.until(lambda: leader.started and follower.started and leader.phases[0], leader, follower)
        return leader, follower


RANK = RankReport(int(Phase.SERVING), "", 0.1, 7, 6, 123)
FAILED = ExitReason(1, "rank_failed", "rank 1 failed: ValueError: x")
DIED = ExitReason(1, "rank_died", "rank 1 (process 123) was killed by signal 9")
WRONG = ExitReason(
    2, "wrong configuration", "rank 1 failed: ValueError: --attention-decode fa3 does not run here"
)


@pytest.fixture
def local_group(tmp_path: Path) -> Iterator[LocalGroup]:
    group = LocalGroup(tmp_path)
    yield group
    for node in group.nodes:
        node.close(ExitReason(0))


def test_the_group_starts_once_all_nodes_have_joined(local_group: LocalGroup) -> None:
    leader, first = local_group.leader(nodes=3), local_group.follower(nodes=3)
    local_group.until(lambda: first.group, leader, first)
    assert not leader.started
    assert leader.describe_wait() == "waits for nodes 2 of 3"
    assert first.describe_wait() == "node 0 waits for other nodes"
    second = local_group.follower(2, nodes=3)
    local_group.until(lambda: first.started and second.started, leader, first, second)
    assert first.group == second.group == leader.group
    local_group.until(lambda: leader.phases == [Phase.SERVING] * 2, leader, first, second)
    assert [heartbeat.launched for heartbeat in leader.read_heartbeats(local_group.now)] == [7, 7]
    assert leader.decide_exit(None, local_group.now) is None


def test_a_node_lost_before_the_start_is_waited_for_again(local_group: LocalGroup) -> None:
    leader, first = local_group.leader(nodes=3), local_group.follower(nodes=3)
    local_group.until(lambda: first.group, leader, first)

    def node_is_forgotten() -> bool:
        local_group.now += 60  # earlier messages may still be in transit
        return leader.describe_wait() == "waits for nodes 1, 2 of 3"

    local_group.until(node_is_forgotten, leader)


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"page_size": 32, "prefix_cache": "none"}, "--page-size (32 there, 16 here), --prefix-cache (none"),
        ({"revision": "b"}, "--revision (b there,  here)"),
        ({"tensor": 4}, "--tensor (4 there, 2 here)"),
    ],
)
def test_a_node_with_other_settings_is_rejected_with_the_difference(
    changed: dict[str, Any], difference: str, local_group: LocalGroup
) -> None:
    leader, follower = local_group.leader(), local_group.follower(**changed)
    end = local_group.until(lambda: follower.decide_exit(None, local_group.now), leader, follower)
    assert (end.code, end.kind) == (2, "refused")
    assert difference in end.reason
    assert difference in leader.describe_wait()
    assert not leader.started


def test_another_release_and_an_invalid_node_rank_are_rejected(local_group: LocalGroup) -> None:
    leader = local_group.leader()
    for number, (protocol, node, reason) in enumerate(
        [(PROTOCOL + 1, 1, "runs another release"), (PROTOCOL, 2, "--node-rank 2 is not between 1 and 1")]
    ):
        client = NodeClient(f"tcp://{LEADER}:{local_group.port}", None, f"client-{number}")
        client.send(Join(protocol, "life", node, {}))
        received: list[Any] = []
        local_group.until(lambda: received.extend(client.receive()) or received, leader)  # noqa: B023 - called here alone
        assert isinstance(received[0], NodeRefused)
        assert reason in received[0].reason
        client.close()


def test_no_node_can_join_a_started_group(local_group: LocalGroup) -> None:
    leader, _ = local_group.start_group()
    late_follower = local_group.follower()
    end = local_group.until(lambda: late_follower.decide_exit(None, local_group.now), leader, late_follower)
    assert (end.code, end.kind) == (1, "refused")
    assert "all its nodes have to restart" in end.reason


def test_a_duplicate_node_rank_is_rejected_and_the_first_node_stays(local_group: LocalGroup) -> None:
    leader, first = local_group.leader(nodes=3), local_group.follower(nodes=3)
    local_group.until(lambda: first.group, leader, first)
    second = local_group.follower(nodes=3)

    def report() -> ExitReason | None:
        local_group.now += 0.02
        return second.decide_exit(None, local_group.now)

    end = local_group.until(report, leader, first, second)
    assert (end.code, end.kind) == (1, "refused")
    assert "another node 1 has already joined: give each node its own --node-rank" in end.reason
    assert first.decide_exit(None, local_group.now) is None
    third = local_group.follower(2, nodes=3)
    local_group.until(lambda: first.started and third.started, leader, first, third)


def test_a_restarted_node_takes_its_own_place(local_group: LocalGroup) -> None:
    """Node 0 accepts the new process even before noticing that the former process is gone."""
    leader, first = local_group.leader(nodes=3), local_group.follower(nodes=3)
    local_group.until(lambda: first.group, leader, first)
    first.close(ExitReason(0))
    local_group.nodes.remove(first)
    restarted = local_group.follower(nodes=3)

    def is_accepted() -> bool:
        local_group.now += 0.02
        assert restarted.decide_exit(None, local_group.now) is None
        return bool(restarted.group)

    local_group.until(is_accepted, leader, restarted)
    assert leader.describe_wait() == "waits for nodes 2 of 3"


def test_a_restarted_node_0_rejects_nodes_of_its_former_group(local_group: LocalGroup) -> None:
    leader, follower = local_group.start_group()
    leader._server.close()
    local_group.nodes.remove(leader)
    new = local_group.leader()
    end = local_group.until(lambda: follower.decide_exit(None, local_group.now), new, follower)
    assert (end.kind, "node 0 has restarted" in end.reason) == ("refused", True)


def test_a_node_with_other_keys_cannot_join(local_group: LocalGroup, tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        write_keys(tmp_path / name)
    leader = local_group.leader(tmp_path / "ours")
    outsider, follower = (
        local_group.follower(1, tmp_path / "theirs"),
        local_group.follower(1, tmp_path / "ours"),
    )
    local_group.until(lambda: follower.started, leader, outsider, follower)
    assert outsider.group == ""
    assert (
        outsider.describe_wait()
        == f"waits for node 0 at tcp://{LEADER}:{local_group.port} to answer; both nodes need the same keys"
    )
    assert follower.key == leader.key == (tmp_path / "ours" / "engine.public").read_text()


def test_nodes_connect_with_either_generation_of_keys(local_group: LocalGroup, tmp_path: Path) -> None:
    """Node 0 has the current and the next keys; the other node first has only the next keys, then both."""
    current, next_only = tmp_path / "both", tmp_path / "late"
    write_keys(current)
    write_keys(next_only)
    for half in ("public", "secret"):
        (current / f"next.engine.{half}").write_bytes((next_only / f"engine.{half}").read_bytes())
    leader, follower = local_group.leader(current), local_group.follower(1, next_only)
    for _ in range(20):
        local_group.exchange_reports(leader, follower)
    assert follower.group == ""
    for half in ("public", "secret"):
        (next_only / f"next.engine.{half}").write_bytes((current / f"engine.{half}").read_bytes())

    def has_connected() -> bool:
        local_group.now += 0.2
        return follower.started

    local_group.until(has_connected, leader, follower)
    assert follower.key == (current / "engine.public").read_text()
    pair = find_pair(next_only, "engine", follower.key)
    assert pair.public.decode() == follower.key


def test_node_0_switches_to_new_keys_while_it_waits(local_group: LocalGroup, tmp_path: Path) -> None:
    write_keys(tmp_path / "keys")
    leader = local_group.leader(tmp_path / "keys")
    old_key = leader.key
    write_keys(tmp_path / "keys")
    follower = local_group.follower(1, tmp_path / "keys")
    local_group.now += 10
    local_group.until(lambda: follower.started, leader, follower)
    assert old_key != leader.key == follower.key


@pytest.mark.parametrize("kind", [FAILED, DIED, WRONG])
def test_a_failed_node_stops_the_group(kind: ExitReason, local_group: LocalGroup) -> None:
    leader, follower = local_group.start_group()

    def leader_exit() -> ExitReason | None:
        local_group.now += 0.05
        return leader.decide_exit(None, local_group.now)

    end = local_group.until(leader_exit, leader, follower, own=kind)
    assert (end.code, end.kind, end.reason) == (kind.code, kind.kind, f"node 1: {kind.reason}")
    leader.close(end)
    local_group.nodes.remove(leader)
    end = local_group.until(lambda: follower.decide_exit(kind, local_group.now), follower)
    assert (end.code, end.kind, end.reason) == (1, "group_failed", f"node 1: {kind.reason}")


def test_a_killed_rank_takes_precedence_over_consequential_failures(local_group: LocalGroup) -> None:
    """Rank 0 fails because a connection was closed, before node 1 reports that its rank was killed."""
    leader, follower = local_group.start_group()
    own = ExitReason(1, "rank_failed", "rank 0 failed: connection closed by peer")
    assert leader.decide_exit(own, local_group.now) is None
    end = local_group.until(lambda: leader.decide_exit(own, local_group.now), leader, follower, own=DIED)
    assert end.reason == f"node 1: {DIED.reason}"


def test_a_silent_node_stops_the_group(local_group: LocalGroup) -> None:
    leader, follower = local_group.start_group()
    local_group.now += 7.9
    assert leader.decide_exit(None, local_group.now) is None
    assert follower.decide_exit(None, local_group.now) is None
    assert leader.read_heartbeats(local_group.now)[0].alive == local_group.now, (
        "ranks of a silent node are not reported as stalled"
    )
    local_group.now += 0.5
    leader_exit = leader.decide_exit(None, local_group.now)
    assert leader_exit is not None
    assert (leader_exit.kind, leader_exit.reason[:28]) == ("node_lost", "node 1 has sent nothing for ")
    follower_exit = follower.decide_exit(None, local_group.now)
    assert follower_exit is not None
    assert follower_exit.kind == "leader_lost"


def test_a_node_asked_to_exit_waits_for_node_0(local_group: LocalGroup) -> None:
    leader, follower = local_group.start_group()
    local_group.until(lambda: leader.exit_requested, leader, follower, exit_requested=True)
    assert follower.decide_exit(ExitReason(0), local_group.now) is None, (
        "the follower must not exit before node 0"
    )
    leader.close(ExitReason(0))
    local_group.nodes.remove(leader)
    assert local_group.until(lambda: follower.decide_exit(None, local_group.now), follower) == ExitReason(0)


def test_ranks_of_nodes_without_a_report_are_included(local_group: LocalGroup) -> None:
    leader, followers = local_group.leader(nodes=3), [local_group.follower(rank, nodes=3) for rank in (1, 2)]
    local_group.until(lambda: leader.started, leader, *followers)
    assert len(leader.read_heartbeats(local_group.now)) == 2
    local_group.until(
        lambda: all(heartbeat.serving for heartbeat in leader.read_heartbeats(local_group.now)),
        leader,
        *followers,
    )


def test_steps_too_large_for_shared_memory_are_rejected() -> None:
    config = EngineConfig(model=str(DEMO), tensor=2, context_length=1 << 20, prefill_chunk_tokens=10**8)
    with pytest.raises(
        ValueError, match=r"--prefill-chunk-tokens 100000000 .* with --tensor, at most 33554432 are"
    ):
        check_config(config)


def test_the_shared_memory_holds_the_largest_plan() -> None:
    """In this plan, every slot has the longest possible cached prefix and lists all pages of the prefix."""
    config = EngineConfig(model=str(DEMO), tensor=2, context_length=1 << 17)
    assert plan_memory_bytes(config) > 2 * 12 * config.max_running_requests * (1 << 17) // config.page_size
    assert plan_memory_bytes(EngineConfig(model=str(DEMO), tensor=2)) == CAPACITY


def test_nodes_on_other_machines_require_keys() -> None:
    config = EngineConfig(model=str(DEMO), tensor=2, nodes=2, ranks_address="192.0.2.1")
    with pytest.raises(UnsafeEndpoint, match="needs CURVE keys"):
        check_config(config)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"nodes": 3}, "--tensor 2 must be a multiple of --nodes 3"),
        ({"nodes": 2, "node_rank": 2}, "--node-rank 2 must be below --nodes 2"),
        ({"nodes": 2, "node_rank": 1}, "--node-rank 1 needs --leader-address"),
        ({"nodes": 2, "all_reduce": "fused"}, "--all-reduce fused only works within one machine"),
    ],
)
def test_invalid_group_options_are_rejected(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        EngineConfig(model=str(DEMO), tensor=2, **options)


def test_per_node_options_are_not_compared() -> None:
    leader_config = EngineConfig(model=str(DEMO), tensor=2, nodes=2, threads=1)
    follower_config = EngineConfig(
        model=str(DEMO), tensor=2, nodes=2, threads=2, node_rank=1, leader_address=LEADER, http_port=1
    )
    assert describe_differences(shared_settings(leader_config), shared_settings(follower_config)) == []
    different = EngineConfig(model=str(DEMO), tensor=2, nodes=2, dtype="bfloat16")
    assert describe_differences(shared_settings(leader_config), shared_settings(different)) == [
        "--dtype (bfloat16 there, auto here)"
    ]
